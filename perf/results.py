"""The results of a run: cells of samples, the machine, and the conclusions. Kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from perf.contender import ASIDE, LIMIT, OURS, PEER, Case, Sample

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Cell:
    """One contender's samples of one case, one a round; `failed` says why there is none to rely on."""

    contender: str
    case: Case
    samples: list[Sample] = field(default_factory=list)
    failed: str | None = None

    def median(self, name: str) -> float | None:
        """The rounds' median of a field of Sample; None where it is not known."""
        values = [getattr(sample, name) for sample in self.samples]
        known = [value for value in values if value is not None]
        return float(statistics.median(known)) if known and self.failed is None else None

    @property
    def speed(self) -> float:
        """Bytes a second: the rounds' median; 0 where it failed."""
        return self.median("bytes_per_second") or 0.0

    def spread(self) -> float:
        """How far the rounds' speeds are apart, as a part of their median: twice the middle half. Of three rounds that
        is highest less lowest; of more, one bad round has no say."""
        speeds = [sample.bytes_per_second for sample in self.samples]
        if not speeds:
            return 0.0
        low, middle, high = np.quantile(speeds, (0.25, 0.5, 0.75))
        return float(2 * (high - low) / middle)

    def to_json(self) -> dict[str, Any]:
        medians = {each.name: self.median(each.name) for each in fields(Sample)}
        return {
            "contender": self.contender,
            "case": asdict(self.case),
            "failed": self.failed,
            "median": medians if self.samples else None,
            "rounds": [sample.to_json() for sample in self.samples],
        }


@dataclass
class Results:
    """All cells, by contender and case. `kinds` says of each contender what it is, `missing` why one is not there."""

    command: str
    commit: str
    machine: dict[str, Any]
    rounds: int
    kinds: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cells: dict[tuple[str, Case], Cell] = field(default_factory=dict)
    when: str = ""

    def cell(self, contender: str, case: Case) -> Cell:
        return self.cells.setdefault((contender, case), Cell(contender, case))

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(case for _, case in self.cells))

    def of(self, case: Case, kind: str) -> list[Cell]:
        """The case's cells of contenders of that kind."""
        return [c for (name, of), c in self.cells.items() if of == case and self.kinds.get(name) == kind]

    def ours(self, case: Case) -> Cell | None:
        return next(iter(self.of(case, OURS)), None)

    def best(self, case: Case, kind: str = LIMIT, without: str | None = None) -> Cell | None:
        """The fastest of a kind; of those whose name lacks `without`. Of those seen in every round, where there are
        such: one lucky round is no limit."""
        whole = [cell for cell in self.of(case, kind) if cell.samples and cell.failed is None]
        whole = [cell for cell in whole if without is None or without not in cell.contender]
        whole = [cell for cell in whole if len(cell.samples) == self.rounds] or whole
        return max(whole, key=lambda cell: cell.speed, default=None)

    def ratio(self, case: Case, other: Cell | None) -> float | None:
        """Our speed over the other's; None where one of them is not there or failed."""
        ours = self.ours(case)
        return ours.speed / other.speed if ours and other and ours.speed and other.speed else None

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "commit": self.commit,
            "when": self.when,
            "machine": self.machine,
            "rounds": self.rounds,
            "contenders": self.kinds,
            "missing": self.missing,
            "ratios": [self._ratios(case) for case in self.cases()],
            "cells": [cell.to_json() for cell in self.cells.values()],
        }

    def add(self, part: Results) -> None:
        """Take in a part of the same measurement that was made apart: its cells replace those of the same case.

        ValueError where the two are not one: commit, machine and number of rounds must agree.
        """
        for what, mine, others in (
            ("commit", self.commit, part.commit),
            ("rounds", self.rounds, part.rounds),
            ("processor", self.machine.get("cpu"), part.machine.get("cpu")),
        ):
            if mine != others:
                raise ValueError(f"parts of one measurement have the same {what}: {mine} is not {others}")
        self.kinds |= part.kinds
        self.missing = part.missing
        self.cells |= part.cells

    def _ratios(self, case: Case) -> dict[str, Any]:
        limit = self.best(case)
        beside = {cell.contender: self.ratio(case, cell) for kind in (ASIDE, PEER) for cell in self.of(case, kind)}
        return {
            **asdict(case),
            "to_limit": self.ratio(case, limit),
            "limit": limit.contender if limit else None,
            "to_others": beside,
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Results:
        names = ("command", "commit", "machine", "rounds", "missing", "when")
        results = cls(**{name: told[name] for name in names}, kinds=told["contenders"])
        for cell in told["cells"]:
            case = Case(**cell["case"])
            samples = [Sample(**sample) for sample in cell["rounds"]]
            results.cells[cell["contender"], case] = Cell(cell["contender"], case, samples, cell["failed"])
        return results

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls.from_json(json.loads(path.read_text()))


def new_results(command: str, rounds: int) -> Results:
    """Empty ones, of here and now."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return Results(command, commit(), machine(), rounds, when=when)


def commit() -> str:
    """The checkout's commit, marked where files differ from it; "unknown" outside of a repository."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!perf/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """The properties of a machine that figures depend on. No names."""
    cpu = _first(_lines("/proc/cpuinfo"), "model name") or platform.processor()
    memory = _first(_lines("/proc/meminfo"), "MemTotal").split()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[0]) * 1024 if memory else None,
        "kernel": platform.release(),
        "governor": "".join(_lines("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        "huge_pages": "".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled")) or None,
        "shared_huge_pages": "".join(_lines("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) or None,
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _first(lines: Iterable[str], name: str) -> str:
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, "")
