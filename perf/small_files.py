"""Small files in a mount beside the same calls in memory: `python -m perf.small_files [--files N]`. Needs FUSE.

Each file has 4 KiB. One process makes all of them, looks at them, reads them and removes them; then tar unpacks as
many. Prints a table, with the processor time of mount, coordinator and memory server for each file.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import smb
from perf.files import served

DATA = b"x" * 4096


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that a process's threads have used."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def create(path: Path) -> None:
    """Make the file."""
    with path.open("xb", buffering=0) as file:
        file.write(DATA)


def read(path: Path) -> None:
    """Read the file."""
    if path.read_bytes() != DATA:
        raise RuntimeError(f"{path} has other bytes")


CALLS: Mapping[str, Callable[[Path], object]] = {"create": create, "stat": os.stat, "read": read, "unlink": os.unlink}


def unpacked(folder: Path, count: int) -> float:
    """Return the seconds in which tar unpacks as many files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for number in range(count):
            entry = tarfile.TarInfo(f"d{number % 10}/f{number}")
            entry.size, entry.mtime, entry.mode = len(DATA), 1_700_000_000, 0o644
            tar.addfile(entry, io.BytesIO(DATA))
    folder.mkdir()
    begun = time.perf_counter()
    subprocess.run(["tar", "xf", "-", "-C", str(folder)], input=data.getvalue(), check=True)
    taken = time.perf_counter() - begun
    shutil.rmtree(folder)
    return taken


def measured(folder: Path, count: int, processes: Mapping[str, int]) -> dict[str, tuple[float, str]]:
    """Return the median of the milliseconds that each call takes, and the processor time of each process."""
    folder.mkdir()
    found = {}
    for what, call in CALLS.items():
        before, taken = {name: processor_s(pid) for name, pid in processes.items()}, []
        for number in range(count):
            begun = time.perf_counter()
            call(folder / f"f{number}")
            taken.append(time.perf_counter() - begun)
        used = {name: 1000 * (processor_s(pid) - before[name]) / count for name, pid in processes.items()}
        found[what] = 1000 * sorted(taken)[count // 2], ", ".join(f"{name} {ms:.2f}" for name, ms in used.items())
    folder.rmdir()
    return found


def main() -> None:
    """Measure in a mount of a new cluster, and in memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    count: int = parser.parse_args().files
    with (
        smb.LocalCluster(servers=1, capacity="2GiB") as cluster,
        tempfile.TemporaryDirectory() as place,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        ours = ["smb.tools.cli.main", "mount", "--foreground", "--drafts", memory, "-c", cluster.address]
        with served(ours, Path(place) / "mount") as mount:
            commands = {
                each: (each / "cmdline").read_bytes() for each in Path("/proc").iterdir() if each.name.isdigit()
            }
            mounting = next(int(each.name) for each, command in commands.items() if os.fsencode(mount) in command)
            processes = {"mount": mounting, "coordinator": cluster.coordinator.pid, "server": cluster.servers[0].pid}
            for number in range(20):  # the first ones connect
                create(mount / f"first{number}")
            here, beside = (measured(at / "files", count, run) for at, run in ((mount, processes), (Path(memory), {})))
            for what in CALLS:
                print(
                    f"{what:8} {here[what][0]:7.2f} ms, in memory {beside[what][0]:.3f} ms; processor: {here[what][1]}"
                )
            seconds = [unpacked(at / "tar", count) for at in (mount, Path(memory))]
            print(f"tar x of {count} files: {seconds[0]:.2f} s, in memory {seconds[1]:.3f} s")


if __name__ == "__main__":
    main()
