"""The measurements measure what they say: arithmetic, wrong bytes, regressions. No test looks at a time."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from perf import clients, compare, limits, netlab, ours, ranges, remote, run, turns
from perf.contender import (
    ACCUMULATE,
    FETCH_ADD,
    LIMIT,
    OURS,
    PEER,
    READ,
    REMOTE,
    REMOTE_1GBIT,
    REMOTE_RATES,
    SHM,
    TCP,
    WRITE,
    Case,
    Contender,
    Run,
    Sample,
    sample_of,
)
from perf.peers import mpi
from perf.results import ROOT, Results
from perf.tables import markdown

CASE = Case(TCP, WRITE, 1000, clients=2, seconds=1.0)


def _sample(speed: float) -> Sample:
    return Sample(speed, 1e-3, 2e-3, 100, 0.1, None)


def _results(speeds: dict[Case, list[float]], name: str = "smb", kind: str = OURS) -> Results:
    found = Results("command", "commit", {}, 3, kinds={name: kind})
    for case, values in speeds.items():
        found.cell(name, case).samples.extend(map(_sample, values))
    return found


# ---- sample_of


def test_bandwidth_counts_the_calls_in_the_common_window() -> None:
    """Of two clients, one earlier by half a call: calls at the window's edges count by their share."""
    one = Run([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], 0.5, 7)
    other = Run([0.5, 1.5, 2.5, 3.5], [1.5, 2.5, 3.5, 4.5], 1.5, 7)
    sample = sample_of(CASE, [one, other], 4.0)
    assert sample.bytes_per_second == pytest.approx(2 * 1000)
    assert sample.calls == 8
    assert sample.p50_seconds == pytest.approx(1.0)
    assert sample.client_cpu == pytest.approx(2.0 / (8 * 1000 / 1e9))
    assert sample.server_cpu == pytest.approx(4.0 / (8 * 1000 / 1e9))


def test_clients_that_hardly_overlap_are_taken_over_the_whole() -> None:
    """No window of a moment decides, where one client came when the other was nearly done."""
    sample = sample_of(CASE, [Run([0.0], [1.0], 0.0, 1), Run([0.9], [2.0], 0.0, 1)], None)
    assert sample.bytes_per_second == pytest.approx(2 * 1000 / 2.0)
    assert sample.server_cpu is None


# ---- bytes


@pytest.mark.parametrize("operation", [WRITE, READ, ACCUMULATE])
def test_right_bytes_pass_and_one_wrong_element_does_not(operation: str) -> None:
    """One element of 1000, off by one, is found."""
    case = Case(SHM, operation, 4000, clients=2)
    right = clients.added(1000) * np.float32(5) if operation == ACCUMULATE else clients.written(1000, 0)
    if operation == WRITE:
        right[500:] = clients.written(1000, 1)[500:]
    clients.check(case, right, 5)
    right[777] += 1
    with pytest.raises(RuntimeError, match=r"wrong bytes.* 1 of 1000 elements; element 777"):
        clients.check(case, right, 5)


def test_a_write_of_a_client_that_is_none_is_refused() -> None:
    """Values of a third client are wrong bytes where there were two."""
    case = Case(SHM, WRITE, 4000, clients=2)
    with pytest.raises(RuntimeError, match="1000 of 1000 elements"):
        clients.check(case, clients.written(1000, 2), 5)


def test_additions_too_many_to_be_exact_are_refused() -> None:
    """Float32 has no exact sum of so many: it says so and not "wrong"."""
    with pytest.raises(RuntimeError, match="fewer seconds"):
        clients.check(Case(SHM, ACCUMULATE, 8), np.zeros(2, np.float32), 1 << 23)


