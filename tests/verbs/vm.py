"""A throw-away virtual machine with two software RDMA devices, for machines that have none.

    python -m tests.verbs.vm setup  install what it needs (Debian; as root or with sudo), make kernel and initial files
    python -m tests.verbs.vm run [OPTION...] -- COMMAND [ARGUMENT...]
                                    run a command inside; its output and exit status come out

Debian's own kernel (it has rdma_rxe), emulated by qemu: no KVM and no rights are needed. The guest sees this machine's
files, so that Python, virtual environments and the checkout are just there; what it writes is lost, save in each
--writable folder (slow: 6 ms to look up a name there; all other names are remembered). Its devices are rxe0 (10.77.0.1,
network interface cable0) and rxe1 (10.77.0.2, cable1), the two ends of one virtual cable. Emulation is 10 to 30 times
slower than the machine: time limits inside have to be generous.

Exit status: the command's own; 124 it took too long, 125 the machine failed, 127 something is missing.
"""

from __future__ import annotations

import argparse
import lzma
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from tests.support.packages import PackagesError, install

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soft-memory-box/verbs-vm"
BOOT_LIMIT_S = 180.0  # a quiet machine takes 3 to 8
POLL_S = 0.02
PACKAGES = (
    "qemu-system-x86",
    "busybox-static",  # the guest's first programs
    "kmod",
    "iproute2",  # ip, tc, rdma
    "ibverbs-providers",  # libibverbs's part for rxe, and those of real adapters
    "ibverbs-utils",
    "rdma-core",
    "python3-pyverbs",
    "perftest",
)
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "sch_netem", "crc32_generic", "rdma_rxe", "rdma_ucm"),
    "bridge",  # perf/netlab.py's
)
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TZ", "CI", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
PASSED_ON_PREFIXES = ("PYTHON", "PYTEST", "PYENV", "SMB_", "LC_")

# The kernel is unpacked, not installed: this machine does not boot it. Not the cloud kernel: it has neither rxe nor 9p.
MAKE_FILES = r"""
export PATH="$PATH:/usr/sbin:/sbin" DEBIAN_FRONTEND=noninteractive
package=$(apt-cache depends linux-image-amd64 | grep -o 'linux-image-[0-9].*' | head -n 1)
apt-get download -qq "$package"
dpkg -x ./*.deb kernel
version=$(ls kernel/lib/modules)
depmod -b kernel "$version"
mkdir -p guest/bin guest/modules guest/dev guest/proc guest/sys guest/control guest/lower guest/layer guest/new
modprobe -d kernel -S "$version" -aD "$@" | awk '$1 == "insmod" && !seen[$2]++ { print $2, 100 + NR }' |
    while read -r path turn; do cp "$path" "guest/modules/$turn-${path##*/}"; done
cp "$(command -v busybox)" guest/bin/busybox
cp "$INIT" guest/init
chmod 755 guest/init
(cd guest && find . | busybox cpio -o -H newc 2>/dev/null) >initrd
mv "kernel/boot/vmlinuz-$version" vmlinuz
echo "kernel $version, $(ls guest/modules | wc -l) modules" >version
"""


