"""The record of bugs names tests and commits that exist, and a bug shows without its mend."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import unmended
from tests.support import track_record
from tests.support.track_record import DATA, NOT_RECORDED, ROOT

FIRST = "C engine: kernels, frames, layout, segments, server, client"
KINDS, BUGS = track_record.read(DATA.read_text())


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git")


def git(place: Path, *arguments: str) -> str:
    """Without the settings and hooks of this machine."""
    alone = unmended.without_git(os.environ) | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
    return subprocess.run(command, cwd=place, check=True, env=alone, capture_output=True, text=True).stdout


def test_every_regression_test_has_its_line() -> None:
    """A file in tests/regressions is there for at least one bug."""
    named = {test.partition("::")[0] for bug in BUGS for test in bug.tests}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "regressions").glob("test_*.py")}
    assert len(files) > 30
    assert files - named == set()


def test_every_test_that_is_named_is_there() -> None:
    """Looked up in the source, of Python or C."""
    known: dict[str, set[str]] = {}
    missing = []
    for test in {test for bug in BUGS for test in bug.tests}:
        file, _, name = test.partition("::")
        path = ROOT / file
        if not path.is_file() or (name and name not in known.setdefault(file, track_record.names(path))):
            missing.append(test)
    assert missing == []


@needs_git
def test_every_commit_is_in_the_history() -> None:
    """By its subject: hashes change if history is rewritten, and a shallow clone has few commits."""
    run = subprocess.run(["git", "log", "--format=%s"], cwd=ROOT, capture_output=True, text=True)
    subjects = set(run.stdout.splitlines())
    if FIRST not in subjects:
        pytest.skip("no clone with the whole history")
    assert {bug.mend for bug in BUGS if bug.commit} - subjects == set()


def test_entries_are_plain() -> None:
    """One short sentence each, no bug twice, a kind that is there, and no claim of a failure without a test."""
    assert [bug.bug for bug in BUGS if len(bug.bug.split()) > 25 or not bug.bug.endswith(".")] == []
    assert [text for text, count in Counter(bug.bug for bug in BUGS).items() if count > 1] == []
    assert {bug.found for bug in BUGS} <= {kind.name for kind in KINDS} | {NOT_RECORDED}
    assert [bug.bug for bug in BUGS if bug.shown and not bug.tests] == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Its second commit mends a bug and brings the test, the third leaves another mend that is written over."""
    place = tmp_path / "repository"
    for folder in ("tests", "docs", "perf"):
        (place / folder).mkdir(parents=True)
        (place / folder / "kept.txt").write_text("kept\n")
    git(place, "init", "--quiet")
    for subject, files in (
        ("First", {"answer.txt": "41\n", "other.txt": "1\n", "tests/seen.txt": "", "README.md": "one\n"}),
        ("The answer is right", {"answer.txt": "42\n", "tests/seen.txt": "42\n", "README.md": "two\n"}),
        ("Another mend", {"other.txt": "2\n"}),
        ("Written over", {"other.txt": "3\n", "README.md": "three\n"}),
    ):
        for name, text in files.items():
            (place / name).write_text(text)
        git(place, "add", "--all")
        git(place, "commit", "--quiet", "--message", subject)
    return place


@needs_git
def test_a_mend_is_taken_out_and_its_test_stays(repository: Path) -> None:
    """By subject or by hash; the worktree goes, and the repository stays as it is."""
    commit, subject = unmended.find(repository, "The answer is right")
    assert unmended.find(repository, commit[:9]) == (commit, subject)
    with unmended.without(repository, commit) as place:
        assert (place / "answer.txt").read_text() == "41\n"
        assert (place / "tests" / "seen.txt").read_text() == "42\n"
        assert (place / "README.md").read_text() == "three\n"  # a conflict in a page is none
    assert not place.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert (repository / "answer.txt").read_text() == "42\n"
    assert git(repository, "status", "--porcelain") == ""


@needs_git
def test_a_mend_that_cannot_be_taken_out_is_told(repository: Path) -> None:
    """One that was written over, one that is not there, one that only changed tests; a list of commits stays clean."""
    with (
        pytest.raises(unmended.WrittenOverError, match=r"later commits changed other\.txt"),
        unmended.without(repository, unmended.find(repository, "Another mend")[0]),
    ):
        raise AssertionError
    commit = unmended.find(repository, "Another mend")[0]
    with unmended.without(repository, commit, commit) as place:  # what its own tree was without it
        assert (place / "other.txt").read_text() == "1\n"
        assert (place / "tests" / "seen.txt").read_text() == "42\n"
    with pytest.raises(unmended.UnmendedError, match="no commit of HEAD"):
        unmended.find(repository, "Nobody made this")
    (repository / "tests" / "more.txt").write_text("")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "A test")
    with (
        pytest.raises(unmended.UnmendedError, match="changed no code"),
        unmended.without(repository, unmended.find(repository, "A test")[0]),
    ):
        raise AssertionError
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_test_that_passes_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that cannot be loaded or is not there; one that fails does, also in another folder."""
    monkeypatch.setattr(unmended, "BUILD", ("pass",))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "tests" / "earlier").mkdir(parents=True)
    (tmp_path / "tests" / "earlier" / "test_three.py").write_text(
        "def test_good():\n    pass\ndef test_bad():\n    assert False\n"
    )
    (tmp_path / "test_none.py").write_text("import nothing_of_this_name\n")
    assert unmended.fails(tmp_path, "tests/test_three.py::test_good") is False
    assert unmended.fails(tmp_path, "tests/test_three.py::test_bad") is True
    assert unmended.fails(tmp_path, "test_none.py") is None
    assert unmended.fails(tmp_path, "tests/test_four.py::test_good") is None


@pytest.mark.skipif(shutil.which("make") is None, reason="make")
def test_a_test_in_c_that_does_not_compile_shows_nothing(tmp_path: Path) -> None:
    """Nor does another one's failure: it is built first, and its name must be told."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_three.c").write_text("")
    makefile = tmp_path / "tests" / "Makefile"
    makefile.write_text("all:\n\t@true\ncheck:\n\t@echo FAILED bad of $(SUITES); false\n")
    assert unmended.fails(tmp_path, "tests/test_three.c::bad") is True
    assert unmended.fails(tmp_path, "tests/test_three.c::other") is None
    makefile.write_text("all:\n\t@echo FAILED bad, an error of the compiler; false\ncheck: all\n")
    assert unmended.fails(tmp_path, "tests/test_three.c::bad") is None
    makefile.write_text("all check:\n\t@true\n")
    assert unmended.fails(tmp_path, "tests/test_three.c::bad") is False


def test_the_names_of_tests_are_read_from_the_source(tmp_path: Path) -> None:
    """Of both languages, and nothing else."""
    (tmp_path / "test_a.py").write_text("def test_one(): ...\nasync def test_two(): ...\ndef other(): ...\n")
    (tmp_path / "test_a.c").write_text("static void helper(void) {}\n... = {TEST(one),\n TEST(two)};")
    assert track_record.names(tmp_path / "test_a.py") == {"test_one", "test_two"}
    assert track_record.names(tmp_path / "test_a.c") == {"one", "two"}
