#!/bin/busybox sh
# The first process of the guest, from its initial file system: loads the modules, then goes on with what the host
# says (guest-start.sh, over the shared folder "control").
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do # their names begin with their turn
    $B insmod "$module" || echo "$module can't be loaded"
done
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none control /control && . /control/start
$B poweroff -f
