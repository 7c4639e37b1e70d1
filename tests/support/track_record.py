"""Writes docs/track-record.md from docs/track-record.toml: `make track-record`."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "track-record.toml"
PAGE = ROOT / "docs" / "track-record.md"
NOT_RECORDED = "not recorded"
PEOPLE = ("reading", "user")  # kinds that take no machine time

_HEAD = """# Bugs found, and by which kind of test

<!-- Made from docs/track-record.toml by `make track-record`. Change that file, not this page. -->

Bugs of the product since the first commit, as far as its history tells of them. Flaws of tests, measurements and pages
are left out. A bug that was mended before its code was committed is in no history, so it is not here.

A commit or a page of docs/ says how a bug was found, or this page says "not recorded". Nothing here is guessed.

## By kind

| found by | that is | bugs | with a test of their own | machine time | bugs per hour of it |
| --- | --- | --- | --- | --- | --- |
"""

_SHOWING = """
## See a bug without its mend

    .venv/bin/python -m tests.unmended 6898282            # an idle client took a whole core
    .venv/bin/python -m tests.unmended "An idle client no longer takes a whole core"      # the same, by its subject

The command needs the environment that `make test` makes, and a clone with all its history. It takes the commit's code
out of a temporary worktree of HEAD, and builds it. It then runs the bug's test there, which must fail. Another test
may follow as a second argument. The exit code is 0 if the test failed.

Later commits may have changed the same lines. The command says so, and goes back to the commit itself: to its tests,
and to the code before it. Far back that may not build any more, and the command says that, too.

Read the failure. A test may also fail since it calls a function that came with the mend: that shows nothing.

"""

_TABLE = """
A hash may change if history is rewritten; the subject stays. One commit often mended several bugs. If there is no
test, none of its own is known.

| bug | found by | commit | test | shown |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Kind:
    """A way to find bugs."""

    name: str
    means: str
    time: str
    hours: float = 0  # the same as a number, if it is known


@dataclass(frozen=True)
class Bug:
    """One entry. `found` is a kind's name or NOT_RECORDED; `tests` are FILE or FILE::NAME."""

    bug: str
    mend: str
    commit: str = ""
    found: str = NOT_RECORDED
    tests: tuple[str, ...] = ()
    shown: bool = False


@dataclass(frozen=True)
class Form:
    """All runs on record of some forms of `make nightly`: how long they took together, and how much they found. `flaws`
    are those of tests and of the night."""

    name: str
    minutes: float
    bugs: int
    flaws: int


def read(text: str) -> tuple[list[Kind], list[Bug]]:
    """Return what a data file says. Raises TypeError if an entry has a key that there is not."""
    data = tomllib.loads(text)
    bugs = [Bug(**entry | {"tests": tuple(entry.get("tests", ()))}) for entry in data["bug"]]
    return [Kind(**entry) for entry in data["kind"]], bugs


def nights(text: str) -> list[Form]:
    """Return what a data file says of nights. Raises TypeError as read does."""
    return [Form(**entry) for entry in tomllib.loads(text).get("form", ())]


def names(path: Path) -> set[str]:
    """Return the tests in a file, Python's or C's, without running anything."""
    text = path.read_text()
    if path.suffix == ".c":
        return set(re.findall(r"\bTEST\((\w+)\)", text))
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def page(text: str) -> str:
    """Return the page of a data file."""
    kinds, bugs = read(text)
    rows = []
    for kind in sorted(kinds, key=lambda kind: -sum(bug.found == kind.name for bug in bugs)):
        found = [bug for bug in bugs if bug.found == kind.name]
        tested = sum(bool(bug.tests) for bug in found)
        hourly = "" if kind.name in PEOPLE else f"{len(found) / kind.hours:.1f}" if kind.hours else NOT_RECORDED
        rows.append(f"| {kind.name} | {kind.means} | {len(found)} | {tested} | {kind.time} | {hourly} |")
    unknown = [bug for bug in bugs if bug.found == NOT_RECORDED]
    tested = sum(bool(bug.tests) for bug in bugs)
    rows.append(f"| {NOT_RECORDED} | | {len(unknown)} | {sum(bool(bug.tests) for bug in unknown)} | | |")
    rows.append(f"| all | | {len(bugs)} | {tested} | {NOT_RECORDED} | {NOT_RECORDED} |")
    return "".join(
        [
            _HEAD,
            "".join(f"{row}\n" for row in rows),
            _worth(kinds, bugs),
            _nights(nights(text)),
            _SHOWING,
            f"{sum(bug.shown for bug in bugs)} of the {len(bugs)} bugs were seen so: yes in the last column.\n",
            "Nothing is claimed for the others.\n",
            "\n## All of them, oldest first\n",
            _TABLE,
            *map(_row, bugs),
        ]
    )


def _worth(kinds: list[Kind], bugs: list[Bug]) -> str:
    told = [bug for bug in bugs if bug.found != NOT_RECORDED]
    read_ = sum(bug.found in PEOPLE for bug in told)
    none = [kind.name for kind in kinds if not any(bug.found == kind.name for bug in bugs)]
    return f"""
## What is worth more

Nobody kept the machine time of other kinds than `scale` before there were nights, so counts alone compare all of them:

- Of {len(bugs)} bugs, {len(told)} have a record of how they were found. People who read or tried found {read_} of
  those, and machines {len(told) - read_}.
- Of these, reading found the gravest: a write out of order, two holders of a lock, lost additions and torn reads on
  processors that reorder stores.
- Machines found what takes an odd moment: a thread that ends first, a clock read too late, a full queue, a dead
  connection.
- The newest kind, the soak, found {sum(bug.found == "soak" for bug in bugs)} so far.
- No bug is on record for: {", ".join(none)}. That says nothing of what they found before a commit.

So far reading is worth most, by count. The ways of {len(bugs) - len(told)} bugs are not recorded, so the true order may
be another.
"""


def _nights(forms: list[Form]) -> str:
    rows = [*sorted(forms, key=lambda form: (-form.bugs, -form.minutes)), _all(forms)]
    best = max(forms, key=lambda form: form.bugs / form.minutes).name
    lines = [
        f"| {form.name} | {form.minutes / 60:.1f} h | {form.bugs} | {form.bugs * 60 / form.minutes:.1f} "
        f"| {form.flaws} |\n"
        for form in rows
    ]
    return f"""
## By the hour

`make nightly` writes how long each form ran into its `results.json`. These are all runs on record, on two cores, with
those that failed or were interrupted. A run that the same commit's next run of the form replaced is not counted.
Flaws are those of tests, and of the night.

| forms | machine time | bugs | bugs per hour | flaws |
| --- | --- | --- | --- | --- |
{"".join(lines)}
By then each form had often run by itself, and most of its bugs were mended. So a night mostly shows that nothing came
back. An hour of these was worth most: {best}. So few bugs do not order the others.
"""


def _all(forms: list[Form]) -> Form:
    return Form(
        "all", sum(form.minutes for form in forms), sum(form.bugs for form in forms), sum(form.flaws for form in forms)
    )


def _row(bug: Bug) -> str:
    tests = "<br>".join(f"`{test}`" for test in bug.tests)
    mend = bug.mend.replace("|", "\\|")
    return f"| {bug.bug} | {bug.found} | {f'{bug.commit} {mend}'.strip()} | {tests} | {'yes' if bug.shown else ''} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(DATA.read_text()))
