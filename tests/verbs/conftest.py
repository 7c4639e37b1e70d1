"""Where these tests run, and what is said where they can't: they need pyverbs and an RDMA device, real or soft.

`make verbs` (run.py) sees to both, in a virtual machine if need be, and sets SMB_TEST_VERBS=required: then nothing is
left out. Elsewhere, in `make test`, each is reported as not run, with what is missing.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smb.transport.verbs.devices import Devices, Port, look
from tests.support.transports import FAR
from tests.verbs.contract import OF_THE_KERNEL

HERE = Path(__file__).parent


@functools.cache
def found() -> Devices:
    """What this machine has."""
    return look()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "verbs(feature, ...): what of verbs a test exercises, for the summary")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if not mine or not found().missing:
        return
    why = "; ".join(found().missing)
    if os.environ.get("SMB_TEST_VERBS") == "required":
        raise pytest.UsageError(f"no verbs here: {why}")
    for item in mine:
        item.add_marker(pytest.mark.skip(reason=f"no verbs here, 'make verbs' runs it: {why}"))


@pytest.fixture(autouse=True)
def _features(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Note what the test exercises, for the summary."""
    for mark in request.node.iter_markers("verbs"):
        for feature in mark.args:
            record_property("verbs", feature)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which features of verbs the tests that passed exercised, and how many other tests went over verbs."""
    passed = terminalreporter.stats.get("passed", [])
    features = Counter(value for report in passed for name, value in report.user_properties if name == "verbs")
    for feature, count in sorted(features.items()):
        terminalreporter.write_line(f"verbs: {feature} ({count} test{'s' * (count != 1)})")
    if FAR == "verbs":
        not_over_verbs = ("tests/verbs/", *(f"tests/{name}" for name in OF_THE_KERNEL))
        others = sum(not report.nodeid.startswith(not_over_verbs) for report in passed)
        terminalreporter.write_line(f"verbs: {others} of the tests of every transport passed over verbs")


@pytest.fixture(scope="session")
def ports() -> tuple[Port, Port]:
    """Two ports that reach each other; the same one twice where there is just one, which reaches itself."""
    usable = found().ports
    return usable[0], usable[-1]


class Cable:
    """The virtual machine's cable between its two devices. What is sent over a cable that is down is lost."""

    ends = ("cable0", "cable1")

    def down(self) -> None:
        """Unplug it: the ports of both devices go down too."""
        _ip("link", "set", self.ends[1], "down")

    def up(self) -> None:
        """Plug it in; the peers' addresses, which were forgotten, are told again."""
        for end, neighbour, last in ((0, 1, 2), (1, 0, 1)):
            _ip("link", "set", self.ends[end], "up")
            hardware = f"02:00:00:77:00:0{neighbour + 1}"
            _ip("neigh", "replace", f"10.77.0.{last}", "lladdr", hardware, "dev", self.ends[end], "nud", "permanent")

    def lose(self, percent: float) -> None:
        """Let both ends lose so much of what they send."""
        for end in self.ends:
            run(["tc", "qdisc", "replace", "dev", end, "root", "netem", "limit", "100000", "loss", f"{percent}%"])

    def mend(self) -> None:
        """Make it as it was."""
        for end in self.ends:
            subprocess.run(["tc", "qdisc", "delete", "dev", end, "root"], check=False, stderr=subprocess.DEVNULL)
        self.up()


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def _ip(*arguments: str) -> None:
    run(["ip", *arguments])


@pytest.fixture
def cable() -> Iterator[Cable]:
    """The cable, for tests that break it; whole again afterwards."""
    if "VERBS_VM" not in os.environ:
        pytest.skip("breaks the network below the devices: only in the virtual machine (make verbs VM=1)")
    cable = Cable()
    yield cable
    cable.mend()
