"""smb.daemon.failpoint: it is off unless two variables say otherwise, and then it kills where it was told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from smb.daemon import failpoint

SCRIPT = """
from smb.daemon.failpoint import failpoint
for name in ("one", "two", "one", "two"):
    print(name, flush=True)
    failpoint(name)
"""


def run(**variables: str) -> tuple[int, str, str]:
    """Return how the script ends in an environment with these variables, and what it says."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment | variables, capture_output=True, text=True, timeout=30
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(("armed", "said"), [("two", "one\ntwo\n"), ("one:2", "one\ntwo\none\n")])
def test_it_kills_at_the_named_place_and_count(armed: str, said: str) -> None:
    """SIGKILL: nothing after that place is done."""
    assert run(SMB_FAILPOINT=armed, SMB_FAILPOINTS_ALLOWED="1") == (-signal.SIGKILL, said, "")


def test_a_place_that_is_not_reached_kills_nobody() -> None:
    """Neither another name nor a count that is not reached."""
    for armed in ("three", "one:3"):
        assert run(SMB_FAILPOINT=armed, SMB_FAILPOINTS_ALLOWED="1")[0] == 0


def test_one_variable_alone_arms_nothing() -> None:
    """A name without the permission is ignored, and said to be."""
    code, said, told = run(SMB_FAILPOINT="one")
    assert (code, said) == (0, "one\ntwo\none\ntwo\n")
    assert "SMB_FAILPOINT=one is ignored" in told
    assert run(SMB_FAILPOINTS_ALLOWED="1") == (0, "one\ntwo\none\ntwo\n", "")


def test_a_count_that_is_none_is_refused() -> None:
    """A test that misspells its place must not pass for it."""
    for count, told in (("0", "at least 1"), ("x", "invalid literal")):
        with pytest.raises(ValueError, match=told):
            failpoint.arm({"SMB_FAILPOINT": f"one:{count}", "SMB_FAILPOINTS_ALLOWED": "1"})
