"""Fixtures that tests share: a cluster that stays up, and clients of it that are closed afterwards."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import smb
import smb.cluster
from smb.config.parse import OWNER_VARIABLE
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import VARIABLES as CREDENTIALS_VARIABLES
from smb.security.credentials import find as find_credentials
from tests.support import forks, stem
from tests.support.daemons import keep_port
from tests.support.transports import EACH_WAY, SLOWNESS

smb.cluster._START_S *= SLOWNESS
smb.cluster._launch = stem.launch  # type: ignore[assignment]

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# Processes that tests start end with the tests, also if these are killed.
os.environ[OWNER_VARIABLE] = str(os.getpid())

# PyTorch's threads sleep while there is nothing to do. By default they wait in loops, which other tests' processes pay.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

Connect = Callable[..., smb.Client]

# The files that take longest, or wait longest, begin in the first half: one that began last would keep a single process
# busy at the end, or leave the processors idle.
LONG_FILES = (
    "api/test_examples.py",
    "ops/test_cli.py",
    "train/test_demo.py",
    "train/test_frameworks.py",
    "train/test_overlap.py",
    "train/test_streaming.py",
    "train/test_saved.py",
    "regressions/test_idle_names.py",
    "train/test_shard_publishing.py",
    "train/test_meshes.py",
    "train/test_publish.py",
    "fault/test_coordinator_kills.py",
    "fault/test_train_kills.py",
    "api/test_relays.py",
    "regressions/test_training_without_coordinator.py",
    "regressions/test_trainings_made_anew.py",
    "regressions/test_readers_of_what_was_made_anew.py",
    "fault/test_train_hosts.py",
    "train/test_vllm.py",
    "api/test_session_ends.py",
    "regressions/test_roles_not_heard_of_yet.py",
)

# By its address, the coordinator of this worker's cluster, once there is one. A client that looks at what a test left
# would be a session more for each test.
_shared: dict[str, Coordinator] = {}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_the_callers(monkeypatch)


def _without_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own cluster and transport have no say in tests."""
    for variable in ("SMB_COORDINATOR", "SMB_TRANSPORT", "SMB_CONFIG", *CREDENTIALS_VARIABLES):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session", autouse=True)
def _programs_of_all_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one of pytest's processes has started as a program the others start as forks. PyTorch's forks are those of
    one server for all.
    """
    if hasattr(request.config, "workerinput"):
        stem.share(tmp_path_factory.getbasetemp().parent / "programs")
        forks.use(request.config.workerinput["forks"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One of pytest's processes is about to be started."""
    node.workerinput["forks"] = _served()


@functools.cache
def _served() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _without_the_callers(monkeypatch)
        return forks.serve()


@pytest.fixture
def kept_port() -> Iterator[int]:
    """A port of this host on which nothing listens, but what the test starts there."""
    with keep_port() as kept:
        yield kept.getsockname()[1]


@pytest.fixture(scope="session")
def cluster() -> Iterator[smb.LocalCluster]:
    """Three memory servers of 64 MiB, for all files of a worker. A test deletes what it creates, and kills none of
    them.
    """
    with smb.LocalCluster(servers=3, capacity="64MiB") as running, closing(Coordinator(running.address)) as coordinator:
        _shared[running.address] = coordinator
        yield running
        _shared.clear()


def _delete_all(coordinator: Coordinator) -> list[str]:
    """Delete the buffers of a cluster; return their names."""
    left = [buffer.name for buffer in coordinator.list_buffers(10.0 * SLOWNESS)]
    for name in left:
        coordinator.delete_buffer(name, True, 10.0 * SLOWNESS)
    return left


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """What a file leaves in the cluster is seen by the tests of another one, which it is depends on the order."""
    yield
    for coordinator in _shared.values():
        assert not _delete_all(coordinator), "this file leaves buffers in the workers' cluster"


@pytest.fixture
def connect(cluster: smb.LocalCluster) -> Iterator[Connect]:
    """Connect to the cluster as smb.connect does; every client is closed, and every buffer deleted, at the end."""
    clients: list[smb.Client] = []

    def make(transport: str = "auto", **options: float) -> smb.Client:
        if SLOWNESS != 1:
            options.setdefault("timeout", 10.0 * SLOWNESS)
        clients.append(smb.connect(cluster.address, transport=transport, **options))
        return clients[-1]

    yield make
    if cluster.address in _shared:
        _delete_all(_shared[cluster.address])
    else:
        with closing(Coordinator(cluster.address, find_credentials())) as coordinator:
            _delete_all(coordinator)
    for client in clients:
        client.close()


@pytest.fixture(params=EACH_WAY)
def client(request: pytest.FixtureRequest, connect: Connect) -> smb.Client:
    """A client over each transport."""
    return connect(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Read the tests without looking for cycles: what is made then stays, and looking took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is imported by now stays: a gc.collect() of a test need not look through all of it again. PyTorch imports as
    much again when it is used, so Python looks through everything by itself a tenth as often: it took a tenth of the
    time of tests with PyTorch.

    Hypothesis makes its random numbers at the first example, and warns if it finds nobody who refers to them. What is
    frozen is not found, so the first example comes before.
    """
    _first_example()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)


@hypothesis.settings(max_examples=1, derandomize=False, database=None)
@hypothesis.given(hypothesis.strategies.none())
def _first_example(nothing: None) -> None:
    assert nothing is None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadscope a process gets one test after the other, or a whole file if its tests share a fixture: each
    process would make its own.
    """
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByTest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _shares_a_fixture(config.rootpath / file) else nodeid

    return ByTest(config, log)


@functools.cache
def _shares_a_fixture(file: Path) -> bool:
    """Whether a fixture of the file, or of a conftest.py that is not this one, lives as long as the file's tests."""
    places = [file, *(folder / "conftest.py" for folder in file.parents if Path(__file__).parent in folder.parents)]
    return any(place.exists() and 'scope="module"' in place.read_text() for place in places)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of each folder over the whole run, and the long ones over its first half: tests that wait then
    run beside tests that compute. Those of units come in the last fifth, since they never wait: what waits at the end
    would leave the processors idle. The tests of a file keep their order.
    """
    tests = Path(__file__).parent
    long = {tests / name: place / len(LONG_FILES) / 2 for place, name in enumerate(LONG_FILES)}
    folders: dict[Path, dict[Path, int]] = {}
    for item in items:
        files = folders.setdefault(item.path.parent, {})
        files.setdefault(item.path, len(files))

    def place(item: pytest.Item) -> float:
        files = folders[item.path.parent]
        share = files[item.path] / len(files)
        return long.get(item.path, 0.8 + 0.2 * share if tests / "unit" in item.path.parents else 0.9 * share)

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were not run, with what this machine lacks for them."""
    reasons: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    for reason, tests in reasons.items():
        terminalreporter.write_line(f"not run: {reason}")
        for test in tests:
            terminalreporter.write_line(f"    {test}")
