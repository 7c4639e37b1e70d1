"""examples/: each runs by itself, as its first lines say, and ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str) -> list[str]:
    """Return what it prints, by lines."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=110,
        env={key: value for key, value in os.environ.items() if not key.startswith("SMB_")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["counters.py", "parameter_server.py", "reader_writer.py", "taking_turns.py"])
def test_an_example_runs(name: str) -> None:
    """It ends with exit code 0 and has said something."""
    assert run_example(name)


def test_one_trainer_and_sixteen_readers() -> None:
    """Every reader saw whole generations only (it checks each), the last one included."""
    *readers, trainer = run_example("trainer_to_readers.py")
    assert sorted(line.split(" saw")[0] for line in readers) == sorted(f"reader {number:2}" for number in range(16))
    assert all(line.endswith("to 50, each of one piece") for line in readers)
    assert trainer.startswith("the trainer published 50 generations")


def test_every_example_is_in_the_list_of_examples() -> None:
    """The table in README.md names each file."""
    text = (EXAMPLES / "README.md").read_text()
    assert [file.name for file in EXAMPLES.glob("*.py") if f"({file.name})" not in text] == []
