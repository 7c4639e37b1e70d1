"""memserver.segments with an engine of air: creates, drops and stragglers of one id in every order, also at once.

Ids are never used twice, so a segment is made at most once and, dropped, never comes back. `SMB_LONG=1` runs twenty
times as many examples.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memserver.engine import FoundSegment, SegmentForm
from memserver.segments import Segments
from smb import errors
from tests.fault.long import LIMIT_S, times

pytestmark = pytest.mark.timeout(LIMIT_S)

DEADLINE_S = 10.0
PAGE = 4096
IDS = st.integers(1, 4)
SESSIONS = st.lists(st.integers(1, 5), max_size=4)


@dataclass
class AirEngine:
    """Holds no memory, but insists: of one segment one operation at a time, none made twice, none dropped unmade."""

    capacity: int = 3
    forms: dict[int, SegmentForm] = field(default_factory=dict)  # what would lie in files
    gates: dict[int, threading.Event] = field(default_factory=dict)  # the next operation on that id waits at it
    inside: dict[int, threading.Event] = field(default_factory=dict)  # and says here that it does
    made: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _active: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def create_segment(
        self, path: Path, form: SegmentForm, *, bundle_id: int | None, content: bytes | None = None
    ) -> None:
        self._enter(form.id)
        try:
            with self._lock:
                if form.id in self.made:
                    self.faults.append(f"{form.id} is made twice")
                if len(self.forms) >= self.capacity:
                    raise errors.OutOfMemoryError("full")
                self.made.add(form.id)
                self.forms[form.id] = form
        finally:
            self._active.discard(form.id)

    def delete_segment(self, segment_id: int) -> None:
        self._enter(segment_id)
        with self._lock:
            if self.forms.pop(segment_id, None) is None:
                self.faults.append(f"{segment_id} is dropped, and not there")
        self._active.discard(segment_id)

    def holds(self, segment_id: int) -> FoundSegment | None:
        form = self.forms.get(segment_id)
        return None if form is None else FoundSegment(form.id, PAGE, form.epoch, True, 0)

    def end_session(self, session_id: int) -> None:
        self.ended.append(session_id)

    def used_bytes(self) -> int:
        return PAGE * len(self.forms)

    def _enter(self, segment_id: int) -> None:
        with self._lock:
            if segment_id in self._active:
                self.faults.append(f"two operations on {segment_id} at once")
            self._active.add(segment_id)
            gate, inside = self.gates.pop(segment_id, None), self.inside.get(segment_id)
        if gate is not None and inside is not None:
            inside.set()
            gate.wait(DEADLINE_S)


PLACE = SimpleNamespace(
    directory=Path("/nowhere"), quarantined=set, segment_path=lambda segment_id: Path(f"/nowhere/{segment_id}")
)


class SegmentsMachine(RuleBasedStateMachine):
    """The books, the engine, and what has been asked and answered."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = AirEngine()
        self.threads = ThreadPoolExecutor(128)  # one for each step: any number of them may wait
        self.asked: dict[int, list[Future[None]]] = {}  # operations that wait for another, by id
        self.gates: dict[int, threading.Event] = {}  # of operations that stand inside the engine
        self.dropped: set[int] = set()  # a drop was answered: for good
        self.created: set[int] = set()  # a creation was answered
        self.told: set[int] = set()
        self.segments = self.open()

    def open(self) -> Segments:
        return Segments(cast(Any, self.engine), cast(Any, PLACE), self.engine.capacity * PAGE)

    def teardown(self) -> None:
        for segment_id in list(self.gates):
            self.release(segment_id)
        self.threads.shutdown()

    def create_one(self, segment_id: int, chunk_bytes: int) -> None:
        dropped = segment_id in self.dropped
        try:
            self.segments.create(SegmentForm(segment_id, 1, 2, PAGE, chunk_bytes))
        except (errors.NotFoundError, errors.OutOfMemoryError):
            return
        except errors.AlreadyExistsError:
            assert self.engine.forms[segment_id].chunk_bytes != chunk_bytes, "a repetition is no error"
            return
        assert not dropped, "a straggler made what was dropped before it came"
        self.created.add(segment_id)

    def drop_one(self, segment_id: int) -> None:
        self.segments.drop(segment_id)
        self.dropped.add(segment_id)

    def run(self, segment_id: int, hold: bool, operation: Any, *arguments: Any) -> None:
        """Run it to its end; or until it stands in the engine; or, behind one that does, let it wait."""
        behind = segment_id in self.gates
        inside = threading.Event()
        if hold and not behind:
            self.engine.gates[segment_id] = gate = threading.Event()
            self.engine.inside[segment_id] = inside
        done = self.threads.submit(operation, segment_id, *arguments)
        if behind:
            self.asked[segment_id].append(done)
            return
        if not hold:
            done.result(DEADLINE_S)
            return
        done.add_done_callback(lambda _: inside.set())
        assert inside.wait(DEADLINE_S)
        if done.done():  # it had no business in the engine
            self.engine.gates.pop(segment_id, None)
            done.result()
        else:
            self.gates[segment_id] = gate
            self.asked[segment_id] = [done]

    @rule(segment_id=IDS, hold=st.booleans(), chunk_bytes=st.sampled_from([PAGE, PAGE, 2 * PAGE]))
    def create(self, segment_id: int, hold: bool, chunk_bytes: int) -> None:
        self.run(segment_id, hold, self.create_one, chunk_bytes)

    @rule(segment_id=IDS, hold=st.booleans())
    def drop(self, segment_id: int, hold: bool) -> None:
        self.run(segment_id, hold, self.drop_one)

    @precondition(lambda self: self.gates)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.gates))))

    def release(self, segment_id: int) -> None:
        """The engine goes on; all that waited for it ends."""
        self.gates.pop(segment_id).set()
        for done in self.asked.pop(segment_id):
            done.result(DEADLINE_S)

    @precondition(lambda self: not self.gates)
    @rule()
    def restart(self) -> None:
        """Another run: it finds the files, and knows neither what was dropped nor which sessions ended."""
        self.engine = replace(self.engine, ended=[])
        self.segments = self.open()
        for form in self.engine.forms.values():
            self.segments.adopt(form)
        self.told.clear()
        # A straggler of before may make again what was dropped; the coordinator has it dropped once more.
        self.dropped.clear()
        self.engine.made &= self.engine.forms.keys()
        self.created &= self.engine.forms.keys()

    @rule(session_ids=SESSIONS)
    def end_sessions(self, session_ids: list[int]) -> None:
        self.segments.sessions.end(session_ids)
        self.told |= set(session_ids)

    @invariant()
    def the_engine_has_nothing_to_complain_of(self) -> None:
        assert not self.engine.faults

    @invariant()
    def books_and_engine_agree_when_nothing_is_under_way(self) -> None:
        held = set(self.segments.ids())
        settled = held - self.gates.keys()
        assert settled == self.engine.forms.keys() - self.gates.keys()
        assert settled.isdisjoint(self.dropped)
        assert self.created - self.dropped - self.gates.keys() <= settled
        assert self.segments.used_bytes() == PAGE * len(self.engine.forms)

    @invariant()
    def a_session_ends_once(self) -> None:
        assert sorted(self.engine.ended) == sorted(self.told)


SegmentsMachine.TestCase.settings = settings(
    max_examples=times(50, 1000),
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
)
TestSegments = SegmentsMachine.TestCase
