# Run by guest-init.sh with $B (busybox) and $SHARES (tags of the writable folders; control/TAG has each one's path).
# Makes the host's file system visible, makes two RDMA devices, runs control/job, and leaves its exit status in
# control/status.
fail() {
    echo "$*" >>/control/failed
    $B poweroff -f
}
OVER=trans=virtio,version=9p2000.L,msize=262144

# The host's root read-only, and over it a layer in memory. cache=loose: nobody changes it while the guest looks.
$B mount -t 9p -o "ro,$OVER,cache=loose" root /lower || fail "the host's root file system can't be mounted"
$B mount -t tmpfs -o size=75% layer /layer
$B mkdir /layer/upper /layer/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work overlay /new ||
    fail "the layer over the root file system can't be mounted"
for folder in proc sys dev; do $B mount -o bind /$folder /new/$folder; done
$B mount -t tmpfs run /new/run
$B mkdir -m 1777 /new/run/tmp # temporary files: not in /tmp, which the host's programs go on changing below the layer
$B mkdir -p /dev/shm /dev/pts /new/run/lock /new/run/control
$B mount -t tmpfs -o mode=1777,size=75% shm /new/dev/shm
$B mount -t devpts devpts /new/dev/pts
$B ln -s /proc/self/fd /dev/fd
$B hostname verbs-vm
for tag in $SHARES; do
    path="$($B cat /control/$tag)"
    $B mkdir -p "/new$path"
    # cache=mmap: pages can be mapped, and what the host changes is seen
    $B mount -t 9p -o "$OVER,cache=mmap" "$tag" "/new$path" || fail "$path can't be mounted"
done
$B mount -o bind /control /new/run/control

# Two RoCE devices at the two ends of one virtual cable, both in the first network namespace, since the rxe of Debian's
# kernel works in no other. What goes from one to the other goes over the cable: rxe sends through the interface of its
# own device, and accept_local lets the other end take a packet from an address that is this machine's.
echo 100000 >/proc/sys/net/core/netdev_max_backlog # or a READ of 1 MiB overruns it, and waits for 0.1 s
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
echo 0 >/proc/sys/net/ipv4/conf/default/rp_filter
echo 1 >/proc/sys/net/ipv4/conf/default/accept_local
the_cable() {
    echo link set lo up
    echo link add cable0 address 02:00:00:77:00:01 mtu 9000 type veth peer name cable1 address 02:00:00:77:00:02 mtu 9000
    for end in 0 1; do
        echo "addr add 10.77.0.$((1 + end))/32 dev cable$end"
        echo "link set cable$end up"
        echo "neigh add 10.77.0.$((2 - end)) lladdr 02:00:00:77:00:0$((2 - end)) dev cable$end nud permanent"
    done
}
the_cable >/control/cable
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
$B chroot /new /bin/sh -ec '
    ip -batch /run/control/cable
    rdma link add rxe0 type rxe netdev cable0
    rdma link add rxe1 type rxe netdev cable1' 2>>/control/failed || fail "the RDMA devices can't be made"

echo >/control/up
$B chroot /new /bin/sh /run/control/job </dev/null >>/control/out 2>>/control/err
echo $? >/control/status.new
$B sync
$B mv /control/status.new /control/status
while :; do $B sleep 60; done # the host ends the machine
