"""Files over buffers beside what nothing can beat here: `python -m perf.files`, under a minute, needs FUSE and root.

dd reads and writes 256 MiB in order through smb mount and through a pass-through file system of the same binding over
tmpfs, in turns. smb.open_file runs beside the native API. Writes perf/results/files.md.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import smb
from smb.files.mountpoint import unmount

NBYTES = 256 << 20
ROUNDS = 9
CALL_ROUNDS = 40  # of open_file, which takes 0.03 s
RESULTS = Path(__file__).parent / "results" / "files.md"


@contextmanager
def served(command: list[str], directory: Path) -> Iterator[Path]:
    """A file system in a process of its own, mounted."""
    directory.mkdir()
    process = subprocess.Popen([sys.executable, "-m", *command, str(directory)], env=os.environ | {"PYTHONPATH": "."})
    try:
        end = time.monotonic() + 30
        while not os.path.ismount(directory):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} was not mounted")
            time.sleep(0.05)
        time.sleep(0.2)
        device = directory.stat().st_dev
        # For both: smb mount does it by itself.
        Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").write_text("4096")
        yield directory
    finally:
        unmount(directory, lazy=True)
        process.wait(20)


def dd(*options: str) -> float:
    """Bytes a second."""
    told = subprocess.run(["dd", "bs=1M", *options], capture_output=True, text=True, check=True).stderr
    found = re.search(r"^(\d+) bytes.* ([0-9.e-]+) s,", told, re.M)
    assert found, told
    return int(found[1]) / float(found[2])


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return NBYTES / (time.perf_counter() - begun)


def mounts(address: str) -> dict[str, tuple[list[float], list[float]]]:
    """Case -> (ours, the pass-through's) in bytes a second, by rounds."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        there = Path(place)
        (Path(memory) / "big").write_bytes(bytes(NBYTES))
        ours = ["smb.tools.cli.main", "mount", "--foreground", "--drafts", memory, "-c", address]
        with (
            served(ours, there / "ours") as mine,
            served(["perf.pass_through", memory], there / "theirs") as theirs,
        ):
            for _ in range(ROUNDS):
                for what, options in (
                    ("write, over what is there", ("if=/dev/zero", "of={}/big", "count=256", "conv=notrunc")),
                    ("read", ("if={}/big", "of=/dev/null")),
                    ("write, a new file", ("if=/dev/zero", "of={}/new", "count=256")),
                ):
                    for side, directory in enumerate((mine, theirs)):
                        speed = dd(*(option.format(directory) for option in options))
                        found.setdefault(what, ([], []))[side].append(speed)
                        (directory / "new").unlink(missing_ok=True)
    return found


def in_process(client: smb.Client) -> dict[str, tuple[list[float], list[float]]]:
    """The same of open_file and the native API, in calls of 1 MiB."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    buffer, piece = client.open("big"), 1 << 20
    out = np.ones(piece, np.uint8)
    with smb.open_file("big", "r+b", client=client) as file:

        def read_file() -> None:
            file.seek(0)
            while file.readinto(out.data):
                pass

        def write_file() -> None:
            file.seek(0)
            for _ in range(0, NBYTES, piece):
                file.write(out.data)

        def read() -> None:
            for offset in range(0, NBYTES, piece):
                buffer.read(offset, piece, out=out)

        def write() -> None:
            for offset in range(0, NBYTES, piece):
                buffer.write(out, offset)

        for _ in range(CALL_ROUNDS):
            for what, calls in (("read", (read_file, read)), ("write", (write_file, write))):
                for side, call in enumerate(calls):
                    found.setdefault(what, ([], []))[side].append(timed(call))
    return found


def main() -> None:
    lines = [
        "# Files over buffers",
        "",
        f"{NBYTES >> 20} MiB, GB/s, median of {ROUNDS} (mount) and {CALL_ROUNDS} (open_file) rounds in turns; "
        "`python -m perf.files`.",
        "",
    ]
    with smb.LocalCluster(servers=2, capacity="600MiB") as cluster, smb.connect(cluster.address) as client:
        client.create("big", NBYTES, "uint8").fill(0)
        for title, beside, figures in (
            ("smb mount", "a pass-through of the same binding over tmpfs", mounts(cluster.address)),
            ("smb.open_file", "the native API", in_process(client)),
        ):
            lines += [f"| | {title} | {beside} | part (lowest, highest) |", "| --- | --- | --- | --- |"]
            for what, (ours, theirs) in figures.items():
                parts = [a / b for a, b in zip(ours, theirs, strict=True)]
                lines.append(
                    f"| {what} | {statistics.median(ours) / 1e9:.2f} | {statistics.median(theirs) / 1e9:.2f} | "
                    f"{statistics.median(parts):.2f} ({min(parts):.2f}, {max(parts):.2f}) |"
                )
            lines.append("")
    RESULTS.write_text("\n".join(lines))
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
