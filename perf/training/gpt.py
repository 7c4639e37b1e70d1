"""examples/gpt.py on three hosts behind 100 Mbit/s: shared by members that come and go, beside PyTorch's DDP over gloo
and beside one process; at equal samples and at equal time.

Each host is a network namespace of the laboratory (perf/netlab.py) with a memory server, so that two thirds of what a
member sends and reads cross its link. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf.scaling.fleet import Fleet
from perf.scaling.report import Answer, Column
from perf.training.race import RATE, link_bytes
from perf.training.race_worker import INTERFACE

HOSTS = 3
BATCHES, QUICK = 240, 18  # of all processes together
EVERY = 10  # steps from one exchange to the next
EVALUATE = 5  # steps from one evaluation to the next
KILL_AT, JOIN_AT = 0.4, 0.6  # of the steps of a member
LIMIT_S = 3600.0  # for a process to come to a step, or to its end
_EXAMPLES = Path(__file__).parents[2] / "examples"
_PORT = 29541


def loss_bytes_seconds(quick: bool) -> Answer:
    """Train each case once."""
    batches, every, evaluate = (QUICK, 2, 1) if quick else (BATCHES, EVERY, EVALUATE)
    cases: dict[str, Callable[[Fleet, list[str], int], _Trained]] = {
        f"DiLoCo every {every} on {HOSTS} hosts, one killed, one late": _shared,
        f"torch DistributedDataParallel, gloo, {HOSTS} hosts": _ddp,
        "one process": _alone,
    }
    rows: list[dict[str, Any]] = []
    with Fleet([RATE] * HOSTS, capacity="256MiB") as fleet:
        options = ["--batches", str(batches), "--evaluate", str(evaluate), "--every", str(every)]
        equal_s = 0.0  # the seconds of the first case
        for name, train in cases.items():
            before = link_bytes(fleet)
            trained = train(fleet, options, batches // HOSTS)
            equal_s = equal_s or trained.seconds
            rows.append(
                {
                    "case": name,
                    "loss": trained.loss,
                    "seconds": trained.seconds,
                    "megabytes": (link_bytes(fleet) - before) / 1e6,
                    "then": trained.loss_at(equal_s),
                }
            )
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return Answer(
        name="gpt",
        title=f"A GPT on three hosts behind {RATE}",
        setup=(
            f"examples/gpt.py: 6.4 million parameters, {batches} batches of 16 rows of 64 bytes of Python's own "
            f"library, AdamW with warmup and cosine, one thread for each process. The hosts are network namespaces "
            f"with {RATE} in each direction (tc tbf). Processes of a case divide the batches, so all cases train "
            f"equally many samples. Of the members that share, the second one is killed after {KILL_AT:.0%} of its "
            f"steps, and one comes in its place when the first one has done {JOIN_AT:.0%}. The loss is of text that "
            f"no process trains, in nats a byte. Seconds count from the start of the first process, and bytes are all "
            f"that crossed the links, headers and control included."
        ),
        columns=(
            Column("case", "rule"),
            Column("loss", "loss after equal samples", "{:.3f}"),
            Column("seconds", "seconds", "{:.0f}"),
            Column("megabytes", "MB over the links", "{:,.0f}"),
            Column("then", f"loss after {equal_s:.0f} s", "{:.3f}"),
        ),
        rows=rows,
        limit=(
            "One run of each case. All processes and daemons share this machine's cores, so three processes do not "
            "compute three times as much as one in the same time, as three machines would."
        ),
    )


class _Member:
    """A process on a host of the lab, and what it has printed so far, with the time of each line."""

    def __init__(self, fleet: Fleet, host: str, command: Sequence[object], **variables: str) -> None:
        assert fleet.lab
        self._what = f"{' '.join(map(str, command[:2]))} on {host}"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SMB_")}
        self.process = fleet.lab.popen(
            host,
            [sys.executable, *map(str, command)],
            env=ours | {"OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[tuple[float, list[str]]] = []
        self._over = False  # the process has ended, and all its lines are here
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._news:
                self.lines.append((time.monotonic(), line.split()))
                self._news.notify_all()
        self.process.wait()
        with self._news:
            self._over = True
            self._news.notify_all()

    @property
    def step(self) -> int:
        """The step of its last evaluation."""
        return max((int(words[1]) for _, words in self.lines if words[0] == "step"), default=0)

    def wait(self, until: Callable[[], bool]) -> None:
        """Block until the condition, which its lines decide, holds. RuntimeError if the process ends first or fails."""
        with self._news:
            self._news.wait_for(lambda: until() or self._over, LIMIT_S)
            held = until()
        if not held or self.process.returncode:
            raise RuntimeError(f"{self._what}: exit code {self.process.returncode} after {self.lines}")

    def ended(self) -> float:
        """Block until it has printed its last loss, and has ended; return the time of the former."""
        self.wait(lambda: self._over)
        return self.lines[-1][0]


class _Trained:
    """The result of a case: the seconds of its processes together, and the losses that the first one has told."""

    def __init__(self, began: float, members: Sequence[_Member]) -> None:
        self.seconds = max(member.ended() for member in members) - began
        self._told = [(when - began, float(words[-1])) for when, words in members[0].lines]
        self.loss = self._told[-1][1]

    def loss_at(self, seconds: float) -> float:
        """Return the loss of the last evaluation until then; NaN before the first one."""
        return next((loss for when, loss in reversed(self._told) if when <= seconds), float("nan"))


def _shared(fleet: Fleet, options: list[str], steps: int) -> _Trained:
    began = time.monotonic()
    command = [_EXAMPLES / "gpt_shared.py", *options, "--steps", steps]

    def join(host: str) -> _Member:
        return _Member(fleet, host, command, SMB_COORDINATOR=fleet.coordinator, SMB_TRANSPORT="tcp")

    first, victim, third = (join(host) for host in fleet.names)
    victim.wait(lambda: victim.step >= KILL_AT * steps)
    victim.process.kill()
    first.wait(lambda: first.step >= JOIN_AT * steps)
    return _Trained(began, [first, third, join(fleet.names[1])])


def _ddp(fleet: Fleet, options: list[str], steps: int) -> _Trained:
    began = time.monotonic()
    variables = {
        "MASTER_ADDR": fleet.address(fleet.names[0]),
        "MASTER_PORT": str(_PORT),
        "WORLD_SIZE": str(HOSTS),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = ["-m", "perf.training.gpt_ddp", *options, "--steps", steps]
    members = [_Member(fleet, host, command, RANK=str(rank), **variables) for rank, host in enumerate(fleet.names)]
    return _Trained(began, members)


def _alone(fleet: Fleet, options: list[str], steps: int) -> _Trained:
    return _Trained(
        time.monotonic(), [_Member(fleet, fleet.names[0], [_EXAMPLES / "gpt.py", *options, "--steps", steps * HOSTS])]
    )
