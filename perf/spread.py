"""A file's bytes over servers behind links of their own: `python -m perf.spread`, about a minute, needs FUSE and root.

The same file is read and written by one process, through a mount, by four readers at once, and as a snapshot. Each runs
over 1, 2 and 4 servers, beside bare sockets over the same links. Writes perf/results/files-spread.md.
"""

from __future__ import annotations

import json
import os
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
from perf.files import served
from perf.netlab import parse_rate
from perf.scaling.fleet import CLIENTS, ROOT, Fleet, links_per_second
from smb.files import copying

RATE = "500mbit"  # four of them are within what two cores move with the client's and the servers' work beside
COUNTS = (1, 2, 4)
SERVER_BYTES = 24 << 20  # of a file, on each server
ROUNDS = 3
READERS = 4
CALL_BYTES = 8 << 20
RESTORE = "restore, always onto all servers"
RESULTS = ROOT / "perf" / "results" / "files-spread.md"


def main() -> None:
    """The experiment, or with arguments the process on the clients' host: COORDINATOR SERVER..."""
    if len(sys.argv) > 1:
        os.environ["SMB_TRANSPORT"] = "tcp"  # by itself it would find that all is one host
        print(json.dumps(_measured(sys.argv[1], sys.argv[2:])))
        return
    seen: dict[int, dict[str, list[float]]] = {count: {} for count in COUNTS}
    links: dict[tuple[int, str], list[float]] = {}
    with Fleet([RATE] * max(COUNTS)) as fleet:
        bare = fleet.bare()
        for _ in range(ROUNDS):
            for count in COUNTS:
                for operation in ("read", "write"):
                    carried = links_per_second(bare, fleet, fleet.names[:count], operation, SERVER_BYTES)
                    links.setdefault((count, operation), []).append(sum(carried))
                assert fleet.lab is not None
                command = [sys.executable, "-m", "perf.spread", fleet.coordinator, *fleet.names[:count]]
                done = fleet.lab.run(CLIENTS, command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=80)
                for what, rate in json.loads(done.stdout.splitlines()[-1]).items():  # after what the mount said
                    seen[count].setdefault(what, []).append(rate)
    RESULTS.write_text("\n".join(_table(seen, links)))
    print(RESULTS.read_text())


def _table(seen: dict[int, dict[str, list[float]]], links: dict[tuple[int, str], list[float]]) -> Iterator[str]:
    yield "# A file over servers behind links of their own"
    yield ""
    yield (
        f"Each server behind a link of {RATE} (tc tbf, {parse_rate(RATE) / 8e6:.1f} MB/s with headers), "
        f"{SERVER_BYTES >> 20} MiB of the file on each, all on this one machine. MB/s, median of {ROUNDS} rounds; in "
        f"brackets times one server, and part of what bare sockets carried over all links at once. `python -m "
        f"perf.spread`."
    )
    yield ""
    yield "| | " + " | ".join(f"{count} server{'s'[: count > 1]}" for count in COUNTS) + " |"
    yield "| --- |" + " --- |" * len(COUNTS)
    for what in seen[COUNTS[0]]:
        cells = []
        for count in COUNTS:
            rate = statistics.median(seen[count][what])
            most = statistics.median(links[count, "write" if "writ" in what or what == RESTORE else "read"])
            times = rate / statistics.median(seen[COUNTS[0]][what])
            cells.append(f"{rate / 1e6:.0f} ({times:.2f}, {rate / most:.2f})")
        yield f"| {what} | " + " | ".join(cells) + " |"
    yield ""


def _measured(coordinator: str, servers: list[str]) -> dict[str, float]:
    """Case -> bytes a second. The files are those of a mount of this process's own."""
    nbytes, found = len(servers) * SERVER_BYTES, {}
    with (
        smb.connect(coordinator, timeout=60) as client,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        _buffer(client, nbytes, servers),
        served(["smb.tools.cli.main", "mount", "--foreground", "-c", coordinator], Path(memory) / "mount") as mount,
    ):
        piece = np.ones(CALL_BYTES, np.uint8)
        with smb.open_file("big", "r+b", client=client) as file:

            def written() -> None:
                for _ in range(0, nbytes, CALL_BYTES):
                    file.write(piece.data)

            def read() -> None:
                file.seek(0)
                while file.readinto(piece.data):
                    pass

            found["smb.open_file, written"] = _rate(nbytes, written)
            found["smb.open_file, read"] = _rate(nbytes, read)
        count, whole = f"count={nbytes >> 20}", f"of={mount}/big"
        found["mount, written"] = _rate(nbytes, lambda: _dd(["if=/dev/zero", whole, count, "conv=notrunc"]))
        found["mount, read"] = _rate(nbytes, lambda: _dd([f"if={mount}/big", "of=/dev/null"]))
        part = (nbytes >> 20) // READERS
        parts = [
            [f"if={mount}/big", "of=/dev/null", f"skip={reader * part}", f"count={part}"] for reader in range(READERS)
        ]
        found[f"mount, {READERS} readers of a part each"] = _rate(nbytes, lambda: _dd(*parts))
        snapshot = Path(memory) / "big"
        found["snapshot"] = _rate(nbytes, lambda: copying.snapshot(client, "big", snapshot))
        client.delete("big")
        found[RESTORE] = _rate(nbytes, lambda: copying.restore(client, snapshot, "big"))
    return found


@contextmanager
def _buffer(client: smb.Client, nbytes: int, servers: list[str]) -> Iterator[None]:
    client.create("big", nbytes, "uint8", servers=servers).fill(0)
    yield
    client.delete("big", missing_ok=True)


def _rate(nbytes: int, call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - begun)


def _dd(*options: list[str]) -> None:
    runs = [subprocess.Popen(["dd", "bs=1M", *more], stderr=subprocess.DEVNULL) for more in options]
    for run in runs:
        assert run.wait() == 0


if __name__ == "__main__":
    main()