class Forgetful:
    """A contender that loses one addition, or all of itself."""

    name = "forgetful"
    kind = PEER

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.inside = 0
        self.entered = 0

    def missing(self) -> str | None:
        return None

    def takes(self, case: Case) -> bool:
        return case.operation == ACCUMULATE

    def __enter__(self) -> Forgetful:
        self.inside += 1
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.inside -= 1

    def measure(self, case: Case) -> Sample:
        clients.check(case, clients.added(case.nbytes // 4) * np.float32(9 - self.lost), 9)
        return _sample(1e9)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_contender_with_wrong_bytes_has_no_figure(lost: int) -> None:
    """Its cells are failed, with the reason; it is started anew after each failure, and the run comes to its end."""
    results = _results({})
    contender = Forgetful(lost)
    cases = [Case(SHM, operation, size) for size in (8, 4096) for operation in (WRITE, ACCUMULATE)]
    run.measure(results, [contender], cases, lambda _name, _case: None)
    assert [cell.case for cell in results.cells.values()] == [case for case in cases if case.operation == ACCUMULATE]
    assert contender.inside == 0
    for cell in results.cells.values():
        assert (cell.failed is None) == (lost == 0)
        assert (cell.speed > 0) == (lost == 0)
    assert contender.entered == (3 if lost == 0 else 6)
    results.machine = {"cpu": "", "cores": 1, "memory_bytes": 0, "kernel": "", "governor": "", "load_average_before": 0}
    assert ("wrong bytes" in markdown(results)) == (lost == 1)


class Broken(Forgetful):
    """Its failure names a file, as a traceback does."""

    def measure(self, case: Case) -> Sample:
        raise RuntimeError(f'File "{ROOT}/perf/peers/mpi.py", line 1')


def test_a_kept_reason_names_no_path_of_this_machine() -> None:
    """Files are named from the project's folder on."""
    results = _results({})
    run.measure(results, [Broken(1)], [Case(SHM, ACCUMULATE, 8)], lambda _name, _case: None)
    (cell,) = results.cells.values()
    assert cell.failed is not None
    assert 'File "perf/peers/mpi.py"' in cell.failed
    assert str(ROOT) not in cell.failed


def test_what_is_not_over_tcp_has_no_figure_there() -> None:
    """A library that takes shared memory where TCP was asked for is found out."""
    turns.check_tcp(CASE, _sample(1e9), 100 * 1000)
    with pytest.raises(RuntimeError, match="not over TCP"):
        turns.check_tcp(CASE, _sample(1e9), 100 * 1000 - 1)


class Arriving:
    """Leaves a file for the process that it arrives in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return _arrive, (self._folder,)


def _arrive(folder: Path) -> Arriving:
    (folder / str(os.getpid())).touch()
    return Arriving(folder)


def _no_worker(_: Arriving) -> clients.Worker:
    raise AssertionError("no case was asked for")


def test_nothing_is_measured_while_a_client_process_still_imports(tmp_path: Path) -> None:
    """Also those that the first case does not use: eight of them kept both cores busy for its whole time."""
    started = clients.Clients.start(3, _no_worker, Arriving(tmp_path))
    try:
        assert {path.name for path in tmp_path.iterdir()} == {str(process.pid) for process in started.processes}
    finally:
        started.close()


# ---- two hosts


def test_each_case_between_two_hosts_has_its_limits_and_they_are_tcp() -> None:
    """Bare TCP sockets on one connection and on two, sleeping and polling; neither memory nor Unix sockets."""
    case = Case(REMOTE, WRITE, 4 << 20)
    names = [limit.name for limit in limits.CONTENDERS if limit.takes(case)]
    assert all(name.startswith("bare TCP socket") for name in names)
    for words in (("blocking",), ("polling",), ("blocking", "2 connections")):
        assert any(all(word in name for word in words) for name in names)
    assert all(limit.kind == LIMIT for limit in limits.CONTENDERS if limit.takes(case))
    assert [ours.Ours().takes(replace(case, transport=transport)) for transport in REMOTE_RATES] == [True] * 3


def test_where_there_can_be_no_two_hosts_their_cells_are_left_out_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is measured, and the table names the reason."""
    monkeypatch.setattr(netlab, "missing", lambda: "no root here")
    words = ["--sizes", "8", "--operations", "read", "--transports", "remote,shm", "--clients", "1", "--rounds", "1"]
    words += ["--contenders", "memory", "--seconds", "0.01", "--output", str(tmp_path)]
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    assert run.main(words) == 0
    assert {case.transport for case in Results.load(tmp_path / "results.json").cases()} == {SHM}
    assert "not here: remote: no root here" in (tmp_path / "table.md").read_text()
    assert "nothing is measured between two hosts: no root here" in capsys.readouterr().err


def test_a_peer_that_is_on_loopback_only_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI is; MPICH is between two hosts too."""
    monkeypatch.setattr(netlab, "missing", lambda: None)
    missing: dict[str, str] = {}
    cases = [Case(REMOTE, WRITE, 8), Case(TCP, WRITE, 8)]
    assert run._possible(cases, [mpi.OpenMpi(), mpi.Mpich()], missing, Console()) == cases
    assert list(missing) == ["Open MPI 5, remote"]
    assert [mpi.OpenMpi().takes(case) for case in cases] == [False, True]
    assert [mpi.Mpich().takes(case) for case in cases] == [True, True]


def test_without_the_lab_servers_are_on_loopback() -> None:
    """So a contender is written once. What the loopback device carries is counted."""
    assert not remote.inside()
    with remote.on_server() as address:
        assert address == remote.server_address() == "127.0.0.1"
        assert remote.device() == "lo"
        before = remote.carried_bytes()
        with socket.create_server((address, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
            taken, _ = listener.accept()
            with taken:
                one.sendall(bytes(5000))
                assert len(taken.recv(5000, socket.MSG_WAITALL)) == 5000
        assert remote.carried_bytes() - before >= 5000


def test_the_measuring_process_answers_case_by_case_and_ends_its_round() -> None:
    """A sample, or why there is none; what was entered is left at the round's end."""
    contender = Forgetful(0)
    entered: dict[str, turns.Turn] = {}
    case = asdict(Case(SHM, ACCUMULATE, 8))
    there: dict[str, Contender] = {"forgetful": contender}
    assert turns._answer({"contender": "forgetful", "case": case}, there, entered) == {"sample": _sample(1e9).to_json()}
    assert "can't be used" in turns._answer({"contender": "other", "case": case}, there, entered)["failed"]
    contender.lost = 1
    assert "wrong bytes" in turns._answer({"contender": "forgetful", "case": case}, there, entered)["failed"]
    contender.lost = 0
    turns._answer({"contender": "forgetful", "case": case}, there, entered)
    assert contender.inside == 1
    assert turns._answer({}, there, entered) == {}
    assert contender.inside == 0


def test_the_table_has_two_hosts_before_loopback() -> None:
    """And says what the two are."""
    results = _results({replace(CASE, transport=transport): [1.0] for transport in (TCP, REMOTE_1GBIT, REMOTE, SHM)})
    results.kinds["limit"] = LIMIT
    for case in results.cases():
        results.cell("limit", case).samples.append(_sample(2.0))
    results.machine = {"cpu": "", "cores": 1, "memory_bytes": 0, "kernel": "", "governor": "", "load_average_before": 0}
    first = markdown(results).partition("## Ours / limit")[2].partition("###")[0]
    rows = [line.split("|")[1].strip() for line in first.splitlines() if line.startswith("| ")]
    assert rows == ["transport", "---", SHM, REMOTE, REMOTE_1GBIT, TCP]
    assert "which no two hosts have" in markdown(results)


# ---- ratios and regressions


def test_the_limit_is_the_best_variant_of_those_seen_in_every_round() -> None:
    """A variant that had one lucky round is no limit; a failed one neither."""
    results = _results({CASE: [1.0, 1.0, 1.0]})
    results.kinds |= {"steady": LIMIT, "lucky": LIMIT, "failed": LIMIT}
    results.cell("steady", CASE).samples.extend(map(_sample, [2.0, 2.0, 2.0]))
    results.cell("lucky", CASE).samples.append(_sample(9.0))
    results.cell("failed", CASE).samples.extend(map(_sample, [9.0, 9.0]))
    results.cell("failed", CASE).failed = "wrong bytes"
    limit = results.best(CASE)
    assert limit is not None
    assert limit.contender == "steady"
    assert results.ratio(CASE, limit) == pytest.approx(0.5)
    results.kinds["2 connections"] = LIMIT
    results.cell("2 connections", CASE).samples.extend(map(_sample, [4.0, 4.0, 4.0]))
    assert results.best(CASE) == results.cell("2 connections", CASE)
    assert results.best(CASE, without="connections") == limit


def test_a_regression_is_flagged_and_noise_is_not() -> None:
    """A third slower with rounds that agree; as much slower with rounds that do not; a little slower."""
    steady, noisy, little = (replace(CASE, nbytes=size) for size in (8, 16, 24))
    before = _results({steady: [99, 100, 101], noisy: [70, 100, 140], little: [100, 100, 100]})
    after = _results({steady: [66, 67, 68], noisy: [40, 67, 90], little: [97, 97, 97]})
    found, troubles = compare.changes(before, after)
    assert troubles == []
    assert {change.case: change.verdict for change in found} == {steady: "slower", noisy: "", little: ""}
    text, status = compare.report(found, troubles)
    assert status == 1
    assert "1 slower" in text
    found, troubles = compare.changes(after, before)
    assert [change.verdict for change in found] == ["faster", "", ""]
    assert compare.report(found, troubles)[1] == 0


def test_a_cell_that_fails_since_then_is_a_regression() -> None:
    """It can't be missed by being left out."""
    before, after = _results({CASE: [1, 1, 1]}), _results({CASE: [1, 1, 1]})
    after.cell("smb", CASE).failed = "wrong bytes"
    assert compare.report(*compare.changes(before, after))[1] == 1


def test_parts_of_one_measurement_add_up_and_of_two_do_not() -> None:
    """A cell measured again replaces the former; another commit's is refused."""
    other = replace(CASE, nbytes=2000)
    whole, part = _results({CASE: [1.0], other: [1.0]}), _results({other: [5.0]})
    whole.add(part)
    assert {case: cell.speed for (_, case), cell in whole.cells.items()} == {CASE: 1.0, other: 5.0}
    part.commit = "another"
    with pytest.raises(ValueError, match="same commit"):
        whole.add(part)


def _beside_limit(ratio: float, cases: list[Case]) -> Results:
    results = _results({case: [ratio] for case in cases})
    results.kinds["limit"] = LIMIT
    results.rounds = 1
    results.machine = {"cpu": "one"}
    for case in cases:
        results.cell("limit", case).samples.append(_sample(1.0))
    return results


def test_a_range_is_what_all_runs_lie_within(tmp_path: Path) -> None:
    """Lowest and highest of the runs' ratios; a look finds its cells by what they are, not by their seconds."""
    rare = replace(CASE, nbytes=2000)
    runs = [_beside_limit(0.9, [CASE]), _beside_limit(0.8, [CASE, rare]), _beside_limit(1.1, [CASE, rare])]
    paths = []
    for number, each in enumerate(runs):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(each.to_json()))
    published = tmp_path / "ranges.json"
    assert ranges.main([*map(str, paths), "--output", str(published)]) == 0
    found = ranges.load(published)
    assert found == {ranges.key_of(CASE): ranges.Range(0.8, 1.1, 3)}
    look = replace(CASE, seconds=0.05)
    for ratio, place in ((0.8, "inside"), (1.1, "inside"), (0.79, "below"), (1.11, "above")):
        assert f"1 {place}" in ranges.report(_beside_limit(ratio, [look]), found)
    assert "1 not published" in ranges.report(_beside_limit(1.0, [replace(look, clients=1)]), found)
    assert "No range is published yet" in ranges.report(runs[0], ranges.load(tmp_path / "none.json"))


def test_a_range_of_few_runs_or_of_two_commits_is_none() -> None:
    """It would promise what was not seen."""
    runs = [_beside_limit(1.0, [CASE]) for _ in range(3)]
    with pytest.raises(ValueError, match="at least 3 runs"):
        ranges.merge(runs[:2])
    runs[1].commit = "another"
    with pytest.raises(ValueError, match="same commit"):
        ranges.merge(runs)


# ---- the whole


def test_a_run_measures_us_beside_the_limit_and_compares_with_itself(tmp_path: Path) -> None:
    """Real daemons and the C program; the files it leaves can be read back."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    status = run.main(
        [
            *("--sizes", "8,256KiB", "--operations", "accumulate,fetch_add", "--transports", "shm,tcp"),
            *("--clients", "2", "--contenders", "ours,limit", "--rounds", "1", "--seconds", "0.01"),
            *("--output", str(tmp_path)),
        ]
    )
    found = Results.load(tmp_path / "results.json")
    assert [cell.failed for cell in found.cells.values() if cell.failed] == []
    assert status == 0
    assert {(case.transport, case.operation, case.nbytes) for case in found.cases()} == {
        (transport, *cell)
        for transport in (SHM, TCP)
        for cell in ((ACCUMULATE, 8), (ACCUMULATE, 256 << 10), (FETCH_ADD, 8))
    }
    assert all(found.ratio(case, found.best(case)) for case in found.cases())
    assert found.to_json() == json.loads((tmp_path / "results.json").read_text())
    assert "## All cells" in (tmp_path / "table.md").read_text()
    run.publish(found, tmp_path, tmp_path / "published")
    assert {path.name for path in (tmp_path / "published").iterdir()} >= {"table.md", "ratios.json"}
    table = (tmp_path / "published" / "table.md").read_text()
    assert "## Ours / limit" in table
    assert "## All cells" not in table
    ratios = json.loads((tmp_path / "published" / "ratios.json").read_text())
    assert ratios["ratios"] == found.to_json()["ratios"]
    assert "cells" not in ratios


def test_a_whole_run_publishes_and_a_look_does_not() -> None:
    """Samples stay in the folder that git ignores."""
    assert run.parse([]).publish
    assert run.parse([]).output == run.RAW
    assert not run.parse(["--quick"]).publish
    assert not run.parse(["--output", "elsewhere"]).publish


def test_the_limits_refuse_what_makes_no_sense() -> None:
    """More connections than pieces of the array."""
    with limits.Limit("none", TCP, TCP, connections=2) as limit, pytest.raises(RuntimeError, match="too few for 2"):
        limit.measure(Case(TCP, WRITE, 8, seconds=0.01))