class VmError(Exception):
    """The machine can't do what it should; `status` is the exit status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def install_packages() -> None:
    """Install the Debian packages that are missing. Raises VmError."""
    try:
        install(PACKAGES)
    except PackagesError as error:
        raise VmError(127, str(error)) from error


def recipe() -> str:
    """Return what kernel and initial files are made by."""
    return "\n".join((MAKE_FILES, *MODULES, (HERE / "guest-init.sh").read_text()))


def has_files() -> bool:
    """Return whether kernel and initial files are there, made as they are made now."""
    made = CACHE / "recipe"
    return made.exists() and made.read_text() == recipe()


def setup() -> None:
    """Install packages, make kernel and initial files; a download of 70 MB the first time."""
    if platform.machine() != "x86_64":
        raise VmError(127, f"the virtual machine is for x86-64, this is {platform.machine()}")
    install_packages()
    if has_files():
        return
    with tempfile.TemporaryDirectory(prefix="verbs-vm-") as name:
        folder = Path(name)
        command = ["bash", "-euo", "pipefail", "-c", MAKE_FILES, "make-files", *MODULES]
        if subprocess.run(
            command, cwd=folder, env={**os.environ, "INIT": str(HERE / "guest-init.sh")}, check=False
        ).returncode:
            raise VmError(127, "the kernel's package can't be had or unpacked; 'apt-get update' as root may help")
        (folder / "vmlinux").write_bytes(_unpacked((folder / "vmlinuz").read_bytes()))
        CACHE.mkdir(parents=True, exist_ok=True)
        (folder / "recipe").write_text(recipe())
        for file in ("vmlinux", "initrd", "recipe"):  # under their names only when complete, the recipe last
            shutil.copyfile(folder / file, CACHE / f"{file}.new")
            (CACHE / f"{file}.new").replace(CACHE / file)
        print(f"verbs-vm: {(folder / 'version').read_text().strip()}", file=sys.stderr)


def _unpacked(image: bytes) -> bytes:
    """Return the ELF kernel that a bzImage holds, which qemu starts 3 s sooner; the image itself where that fails."""
    start = (image[0x1F1] + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    body = image[start : start + int.from_bytes(image[0x24C:0x250], "little")]
    try:
        kernel = (
            lzma.LZMADecompressor().decompress(body) if body[:1] == b"\xfd" else zlib.decompressobj(31).decompress(body)
        )
    except (lzma.LZMAError, zlib.error):
        return image
    return kernel if kernel[:4] == b"\x7fELF" else image


def run(
    command: list[str],
    limit_s: float = 600.0,
    writable: tuple[Path, ...] = (),
    variables: dict[str, str] | None = None,
    memory_mib: int = 2048,
) -> int:
    """Run a command in a new machine, here; copy its output, return its exit status. Raises VmError."""
    if not shutil.which("qemu-system-x86_64") or not has_files():
        raise VmError(127, f"there is no qemu, or no kernel in {CACHE}: python -m tests.verbs.vm setup")
    with tempfile.TemporaryDirectory(prefix="verbs-vm-") as name:
        control = Path(name)
        shares = _write_control(control, command, writable, variables or {})
        with (control / "qemu").open("w") as log:
            # setpriv: qemu ends with this process, however that ends
            machine = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *_qemu(control, shares, memory_mib)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            return _follow(control, machine, limit_s)
        finally:
            machine.kill()
            machine.wait()


def _write_control(
    control: Path, command: list[str], writable: tuple[Path, ...], variables: dict[str, str]
) -> dict[str, Path]:
    """Write what the guest reads; return the folders that it may write to, by their tags."""
    shares = {}
    for number, folder in enumerate(dict.fromkeys(path.resolve() for path in writable)):
        if not folder.is_dir() or folder == Path("/") or {",", "\n"} & set(str(folder)):
            raise VmError(125, f"{folder} can't be shared for writing")
        shares[f"share{number}"] = folder
        (control / f"share{number}").write_text(str(folder))
    environment = {
        n: v for n, v in os.environ.items() if n in PASSED_ON or n.startswith(PASSED_ON_PREFIXES)
    } | variables
    environment |= {
        "VERBS_VM": "1",
        "TMPDIR": "/run/tmp",  # guest-start.sh makes it
        "PATH": f"{environment.get('PATH', '/usr/local/bin:/usr/bin:/bin')}:/usr/sbin:/sbin",
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    job = f"{exports}cd {shlex.quote(str(Path.cwd()))} || exit 125\nexec {shlex.join(command)}\n"
    start = f'SHARES="{" ".join(shares)}"\n{(HERE / "guest-start.sh").read_text()}'
    for file, text in (("job", job), ("start", start), ("out", ""), ("err", "")):
        (control / file).write_text(text)
    return shares


def _qemu(control: Path, shares: dict[str, Path], memory_mib: int) -> list[str]:
    # erms, fsrm: "rep movsb" and "rep stosb", which the emulator does byte by byte, and the kernel would prefer
    command = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-machine", "q35", "-accel", "tcg,thread=multi"]
    command += [
        "-smp",
        "2",
        "-cpu",
        "max,la57=off,erms=off,fsrm=off",
        "-m",
        str(memory_mib),
        "-display",
        "none",
        "-nic",
        "none",
        "-no-reboot",
    ]
    command += [
        "-serial",
        f"file:{control}/console",
        "-kernel",
        str(CACHE / "vmlinux"),
        "-initrd",
        str(CACHE / "initrd"),
    ]
    command += [
        "-append",
        # no_timer_check: on a busy host the guest's clock stands still for so long that its kernel gives its timer up.
        "console=ttyS0 panic=-1 quiet no_timer_check mitigations=off cryptomgr.notests tsc=reliable audit=0 apparmor=0",
    ]
    folders = [("root", Path("/"), ",readonly=on"), ("control", control, ""), *((t, f, "") for t, f in shares.items())]
    for tag, folder, option in folders:
        command += ["-virtfs", f"local,path={folder},mount_tag={tag},security_model=none,multidevs=remap{option}"]
    return command


def _follow(control: Path, machine: subprocess.Popen[bytes], limit_s: float) -> int:
    """Copy the command's output while it runs; return its exit status."""
    begin, up = time.monotonic(), None
    with (control / "out").open("rb") as out, (control / "err").open("rb") as err:
        while True:
            # Looked at before the output is copied: what was written before is then not missed.
            done, dead, now = (control / "status").exists(), machine.poll() is not None, time.monotonic()
            for source, sink in ((out, sys.stdout.buffer), (err, sys.stderr.buffer)):
                shutil.copyfileobj(source, sink)
                sink.flush()
            if done:
                return int((control / "status").read_text())
            if dead:
                raise VmError(125, f"the machine stopped by itself (qemu: {machine.returncode})\n{_log(control)}")
            if up is None and (control / "up").exists():
                up = now
                print(f"verbs-vm: up after {up - begin:.1f} s", file=sys.stderr, flush=True)
            if up is None and now > begin + BOOT_LIMIT_S:
                raise VmError(125, f"the machine was not up after {BOOT_LIMIT_S:g} s\n{_log(control)}")
            if up is not None and now > up + limit_s:
                raise VmError(124, f"the command was still running after {limit_s:g} s")
            time.sleep(POLL_S)


