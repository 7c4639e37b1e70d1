"""Runs the C tests for aarch64 on a machine of another kind: under qemu's user mode, and in a virtual machine.

    python -m tests.engine.c.aarch64 COMMAND

    setup [--vm]            install the needed packages (Debian; as root or with sudo)
    emulate PROGRAM...      run test programs under qemu-aarch64; NOT_EMULATED names the tests that it cannot run
    machine PROGRAM...      run them under Debian's arm64 kernel in a full emulator; needs neither KVM nor root

The tests in NOT_EMULATED are tried nevertheless: if one passes, the list is wrong, which is an error.

Neither shows the effects of weaker memory order: on x86 the emulator's loads and stores have x86's order.

Exit status: 0 if every test passed that can pass, 127 if a program or package is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.support.packages import PackagesError, install

HERE = Path(__file__).resolve().parent
# The Makefile has the same path.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soft-memory-box/aarch64"
PACKAGES = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user-static")
VM_PACKAGES = ("qemu-system-arm",)
VM_LIMIT_S = 1800.0  # all tests: 5 minutes on two cores shared with others, 10 on very busy ones
VM_SLOWNESS = 5  # check.c's time limits, multiplied: killed_at_every_point takes a minute on busy cores

# Tests that cannot pass under qemu's user mode, by the feature that it lacks (version 7.2, Debian 12). All of them
# pass in the virtual machine.
NOT_EMULATED: dict[str, dict[str, tuple[str, ...]]] = {
    "it has no robust futexes (set_robust_list is ENOSYS): the lock of a process that died stays locked": {
        "test_atomic.c": ("killed_while_adding", "death_wakes_who_waits"),
        "test_order.c": ("local_clients_beside_recovery",),
        "test_recovery.c": (
            "killed_at_every_point",
            "killed_in_recovery",
            "local_client_between_marks",
            "state_is_gone",
            "local_client_waits_for_recovery",
            "lost_journal",
            "write_of_version_4",
        ),
    },
    "its madvise(MADV_COLLAPSE) does nothing, and says that it did": {"test_segment.c": ("large_pages",)},
}

# The guest's first process. It runs the tests by run.sh, as everywhere.
GUEST_INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin SMB_TEST_SLOWNESS={VM_SLOWNESS} JOBS=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir /dev/shm /tmp
mount -t tmpfs -o mode=1777,size=75% shm /dev/shm
ip link set lo up
/run.sh /aarch64-vm/*
echo "aarch64-vm: status $?"
poweroff -f
"""

# Unpacks packages of arm64 without installing them, with apt's lists in a separate folder, so that this machine keeps
# one architecture. --kernel stands for the newest small kernel.
UNPACK = r"""
mkdir -p apt/state/lists/partial apt/cache/archives/partial
touch apt/status
cat >apt.conf <<END
Dir::State "$PWD/apt/state";
Dir::State::status "$PWD/apt/status";
Dir::Cache "$PWD/apt/cache";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
END
apt-get -c apt.conf -qq update
if [ "$1" = --kernel ]; then
    kernel=$(apt-cache -c apt.conf depends linux-image-cloud-arm64 | grep -o 'linux-image-[0-9].*' | head -n 1)
    shift
    set -- "$kernel" "$@"
fi
apt-get -c apt.conf -qq download "$@"
for package in ./*.deb; do dpkg -x "$package" root; done
echo "aarch64: unpacked $*" >&2
"""


class MissingError(Exception):
    """A needed program or file is missing and cannot be fetched."""


def fetch(made: dict[Path, str], *packages: str) -> None:
    """Make these files and folders, each from its place in Debian's packages for arm64, unless they exist already."""
    if all(path.exists() for path in made):
        return
    with tempfile.TemporaryDirectory(prefix="aarch64-") as name:
        command = ["bash", "-euo", "pipefail", "-c", UNPACK, "bash", *packages]
        if subprocess.run(command, cwd=name, check=False).returncode:
            raise MissingError(
                "Debian's packages for arm64 could not be downloaded: apt-get and a package mirror are needed"
            )
        CACHE.mkdir(parents=True, exist_ok=True)
        for path, pattern in made.items():
            (found,) = (Path(name) / "root").glob(pattern)
            draft = path.with_name(f"{path.name}.{os.getpid()}.new")
            shutil.copytree(found, draft, symlinks=True) if found.is_dir() else shutil.copyfile(found, draft)
            if path.is_dir():
                shutil.rmtree(path)
            draft.replace(path)


