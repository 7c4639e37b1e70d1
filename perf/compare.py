"""Compares the speed of two commits or of two results.json: `python -m perf.compare A B`. Exit status 1 where a cell is
slower by more than its rounds differ among themselves.

Commits are built into temporary worktrees and environments and measured in turns, case by case; the measuring code is
this checkout's for both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from perf.contender import OURS, Case, Sample
from perf.ours import Ours
from perf.results import ROOT, Results, new_results
from perf.run import cases_of, parse
from perf.tables import describe
from smb.tools.cli.signals import interrupted_once

_LEAST = 0.05  # a smaller difference is none, however well the rounds agree
_ROUNDS = 5


@dataclass(frozen=True)
class Change:
    """One case's two cells. `ratio`: B's speed over A's, medians; `spread`: the wider of both cells' own."""

    case: Case
    ratio: float
    spread: float

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" where the medians differ by more than the rounds of either do; else empty."""
        beyond = max(self.spread, _LEAST)
        if 1 - self.ratio > beyond:
            return "slower"
        return "faster" if 1 - 1 / self.ratio > beyond else ""


def changes(before: Results, after: Results) -> tuple[list[Change], list[str]]:
    """Return the change of each case that both have, and in words what can't be compared or failed in `after` alone."""
    found, troubles = [], []
    for case in before.cases():
        old, new = before.ours(case), after.ours(case)
        if old is None or new is None or old.failed:
            continue
        if new.failed:
            troubles.append(f"{describe(case)} failed: {new.failed}")
        elif old.speed and new.speed:
            found.append(Change(case, new.speed / old.speed, max(old.spread(), new.spread())))
    if not found and not troubles:
        troubles.append("the two have no case in common")
    if min(before.rounds, after.rounds) < 2:
        troubles.append("one round has no spread: measure with --rounds 3 or more")
    return found, troubles


def report(found: Sequence[Change], troubles: Sequence[str]) -> tuple[str, int]:
    """Return the text, and the exit status: 1 with regressions or troubles."""
    slower = [change for change in found if change.verdict == "slower"]
    width = max((len(describe(change.case)) for change in found), default=0)
    lines = [f"{'':{width}}   B / A   spread"]
    for change in found:
        lines.append(
            f"{describe(change.case):{width}}  {change.ratio:6.2f}   {change.spread:6.0%}  {change.verdict}".rstrip()
        )
    lines += troubles
    lines.append(f"{len(found)} cells, {len(slower)} slower by more than their rounds' spread")
    return "\n".join(lines), 1 if slower or troubles else 0


# ---- commits


class Build:
    """One commit's package in an environment of its own, with a process there that measures it."""

    def __init__(self, commit: str, folder: Path, harness: Path, stack: ExitStack) -> None:
        worktree = folder / "tree"
        _call("git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(worktree), commit)
        stack.callback(_call, "git", "-C", str(ROOT), "worktree", "remove", "--force", str(worktree))
        _call(sys.executable, "-m", "venv", str(folder / "env"))
        python = folder / "env" / "bin" / "python"
        _call(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", str(worktree))
        # The package's dependencies are taken from here. A path in a .pth file comes behind the environment's own
        # packages, and brings no editable installation along.
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(site) / "needed.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
        self.results = new_results(f"perf.compare {commit}", 0)
        self.results.commit = commit
        self.results.kinds = {"smb": OURS}
        environment = os.environ | {"PYTHONPATH": str(harness), "PYTHONSAFEPATH": "1"}
        self._process = stack.enter_context(
            subprocess.Popen(
                [str(python), "-m", "perf.compare", "--measure"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
            )
        )  # fmt: skip
        stack.callback(self._end)

    def measure(self, case: Case) -> None:
        """One round of the case. A failure is the cell's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures {self.results.commit} has ended")
        answer = json.loads(line)
        cell = self.results.cell("smb", case)
        if "failed" in answer:
            cell.failed = cell.failed or answer["failed"]
        else:
            cell.samples.append(Sample(**answer))

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def _builds(commits: Sequence[str]) -> Iterator[list[Build]]:
    """Both built, in a folder that is removed afterwards."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smb-compare-")))
        harness = folder / "harness"
        shutil.copytree(ROOT / "perf", harness / "perf", ignore=shutil.ignore_patterns("results", "__pycache__"))
        builds = []
        for name, commit in zip("ab", commits, strict=True):
            sys.stderr.write(f"building {commit}\n")
            (folder / name).mkdir()
            builds.append(Build(commit, folder / name, harness, stack))
        yield builds


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def compare_commits(commits: Sequence[str], cases: Sequence[Case], rounds: int) -> tuple[Results, Results]:
    """Measure both, in turns. Blocks; minutes."""
    with _builds(commits) as (before, after):
        for number in range(rounds):
            for index, case in enumerate(cases):
                sys.stderr.write(f"\rround {number + 1} of {rounds}, case {index + 1} of {len(cases)} ")
                for build in (before, after) if (number + index) % 2 == 0 else (after, before):
                    build.measure(case)
        sys.stderr.write("\n")
        before.results.rounds = after.results.rounds = rounds
        return before.results, after.results


def _measure_from_stdin() -> int:
    """In a build's own environment: a case a line comes in, its sample goes out."""
    with Ours() as contender:
        for line in sys.stdin:
            try:
                answer = contender.measure(Case(**json.loads(line))).to_json()
            except Exception as error:  # noqa: BLE001 - whatever an old version raises is the cell's
                answer = {"failed": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--measure"]:
        return _measure_from_stdin()
    parser = argparse.ArgumentParser(
        "python -m perf.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="For commits also the options of perf.run: --sizes, --operations, --rounds (default 5), ...",
    )
    parser.add_argument("a", help="a commit, or a results.json")
    parser.add_argument("b", help="the other, newer one")
    names, others = parser.parse_known_args(words)
    if all(Path(name).is_file() for name in (names.a, names.b)):
        before, after = (Results.load(Path(name)) for name in (names.a, names.b))
    else:
        options = parse(["--rounds", str(_ROUNDS), *others])
        cases = [case for case in cases_of(options) if not case.remote]  # its daemons are on this host
        try:
            with interrupted_once():
                before, after = compare_commits((names.a, names.b), cases, options.rounds)
        except KeyboardInterrupt:
            return 130
    text, status = report(*changes(before, after))
    sys.stdout.write(text + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
