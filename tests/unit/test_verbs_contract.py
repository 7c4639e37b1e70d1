"""The list of tests that run over verbs is complete."""

from __future__ import annotations

from pathlib import Path

from tests.verbs.contract import LEFT_OUT, OVER_VERBS

TESTS = Path(__file__).parents[1]


def test_each_file_runs_over_verbs_or_says_why_not() -> None:
    """A new file of tests has to be in one of the two lists, and none names a file that is gone."""
    folders = ("api", "engine", "fault", "files", "ops", "regressions", "train")
    there = {f"{folder}/{file.name}" for folder in folders for file in (TESTS / folder).glob("test_*.py")}
    assert sorted([*OVER_VERBS, *LEFT_OUT]) == sorted(there)
