"""The tutorials of docs/, as a newcomer types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.mounts import missing_for_mounts
from tests.support.pages import follow

pytest.importorskip("torch", reason="PyTorch")


# More than 5 s: all commands of a page one after the other, as programs, some of which import PyTorch.
def test_training_together(tmp_path: Path) -> None:
    """Two processes join; the one that comes back after the kill takes over the model; both end with a good one."""
    output = follow("tutorial-trainer.md", tmp_path)
    assert output.count("its weights are yours") == 1
    assert output.count("its weights replaced yours") >= 2  # the second process, and the one that came back
    accuracies = [float(found) for found in re.findall(r"^accuracy (.*)$", output, re.MULTILINE)]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.9


# More than 5 s: as above.
def test_publishing_to_readers(tmp_path: Path) -> None:
    """A reader that waits for the trainer, a late one, and one of the mirror itself end with the last generation."""
    missing = missing_for_mounts()
    output = follow("tutorial-publisher.md", tmp_path, ("mount",) if missing else ())
    assert missing or "{'weight': [1000, 1000], 'bias': [1000]}\n" in output
    assert "published generation 10\n" in output
    assert output.count("generation 10\n") == 3  # the trainer's line has it, too
    assert re.search(r"^server-1 .*alive +10 ", output, re.MULTILINE)
    assert "\n10 10.0\n" in output  # from the mirror