def _log(control: Path) -> str:
    """Return the ends of what guest, qemu and kernel said."""
    files = [control / name for name in ("failed", "qemu", "console")]
    return "\n".join(
        line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()[-30:]
    )


def guarded(work: Callable[[], int]) -> int:
    """Do the work; a signal ends it in order (qemu with it), and a VmError becomes a line and its status."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        return work()
    except VmError as error:
        print(f"verbs-vm: {error}", file=sys.stderr)
        return error.status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup")
    run_parser = commands.add_parser("run")
    run_parser.add_argument("-t", "--limit", type=float, default=600.0, help="seconds that the command may take")
    run_parser.add_argument("-w", "--writable", type=Path, action="append", default=[], help="a folder to share")
    run_parser.add_argument("-e", "--env", action="append", default=[], metavar="NAME=VALUE")
    run_parser.add_argument("-m", "--memory", type=int, default=2048, help="MiB")
    run_parser.add_argument("argument", nargs="+", help="the command, after --")
    given = parser.parse_args()
    if given.command == "setup":
        return guarded(lambda: setup() or 0)
    variables = dict(item.partition("=")[::2] for item in given.env)
    return guarded(lambda: run(given.argument, given.limit, tuple(given.writable), variables, given.memory))


if __name__ == "__main__":
    sys.exit(main())
