"""tests/nightly.py: the hours are kept, a night goes on where it was stopped, and no failure or leftover passes unseen.

The forms here are targets of a line, in a repository of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.nightly import (
    FORMS,
    NOT_RUN,
    Form,
    Result,
    bounds,
    counts,
    findings,
    seeds,
    table,
    to_do,
    variables,
    verdict,
)
from tests.support.daemons import wait_for
from tests.support.leftovers import number_of, split, split_mounts

ROOT = Path(__file__).parents[3]
SLEEP = f"sleep 1000.{os.getpid()}"  # no other program's
MAKEFILE = f"""
good: ; @echo seed 17
bad: ; @echo 'FAILED tests/x.py::test_y - seven'; false
slow: ; @echo begun; {SLEEP}
daemon: ; @setsid {SLEEP} >/dev/null 2>&1 &
memory: ; @exec 3>/dev/shm/smb-nightly-$$PPID; sleep 2.5
"""
NIGHT = """
import sys
from pathlib import Path
from tests import nightly
nightly.ROOT, nightly.END_S, nightly.LINGER_S = Path(sys.argv[1]), 5, 0.5
names = ("good", "bad", "slow", "daemon", "memory")
sys.exit(nightly.main(sys.argv[2:], [nightly.Form(name, name, 1, 0) for name in names]))
"""


class Trial:
    """A repository with MAKEFILE, and nights there."""

    def __init__(self, work: Path) -> None:
        self.repository, self.directory = work / "repository", work / "nightly"
        self.repository.mkdir()
        (self.repository / "Makefile").write_text(MAKEFILE)
        ours = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
        for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "forms"]):
            subprocess.run(["git", *words], cwd=self.repository, env=ours, check=True, timeout=60)

    def start(self, *arguments: str, under: Sequence[str] = ()) -> subprocess.Popen[str]:
        command = [*under, sys.executable, "-c", NIGHT, str(self.repository), *arguments]
        variables = os.environ | {"SMB_NIGHTLY_DIR": str(self.directory), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as night:
            told = night.communicate(timeout=100)[0]
        return night.returncode, told

    @property
    def forms(self) -> dict[str, dict[str, Any]]:
        """What the night recorded of each form."""
        (path,) = self.directory.glob("*/results.json")
        return {form["name"]: form for form in json.loads(path.read_text())["forms"]}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def running(command: str) -> bool:
    """Whether a process of that command line lives."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().replace(b"\0", b" ").strip() == command.encode():
                return True
    return False


def test_bounds_are_shares_of_the_hours_and_leave_out_what_does_not_fit() -> None:
    """All forms fit in a night; in two hours those with the largest least do not, and the others have the time."""
    forms = [Form("long", "", 60, 60), Form("short", "", 30, 10), Form("tiny", "", 10, 2)]
    assert bounds(forms, 10) == {"long": 21600, "short": 10800, "tiny": 3600}
    assert bounds(forms, 1) == {"short": 2700, "tiny": 900}
    assert bounds(forms, 0.01) == {}
    assert bounds([], 8) == {}
    night = bounds(FORMS, 8)
    assert set(night) == {form.name for form in FORMS}
    assert sum(night.values()) <= 8 * 3600


def test_a_night_goes_on_with_what_has_no_end_yet() -> None:
    forms = [Form(name, "", 1, 1) for name in ("passed", "FAILED", "interrupted", "not run", "new")]
    known = {form.name: Result(form.name, form.name) for form in forms[:-1]}
    assert [form.name for form in to_do(forms, known, again=False)] == ["interrupted", "not run", "new"]
    assert to_do(forms, known, again=True) == forms


