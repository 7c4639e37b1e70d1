"""tests/support/packages.py: what is missing is installed, whole, and apt's own reason is given where it is not.

dpkg-query and apt-get are programs of a few lines here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import packages
from tests.support.daemons import wait_for
from tests.support.packages import PackagesError, Tool, install, install_tools

ROOT = Path(__file__).parents[3]


class Debian:
    """A folder of programs that stand for Debian's; `asked` has apt-get's words."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.asked = folder, folder / "asked"
        self.asked.touch()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        self.program("dpkg-query", "echo 'here installed'; echo 'removed config-files'")

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ncd {self.folder}\n{script}\n")
        path.chmod(0o755)

    def apt_get(self, download: str = "", install: str = "") -> None:
        cases = f"*--download-only) {download} ;; *install*) {install} ;;"
        self.program("apt-get", f'echo "$*" >>asked\ncase "$*" in {cases} esac')

    def made(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Debian:
    return Debian(tmp_path, monkeypatch)


def test_what_is_missing_is_installed(debian: Debian) -> None:
    debian.apt_get()
    install(["here", "removed", "new"])
    update, _, words = debian.asked.read_text().splitlines()
    assert update.endswith("update")
    assert words.endswith("install -y --no-install-recommends removed new")


def test_nothing_is_asked_of_apt_where_nothing_is_missing(debian: Debian) -> None:
    debian.apt_get()
    install(["here"])
    assert debian.asked.read_text() == ""


def test_apts_own_reason_is_given(debian: Debian) -> None:
    """Of a dpkg that had been interrupted the message said that a package mirror was needed."""
    debian.apt_get("echo 'W: old lists' >&2; echo \"E: you must run 'dpkg --configure -a'\" >&2; exit 100")
    with pytest.raises(PackagesError, match=r"install failed: E: you must run 'dpkg --configure -a'; as root: .* new$"):
        install(["new"])


def test_a_failure_without_a_word_is_one(debian: Debian) -> None:
    debian.apt_get(install="exit 7")
    with pytest.raises(PackagesError, match="exit status 7"):
        install(["new"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_half_installed(debian: Debian, number: signal.Signals) -> None:
    """subprocess.run killed apt-get, with dpkg at work, and every later installation failed."""
    debian.apt_get(
        install="touch begun; timeout 60 sh -c 'until [ -e told ]; do sleep 0.1; done'; sleep 1; touch whole"
    )
    with installer() as ours:
        wait_for(lambda: debian.made("begun"), "installation has begun")
        os.killpg(ours.pid, number)  # as a terminal does
        (debian.folder / "told").touch()
        said = ours.communicate(timeout=100)[1]
    assert debian.made("whole"), said
    assert ours.returncode == -number, said  # put off, not lost


def test_a_signal_ends_a_download(debian: Debian) -> None:
    debian.apt_get("touch begun; exec sleep 60", "touch whole")
    with installer() as ours:
        wait_for(lambda: debian.made("begun"), "download has begun")
        os.killpg(ours.pid, signal.SIGINT)
        said = ours.communicate(timeout=30)[1]
    assert ours.returncode == -signal.SIGINT, said
    assert not debian.made("whole")


def installer() -> subprocess.Popen[str]:
    """Start install(["new"]) in a group of its own, with a terminal's signals: whoever runs tests may ignore some."""
    code = (
        "import os, signal; os.geteuid = lambda: 0; from tests.support.packages import SIGNALS, install\n"
        "for number in SIGNALS: signal.signal(number, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler); install(['new'])"
    )
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def tools(debian: Debian, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two tools of packages that are not installed; returns the file that keeps services from starting."""
    of = {name: Tool(f"tool-{name}", (name,), f"no {name} is tried") for name in ("one", "two")}
    monkeypatch.setattr(packages, "TOOLS", of)
    policy = tmp_path / "policy"
    monkeypatch.setattr(packages._no_services.__wrapped__, "__defaults__", (policy,))
    return policy


def test_tools_are_installed_at_once_and_start_no_service(debian: Debian, tools: Path) -> None:
    debian.apt_get(install="cp policy policy-then; echo >tool-one; chmod +x tool-one; cp tool-one tool-two")
    assert install_tools(["one", "two"]) == []
    update, _, words = debian.asked.read_text().splitlines()
    assert update.endswith("update")
    assert words.endswith("install -y --no-install-recommends one two")
    assert debian.made("policy-then")
    assert not tools.exists()
    debian.asked.write_text("")
    assert install_tools(["one", "two"]) == []
    assert debian.asked.read_text() == ""


def test_a_tool_without_a_package_keeps_no_other_away(debian: Debian, tools: Path) -> None:
    debian.program("apt-get", 'case "$*" in *two*) exit 100 ;; *install*one) echo >tool-one; chmod +x tool-one ;; esac')
    assert install_tools(["one", "two"]) == ["two is not here and could not be installed (two): no two is tried"]
    assert not tools.exists()
