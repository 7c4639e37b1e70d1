"""Shows a bug: takes its mend out of a copy of HEAD, where the bug's test must then fail.

    python -m tests.unmended COMMIT-OR-SUBJECT [TEST]

TEST is FILE or FILE::NAME, of Python or C; without it those of tests/track-record.toml are run. The copy is a temporary
worktree of git, built in place. Tests, docs and measurements stay as they are at HEAD. If later commits changed the
same lines, the copy is of the commit itself instead: its tests, and the code before it. The exit code is 0 if a test
failed, 1 if all passed or none could be run, 2 if the commit is not known or changed no code. Read the failure: a test
may also fail since it calls a function that came with the mend.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.track_record import DATA, ROOT, read

# These stay as they are: the test that is to fail must be there.
KEPT = ("tests", "docs", "perf", ":(glob)*.md")
BUILD = (
    "from csrc.build_engine import make_grpc_code; make_grpc_code(); from setuptools import setup; setup()",
    "-q",
    "build_ext",
    "--inplace",
)
LINES = 30  # of a failure, shown at the end


class UnmendedError(Exception):
    """The commit is not known, or changed no code."""


class WrittenOverError(UnmendedError):
    """Later commits changed the same lines."""


def without_git(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without git's variables, which name another repository if a hook runs this."""
    return {key: value for key, value in environment.items() if not key.startswith("GIT_")}


def git(root: Path, *arguments: str, check: bool = True) -> str:
    run = subprocess.run(["git", *arguments], cwd=root, env=without_git(os.environ), capture_output=True, text=True)
    if check and run.returncode:
        raise UnmendedError(f"git {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout.strip()


def find(root: Path, wanted: str) -> tuple[str, str]:
    """Return hash and subject of the newest commit that is meant, by its hash or its subject."""
    by_hash = git(root, "rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}", check=False)
    if by_hash:
        return by_hash, git(root, "log", "-1", "--format=%s", by_hash)
    for line in git(root, "log", "--no-merges", "--format=%H %s").splitlines():
        commit, _, subject = line.partition(" ")
        if subject == wanted:
            return commit, subject
    raise UnmendedError(f"no commit of HEAD has the hash or the subject {wanted!r}; is this clone shallow?")


@contextmanager
def without(root: Path, commit: str, base: str = "HEAD") -> Iterator[Path]:
    """A worktree of a commit (base) without the changes that another one made to code; it goes with the context."""
    with tempfile.TemporaryDirectory(prefix="smb-unmended-") as folder:
        place = Path(folder) / "tree"
        git(root, "worktree", "add", "--quiet", "--detach", str(place), base)
        try:
            git(place, "revert", "--no-commit", commit, check=False)  # conflicts in what is kept are none
            for path in KEPT:  # one that is not there yet is refused
                git(place, "restore", f"--source={base}", "--staged", "--worktree", "--", path, check=False)
            if conflicts := git(place, "diff", "--name-only", "--diff-filter=U"):
                raise WrittenOverError(f"later commits changed {', '.join(conflicts.split())}")
            if not git(place, "diff", base, "--name-only"):
                raise UnmendedError("it is a merge, or changed no code, or none of that is left")
            yield place
        finally:
            git(root, "worktree", "remove", "--force", str(place), check=False)


def fails(place: Path, test: str) -> bool | None:
    """Whether a test fails in a tree; None if it could not be run. What it said goes to stdout."""
    file, _, name = test.partition("::")
    elsewhere = place.glob(f"tests/**/{Path(file).name}")  # an earlier tree may have it in another folder
    found = [place / file] if (place / file).is_file() else [*elsewhere]
    if len(found) != 1:
        print(f"there is no {file} yet")
        return None
    path = found[0].relative_to(place)
    if path.suffix == ".c":
        make = ["make", f"-j{os.cpu_count()}", "-C", str(path.parent), "BUILDS=asan tsan", f"SUITES={path.stem}"]
        build, test = [*make, "all"], [*make, "check"]
    else:
        build = [sys.executable, "-c", *BUILD]
        node = f"{path}::{name}" if name else str(path)
        test = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", node]
    if (built := tell(place, build)).returncode:
        print(*built.stdout.splitlines()[-LINES:], sep="\n")
        return None
    ran = tell(place, test)
    print(*ran.stdout.splitlines()[-LINES:], sep="\n")
    if path.suffix == ".c" and ran.returncode:
        return True if f"FAILED {name}" in ran.stdout else None  # another case of the file may have
    return {0: False, 1: True}.get(ran.returncode)


def tell(place: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a tree, all of its output in one text."""
    return subprocess.run(
        command, cwd=place, env=environment(place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def environment(place: Path) -> dict[str, str]:
    """Return the environment in which the worktree's packages are found before those that are installed."""
    return {key: value for key, value in os.environ.items() if key != "MAKEFLAGS"} | {"PYTHONPATH": str(place)}


def run(root: Path, commit: str, base: str, tests: Sequence[str]) -> bool:
    """Run tests in a tree without a commit; return whether one failed."""
    shown = False
    with without(root, commit, base) as place:
        for test in dict.fromkeys(tests):
            failed = fails(place, test)
            outcome = {
                True: "fails: see above whether by this bug",
                False: "passes: shows nothing",
                None: "could not be run: shows nothing",
            }
            print(f"{test} {outcome[failed]}", flush=True)
            shown = shown or bool(failed)
    return shown


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.unmended", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("commit", help="its hash or its subject")
    parser.add_argument("test", nargs="?", help="FILE or FILE::NAME; those of tests/track-record.toml if left out")
    asked = parser.parse_args(arguments)
    try:
        entries = read(DATA.read_text())[1]
        # A hash of the page outlives rewritten history by its subject.
        subjects = [bug.mend for bug in entries if bug.commit == asked.commit]
        commit, subject = find(root, subjects[0] if subjects else asked.commit)
        tests = [asked.test] if asked.test else [test for bug in entries if bug.mend == subject for test in bug.tests]
        if not tests:
            raise UnmendedError("tests/track-record.toml names no test of it; say one")
        print(f"without {commit[:7]} {subject}", flush=True)
        try:
            shown = run(root, commit, "HEAD", tests)
        except WrittenOverError as error:
            print(f"HEAD cannot be had without it: {error}. Its own tree, without it:", flush=True)
            shown = run(root, commit, commit, tests)
    except UnmendedError as error:
        print(f"{asked.commit}: {error}", file=sys.stderr)
        return 2
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