def test_a_form_inherits_nothing_of_the_make_that_runs_the_night() -> None:
    """What is said to `make nightly` is exported by it, and would be said to each form."""
    ours = {"MAKEFLAGS": " -- HOURS=1 TESTS=tests/unit\\ -x", "HOURS": "1", "TESTS": "tests/unit -x", "MAKELEVEL": "1"}
    assert variables({**ours, "PYTHONPATH": "here", "SMB_LONG": "1", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_the_verdict_is_of_the_exit_code_the_bound_and_what_is_left() -> None:
    assert verdict(0, 60, []) == ("passed", "")
    assert verdict(2, 60, ["a process"])[0] == "FAILED"
    state, why = verdict(None, 60, [])
    assert state == "HUNG"
    assert why.startswith("not done after 60 s; ")
    assert why.endswith("more hours, and --again")
    assert verdict(0, 60, ["a mount"]) == ("LEFT THINGS", "1 left behind")


def test_a_log_tells_its_seeds_and_what_failed() -> None:
    log = "seed 4: repeat with x\nINFO: Seed: 99\nseeds 1 to 8\nseed 4\nproceed 7\nFAILED a.py::b - no\nlast"
    assert seeds(log) == ["4", "99", "1 to 8"]
    assert findings(log) == ["FAILED a.py::b - no"]
    for line in ("tsan: FAILED two_clients (wait status 0x100)", "==7==ERROR: AddressSanitizer: heap-use-after-free"):
        assert findings(f"begun\n{line}\nlast") == [line]
    assert findings("one\ntwo") == ["one", "two"]


def test_a_log_tells_how_many_tests_were_skipped() -> None:
    """A form passes without a test that needs what the machine lacks: the table says so."""
    log = "3 failed, 148 passed, 7 skipped in 2639.33s (0:43:59)\n5 passed in all\n== 20 passed, 2 warnings in 1.0s =="
    assert counts(log) == {"passed": 168, "skipped": 7}
    assert counts("done") == {}


def test_the_table_names_state_time_and_the_command_that_repeats_it() -> None:
    failed = Result("fault", "FAILED", "exit status 1", 3723, 7200, "make -C there fault", "a.log", ["5"], ["FAILED x"])
    docs = Result("docs", "passed", seconds=61, tests={"passed": 70, "skipped": 2})
    told = table([docs, failed, Result("bare", NOT_RUN, "no time")])
    assert "fault      FAILED        1:02:03  2:00:00                 5\n" in told
    assert "docs       passed        0:01:01  0:00:00     70       2" in told
    assert "    FAILED x\n    again: make -C there fault\n    log: a.log\n\nbare: not run, no time" in told


def test_what_is_new_is_ours_by_its_number_or_by_who_held_it() -> None:
    """Others' memory on the same machine is told, and left alone."""
    assert number_of("smblab-17.4-switch") == 17
    assert number_of("smb-fuzz-a1b2") is None
    assert split({"smb-cluster-17-99", "smb-cluster-5-17", "held", "other"}, {17}, {"held", "gone"}) == (
        ["held", "smb-cluster-17-99"],
        ["other", "smb-cluster-5-17"],
    )
    soak, test, other = (f"{tempfile.gettempdir()}/{name}" for name in ("smb-soak-x/disk", "pytest-of-a/b/m", "app/m"))
    points = {"/n/tree/a", "/n/tree/a/b", "/n/trees", "/n/tree", soak, test, other}
    assert split_mounts(points, Path("/n/tree")) == (["/n/tree/a/b", "/n/tree/a"], sorted((soak, test)))


def test_each_form_is_told_by_how_it_ended_and_nothing_of_it_stays(trial: Trial) -> None:
    """One that holds, one that fails, one that hangs, one that leaves a process, and one that leaves shared memory."""
    code, told = trial.run("--hours", str(5 * 6 / 3600))  # six seconds for each
    assert code == 1
    states = {name: form["state"] for name, form in trial.forms.items()}
    expected = {"good": "passed", "bad": "FAILED", "slow": "HUNG", "daemon": "LEFT THINGS", "memory": "LEFT THINGS"}
    assert states == expected, told
    assert trial.forms["good"]["seeds"] == ["17"]
    assert "FAILED tests/x.py::test_y - seven" in told
    assert f"again: make -C {trial.directory}" in told
    assert SLEEP in trial.forms["daemon"]["left"][0]
    (memory,) = trial.forms["memory"]["left"]
    assert memory.startswith("/dev/shm/smb-nightly-")
    assert not Path(memory).exists()
    assert not running(SLEEP)


def test_one_interrupt_ends_it_and_the_next_call_goes_on(trial: Trial) -> None:
    """What ran stays, what was cut short runs again, and the commit's other forms follow."""
    with trial.start("--only", "good", "slow", "daemon") as night:
        wait_for(lambda: "begun" in "".join(path.read_text() for path in trial.directory.glob("*/slow.log")), "form")
        night.send_signal(signal.SIGINT)
        began = time.monotonic()
        told = night.communicate(timeout=60)[0]
    assert night.returncode == 130
    assert time.monotonic() - began < 30
    states = {name: form["state"] for name, form in trial.forms.items()}
    assert states == {"good": "passed", "slow": "interrupted", "daemon": "not run"}
    assert "slow: interrupted" in told
    assert not running(SLEEP)
    code, told = trial.run("--only", "good", "slow", "--list")
    assert (code, [line.split()[1] for line in told.splitlines()]) == (0, ["not", "8:00:00"])
    assert trial.run("--only", "good")[0] == 0


def test_under_nohup_a_lost_terminal_does_not_end_it(trial: Trial) -> None:
    """Its form comes to its bound, and is not interrupted."""
    with trial.start("--only", "slow", "--hours", str(6 / 3600), under=["nohup"]) as night:
        wait_for(lambda: "begun" in "".join(path.read_text() for path in trial.directory.glob("*/slow.log")), "form")
        night.send_signal(signal.SIGHUP)
        assert night.wait(60) == 1
    assert trial.forms["slow"]["state"] == "HUNG"


def test_a_form_that_cannot_be_cloned_has_failed_and_the_next_is_tried(trial: Trial) -> None:
    objects = trial.repository / ".git/objects"
    shutil.rmtree(objects)
    objects.mkdir()
    code, told = trial.run("--only", "good", "bad")
    assert code == 1
    assert [form["state"] for form in trial.forms.values()] == ["FAILED", "FAILED"]
    assert "bad: FAILED, could not be run: " in told
