"""The model of docs/scaling.md: its arithmetic, its constants against the sources, its errors beside stored results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest

from perf import model
from perf.model import Link, Row, busiest_bytes, call_seconds, markdown
from perf.scaling.report import Answer, Column
from perf.scaling.runs import run_calls
from smb.coordinator import placement, state
from smb.engine import segment_file_bytes

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("csrc/base/frame.h", "SMB_FRAME_BYTES", model.FRAME_BYTES),
        ("csrc/smb/types.h", "SMB_CHUNK_BYTES_DEFAULT", model.CHUNK_BYTES),
        ("csrc/client/link.h", "WINDOW_FRAMES", model.WINDOW_FRAMES),
        ("csrc/server/listener.h", "CONNECTIONS_MAX", model.CONNECTIONS_MAX),
        ("csrc/memory/records.h", "RECORD_BYTES", model.RECORD_BYTES),
        ("csrc/memory/records.h", "RECORDS_MIN", model.RECORDS_MIN),
        ("csrc/memory/records.h", "RECORDS_MAX", model.RECORDS_MAX),
        ("csrc/memory/journal.h", "JOURNAL_SLOTS_MAX", model.CONNECTIONS_MAX),
    ],
)
def test_constants_are_the_sources(file: str, name: str, value: int) -> None:
    """A limit that changes in the code must change in the model, and in docs/scaling.md."""
    found = re.search(rf"(?<!\w){name} = (\d+)", (ROOT / file).read_text())
    assert found
    assert int(found[1]) == value


def test_leases_and_slots_are_the_sources() -> None:
    """Those of Python are compared as they are; a journal slot begins with two pages."""
    assert (model.SERVER_LEASE_S, model.SESSION_LEASE_S) == (state.SERVER_LEASE_S, state.SESSION_LEASE_S)
    assert model.SESSION_RENEWALS_PER_S == state.SESSION_RENEWALS_PER_S
    assert placement.STRIPE_BYTES_DEFAULT == model.CHUNK_BYTES
    journal = (ROOT / "csrc/memory/journal.c").read_text()
    assert "PAYLOAD_AT = 2 * PAGE" in journal
    assert model.SLOT_HEADER_BYTES == 2 * 4096


def test_records_follow_the_engine() -> None:
    """From the smallest table to the largest, a segment's file grows by the records that the model counts."""
    for nbytes in (MIB // 4, MIB, 4 * MIB, 8 * MIB, 64 * MIB):
        chunks = nbytes // model.CHUNK_BYTES
        pages = 4096 + -(-64 * chunks // 4096) * 4096
        assert segment_file_bytes(nbytes, model.CHUNK_BYTES) == nbytes + pages + 128 * model.records_of(nbytes)


def test_one_connection_is_bounded_by_link_window_or_loss() -> None:
    """Each bound by hand: 16 MiB a round trip; 1.22 segments of 1448 bytes over the root of the loss."""
    assert Link(300e6).connection_per_s() == pytest.approx(37.5e6 * 1448 / 1514, rel=1e-3)
    assert Link(400e9, 0.2).connection_per_s() == 16 * MIB / 0.2
    assert Link(400e9, 0.2, 1e-4).connection_per_s() == pytest.approx(1.2247 * 1448 / 0.2 * 100, rel=1e-3)
    assert Link(1e6, 0.001).connection_per_s() == Link(1e6).payload_per_s


def test_a_call_is_as_slow_as_its_slowest_part_or_its_thread() -> None:
    """8 MiB over two links, one of them half as fast; then a thread that is slower than both."""
    fast, slow = Link(2e9, 0.01), Link(1e9, 0.01)
    parts = [(4.0 * MIB, fast), (4.0 * MIB, slow)]
    assert call_seconds(parts) == pytest.approx(0.01 + 4 * MIB / slow.payload_per_s)
    assert call_seconds(parts, cpu_s_per_byte=1e-6) == pytest.approx(8.388608)


def test_the_busiest_segment() -> None:
    """Stripes go round: 5 over 4 segments are 2 for one of them; a range within one stripe is all its own."""
    assert busiest_bytes(5 * MIB, MIB, 4) == 2 * MIB
    assert busiest_bytes(MIB // 2, MIB, 4) == MIB // 2


def test_renewals() -> None:
    """1 000 servers every 2 s, 1 000 clients every 10 s, 10 000 every 33 s."""
    assert model.coordinator_calls_per_s(1000, 1000) == 600
    assert model.coordinator_calls_per_s(1000, 10_000) == 800


def test_predictions_are_as_close_as_the_page_says() -> None:
    """docs/scaling.md states these errors for the stored results."""
    assert max(abs(row.error) for row in model.check_servers()) <= 0.05
    assert max(abs(row.error) for row in model.check_stripes()) <= 0.16
    assert max(abs(row.error) for row in model.check_unequal()) <= 0.01
    assert max(abs(row.error) for row in model.check_costs()) <= 0.01
    assert max(abs(row.error) for row in model.check_clients() if row.unit == "GB/s") <= 0.35


def test_the_table_shows_the_largest_error_with_its_sign() -> None:
    """90 where 100 was measured is -10 %."""
    text = markdown([Row("servers", "a", "MB/s", 90, 100), Row("servers", "b", "MB/s", 101, 100)])
    assert "| scaling-servers | MB/s | 2 | 5.5 % | -10.0 % |" in text
    assert "| servers | a | 90 | 100 | MB/s | -10.0 % |" in text


def test_an_answer_as_a_table() -> None:
    """Values as their columns show them; a row without one has an empty cell."""
    columns = (Column("servers", "servers"), Column("share", "share of it", "{:.2f}"))
    answer = Answer("x", "X", "setup", columns, [{"servers": 1, "share": 0.987}, {"servers": 8}], "limit")
    table = answer.table().splitlines()
    assert table == ["| servers | share of it |", "| --- | --- |", "| 1 | 0.99 |", "| 8 |  |"]
    assert answer.markdown("command").startswith("# X\n\nsetup\n\n| servers")


class _Fleet:
    """Servers that use 2 s of CPU between two looks."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def servers_cpu_seconds(self) -> float:
        self._seconds += 2.0
        return self._seconds


class _Worker:
    """A client process that says what it is told to."""

    def __init__(self, calls: list[list[float]], wrong: int = 0) -> None:
        self._run: dict[str, Any] = {"calls": [calls], "cpu": 1.0, "wrong": 0, "first": 7.0}
        self._wrong = wrong
        self._told = ""

    def tell(self, **request: Any) -> None:
        self._told = request["do"]

    def answer(self) -> dict[str, Any]:
        answers: dict[str, dict[str, Any]] = {"run": self._run, "check": {"wrong": self._wrong}}
        return answers.get(self._told, {})

    def ask(self, **request: Any) -> dict[str, Any]:
        self.tell(**request)
        return self.answer()


def test_what_clients_reach_together() -> None:
    """Two clients of 4 and 2 calls of 1 GB in the same 4 s: 1.5 GB/s, half as many calls, CPU for each of 6 GB."""
    workers = [_Worker([[0, 1], [1, 2], [2, 3], [3, 4]]), _Worker([[0, 2], [2, 4]])]
    run = run_calls(cast(Any, _Fleet()), cast(Any, workers), "write", 10**9, 1.0)
    assert run.bandwidth == pytest.approx(1.5e9)
    assert (run.calls, run.fairness) == (6, 0.5)
    assert run.client_cpu == pytest.approx(2 / 6)
    assert run.server_cpu == pytest.approx(2 / 6)


def test_wrong_bytes_are_no_result() -> None:
    """A call that left an element as it was is an error, however fast it was."""
    with pytest.raises(RuntimeError, match="3 elements are wrong after 1 calls of accumulate"):
        run_calls(cast(Any, _Fleet()), cast(Any, [_Worker([[0, 1]], wrong=3)]), "accumulate", 8, 1.0)
