"""smb.torch.trl in the real TRL, on a CPU: examples/grpo.py, and the protocol of that release."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from smb.torch.trl import WeightTransfer

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # TRL's, and those of what it brings

ROOT = Path(__file__).parents[2]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="not run: it needs TRL (make stacks)")


def test_weight_transfer_has_the_methods_of_trls_protocol() -> None:
    """With the same parameters."""
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    theirs = {name: each for name, each in vars(WeightTransferProtocol).items() if inspect.isfunction(each)}
    wanted = {name: list(inspect.signature(each).parameters) for name, each in theirs.items() if name[0] != "_"}
    assert wanted
    assert wanted == {name: list(inspect.signature(getattr(WeightTransfer, name)).parameters) for name in wanted}


def test_rewards_rise_while_engines_come_and_go() -> None:
    """TRL trains by generations that engines follow; one is killed and one joins. Takes a minute: four processes import
    transformers, three of them TRL."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "grpo.py")],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "generation 13: engine 0 is killed" in ran.stdout
    assert "generation 20: engine 2 joins" in ran.stdout
    last = re.search(r"41 generations; mean rewards: ([\d., ]+)", ran.stdout)
    assert last, ran.stdout[-2000:]
    rewards = [float(each) for each in last[1].split(", ")]
    assert rewards[0] < 0.3 < 0.6 < rewards[-1], rewards  # by chance 1 / 16