def emulate(programs: list[Path]) -> int:
    """Run the programs under qemu's user mode, one after the other."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not qemu:
        raise MissingError("qemu-aarch64-static is missing; install it: python -m tests.engine.c.aarch64 setup")
    all_passed, all_failed, all_named, stale = 0, 0, 0, []
    for program in programs:
        file = f"{program.name}.c"
        named = {test for tests in NOT_EMULATED.values() for test in tests.get(file, ())}
        begin = time.monotonic()
        done = subprocess.run(
            [qemu, program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            env=os.environ | {"SMB_TEST_HANGING": " ".join(named)},
        )  # fmt: skip
        failed = set(re.findall(r"^FAILED (\w+) ", done.stdout, re.MULTILINE))
        counts = re.search(r": (\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
        passed, unnamed = (int(counts[1]), len(failed - named)) if counts else (0, 1)
        if unnamed:
            print(done.stdout, end="")
        stale += [f"{file}: {test}" for test in sorted(named - failed)] if counts else []
        print(
            f"aarch64: {file}: {passed} passed, {unnamed} failed"
            f"{f', {len(failed & named)} not run under emulation' if failed & named else ''}"
            f" ({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
        all_passed, all_failed, all_named = all_passed + passed, all_failed + unnamed, all_named + len(failed & named)
    names = {program.name for program in programs}
    for reason, tests in NOT_EMULATED.items():
        for file, listed in tests.items():
            if Path(file).stem in names:
                print(f"not run under emulation: {file}: {', '.join(listed)}: {reason}")
    for test in stale:
        print(f"{test} is in NOT_EMULATED (aarch64.py), but passes or does not exist any more")
    print(
        f"{all_passed} passed, {all_failed} failed, {all_named} not run under emulation (tried: they can't pass)",
        flush=True,
    )
    return int(all_failed > 0 or all_passed == 0 or bool(stale))


def archive_entry(name: str, mode: int, data: bytes = b"") -> bytes:
    """Return a file as Linux reads it from its initial file system (cpio, the format "newc")."""
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name.encode() + b"\0"
    return b"".join(part + b"\0" * (-len(part) % 4) for part in (head, data))


def initial_files(programs: list[Path]) -> bytes:
    """Return the guest's file system."""
    folders = ("bin", "proc", "sys", "dev", "aarch64-vm")
    files = {"init": GUEST_INIT.encode(), "run.sh": (HERE / "run.sh").read_bytes()}
    files |= {"bin/busybox": (CACHE / "busybox").read_bytes()}
    files |= {f"aarch64-vm/{program.name}": program.read_bytes() for program in programs}
    return b"".join(
        (
            *(archive_entry(folder, stat.S_IFDIR | 0o755) for folder in folders),
            *(archive_entry(name, stat.S_IFREG | 0o755, data) for name, data in files.items()),
            archive_entry("TRAILER!!!", 0),
        )
    )


def machine(programs: list[Path]) -> int:
    """Run the programs in a virtual machine and print its console, whose last line has the exit status."""
    if not shutil.which("qemu-system-aarch64") or not (CACHE / "vmlinuz").exists():
        raise MissingError(
            "qemu-system-aarch64 or its kernel is missing; install them: python -m tests.engine.c.aarch64 setup --vm"
        )
    with tempfile.TemporaryDirectory(prefix="aarch64-vm-") as name:
        (Path(name) / "initrd").write_bytes(initial_files(programs))
        command = ["setpriv", "--pdeathsig", "KILL", "qemu-system-aarch64", "-machine", "virt", "-smp", "2"]
        # pauth-impdef: signs pointers with qemu's own hash; the architecture's hash takes two thirds of all time.
        command += ["-cpu", "max,pauth-impdef=on", "-accel", "tcg,thread=multi", "-m", "2048", "-nodefaults"]
        command += ["-nographic", "-no-reboot", "-serial", "stdio"]
        command += ["-kernel", f"{CACHE / 'vmlinuz'}", "-initrd", f"{name}/initrd"]
        command += ["-append", "console=ttyAMA0 quiet panic=-1"]
        guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace")
        limit = threading.Timer(VM_LIMIT_S, guest.kill)
        limit.start()
        begin, status = time.monotonic(), None
        try:
            assert guest.stdout
            for line in guest.stdout:
                print(line.rstrip(), flush=True)
                if said := re.match(r"aarch64-vm: status (\d+)", line):
                    status = int(said[1])
        finally:
            limit.cancel()
            guest.kill()
            guest.wait()
    if status is None:
        print(f"aarch64-vm: the machine ended before its tests did, after {time.monotonic() - begin:.0f} s")
        return 1
    print(f"aarch64-vm: {time.monotonic() - begin:.0f} s")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup").add_argument("--vm", action="store_true")
    for name in ("emulate", "machine"):
        commands.add_parser(name).add_argument("programs", metavar="PROGRAM", type=Path, nargs="+")
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # exit in order, so that qemu and the folder are removed, too
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        if given.command != "setup":
            return {"emulate": emulate, "machine": machine}[given.command](given.programs)
        if platform.machine() != "aarch64":  # nothing to install on aarch64 itself
            install(PACKAGES + (VM_PACKAGES if given.vm else ()))
            fetch({CACHE / "openssl": "usr"}, "libssl-dev")
            if given.vm:
                guest = {CACHE / "vmlinuz": "boot/vmlinuz-*", CACHE / "busybox": "bin/busybox"}
                fetch(guest, "--kernel", "busybox-static")
    except (MissingError, PackagesError) as error:
        print(f"aarch64: {error}", file=sys.stderr)
        return 127
    return 0


if __name__ == "__main__":
    sys.exit(main())
