"""Random orders of everything that moves copies: nobody becomes the primary who has not all, what moves together is on
the same servers at every moment, and drains end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from smb.coordinator.bundles import bundle_of
from smb.coordinator.events import (
    AnswerDrops,
    BufferDeleted,
    BufferMade,
    CopiesEnded,
    CopyBegun,
    CopyDropped,
    Event,
    MoveAllowed,
    RolesSwitched,
    ServerDied,
    ServerDrained,
    Ticked,
)
from smb.coordinator.moves.rebalance import plan
from smb.coordinator.moves.wanted_copies import still_wanted, wishes
from smb.coordinator.records import BufferRecord, SegmentRecord
from smb.errors import Error
from tests.support.decisions import MIB, Cluster, registration, returned, server

NAMES = "abcd"
CAPACITY = 128 * MIB  # of each: two of them take all that there is
STATES_MAX = 4


@dataclass
class Machine:
    """A cluster, and what its servers have in memory."""

    cluster: Cluster = field(default_factory=Cluster)
    runs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 1))
    held: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NAMES})

    def begin(self) -> None:
        """Make some buffers."""
        self.cluster.register(*NAMES, capacity_bytes=CAPACITY)
        for number, name in enumerate(NAMES):
            for replicas in (1, 2):
                made = self.cluster.create(f"w{number}-{replicas}", 2 * MIB, replicas=replicas, server_names=(name,))
                for copy in made.copies:
                    self.held[copy.server].add(copy.id)

    @property
    def segments(self) -> dict[int, SegmentRecord]:
        """All of them, by id."""
        return {each.id: each for record in self.cluster.state.buffers.values() for each in record.segments}

    def do(self, event: Event) -> None:
        """Step, and check what became of each segment."""
        before = self.segments
        self.cluster.do(event)
        groups: dict[int, set[tuple[str, str, int, str]]] = {}
        for number, now in self.segments.items():
            groups.setdefault(bundle_of(now), set()).add((now.server, now.backup, now.epoch, now.copying_to))
            was = before.get(number)
            if was is None or now == replace(was, group=now.group):
                continue
            assert now.epoch == was.epoch + 1 + (was.epoch == 0)  # that of a buffer is 1
            assert now.server in (was.server, was.backup)
            if isinstance(event, RolesSwitched):
                assert (now.server, now.backup, now.copying_to) == (was.backup, was.server, "")
            elif now.backup:
                assert now.backup in (was.backup, was.copying_to)
            assert not (now.backup and now.copying_to)
            assert len({now.server, now.backup, now.copying_to} - {""}) == 1 + bool(now.backup) + bool(now.copying_to)
        assert all(len(roles) == 1 for roles in groups.values())
        taken = dict.fromkeys(NAMES, 0)
        for record in self.cluster.state.buffers.values():
            for copy in record.copies:
                taken[copy.server] += copy.file_bytes
        assert all(self.cluster.state.allocation(name).nbytes == nbytes for name, nbytes in taken.items())

    def look(self, *, moves: bool) -> None:
        """Begin what is wanted, as copy_maker.py does."""
        records, pool = list(self.cluster.state.buffers.values()), self.cluster.state.pool(self.cluster.now)
        capacity = {name: self.cluster.state.servers[name].capacity_bytes for name in pool.free_bytes}
        wanted = {move.segment_id: move for move in plan(records, pool, capacity)} if moves else {}
        for wish in wishes(records, pool, moves=still_wanted(wanted, records, pool)):
            number, epoch = wish.segment.id, wish.segment.epoch + 1
            members = {member.id for _, member in wish.members}
            if wish.leaving and not members <= self.held[wish.source]:
                continue  # it does not confirm
            if wish.switches:
                if members <= self.held[wish.leaving]:
                    self.do(RolesSwitched(wish.record.key, number, epoch))
                continue
            if not wish.target:
                self.do(CopyDropped(wish.record.key, number, wish.leaving, epoch))
                self.held[wish.leaving].discard(number)
                continue
            if not wish.segment.epoch:
                self.do(MoveAllowed(wish.record.key, number))
                continue
            self.held[wish.target] |= members
            begun = CopyBegun(
                wish.record.key,
                wish.segment.id,
                wish.target,
                self.runs[wish.target],
                wish.segment.epoch + 1,
                wish.leaving,
                frozenset(members),
            )
            self.do(begun)
            self.held[wish.leaving or wish.target] -= members if wish.leaving else set()

    def end(self, name: str, *, whole: bool) -> None:
        """A primary says how its copies went."""
        ours = {each.id: each.epoch for each in self.segments.values() if each.server == name and each.copying_to}
        self.do(CopiesEnded(name, ours, whole))

    def lose(self, name: str) -> None:
        """A server dies with its memory, if all that it has is elsewhere too; it is back at once, as another run."""
        if any(name == each.server and not each.backup for each in self.segments.values()):
            return
        self.do(ServerDied(name, self.runs[name]))
        self.do(Ticked())
        self.runs[name] += 1
        self.held[name] = set()
        self.do(returned(self.cluster.state, name, self.runs[name], frozenset()))
        self.do(registration(self.cluster.state, server(name, self.runs[name], CAPACITY), frozenset()))

    def forget(self, name: str) -> None:
        """A server that was away is back without one of the segments that move together, if there are other copies."""
        ours = [each for each in self.segments.values() if name in (each.server, each.backup) and each.backup]
        lost = max((each.id for each in ours if each.group and each.id in self.held[name]), default=0)
        if lost:
            self.held[name].discard(lost)
            self.do(returned(self.cluster.state, name, self.runs[name], frozenset(self.held[name])))
            self.do(
                registration(self.cluster.state, server(name, self.runs[name], CAPACITY), frozenset(self.held[name]))
            )
            self.held[name].difference_update(self.cluster.only(AnswerDrops).segment_ids)
            self.cluster.renew(name, self.runs[name])  # it has got the answer

    def want(self, name: str) -> None:
        """A state is to be made for weights that begin there, unless these are just being copied."""
        number, weights = NAMES.index(name), f"w{NAMES.index(name)}-2"
        before = self.segments
        if len(before) - 2 * len(NAMES) >= STATES_MAX:
            return
        key = f"m{number}-{max(before)}"
        try:
            self.cluster.want(key, 2 * MIB, like=weights, joins=True, replicas=0)
        except Error:
            return
        assert self.segments.keys() > before.keys()

    def make(self) -> None:
        """All that is being made is there."""
        for record in [record for record in self.cluster.state.buffers.values() if not record.ready]:
            for copy in record.copies:
                self.held[copy.server].add(copy.id)
            self.do(BufferMade(record.key, record.segments))

    def delete(self, name: str) -> None:
        """One of those that move together goes, the first one or another one."""
        index = NAMES.index(name)
        found = [record for record in self.cluster.state.listed() if record.segments[0].group]
        for record in found[index : index + 1]:
            self.do(BufferDeleted(record.name, missing_ok=False))

    def drain(self, name: str, *, undo: bool) -> None:
        """Ask for it, which may be refused."""
        try:
            self.do(ServerDrained(name, undo))
        except Error:
            assert not undo


ACTIONS = (
    *("look", "look", "rebalance", "whole", "whole", "given up", "lose", "forget", "drain", "undrain"),
    *("want", "want", "make", "make", "delete"),
)
STEPS = st.tuples(
    st.sampled_from(ACTIONS),
    st.sampled_from(NAMES),
)


@given(st.lists(STEPS, max_size=40))
def test_moves_keep_what_is_whole(actions: list[tuple[str, str]]) -> None:
    """Then all settles: every segment has as many copies as it should, none of them on a server that is drained."""
    machine = Machine()
    machine.begin()
    for action, name in actions:
        match action:
            case "look" | "rebalance":
                machine.look(moves=action == "rebalance")
            case "whole" | "given up":
                machine.end(name, whole=action == "whole")
            case "lose":
                machine.lose(name)
            case "forget":
                machine.forget(name)
            case "want":
                machine.want(name)
            case "make":
                machine.make()
            case "delete":
                machine.delete(name)
            case _:
                machine.drain(name, undo=action == "undrain")
    drained = {name for name in NAMES if machine.cluster.state.servers[name].draining}
    if len(drained) > 2:  # two copies need two servers
        machine.drain(min(drained), undo=True)
    machine.make()
    for _ in range(40):
        machine.look(moves=False)
        for name in NAMES:
            machine.end(name, whole=True)
    drained = {name for name in NAMES if machine.cluster.state.servers[name].draining}
    for record in machine.cluster.state.buffers.values():
        for segment in record.segments:
            assert bool(segment.backup) == (record.replicas == 2)
            assert not segment.copying_to
            assert not drained & {segment.server, segment.backup}
        assert BufferRecord.from_json(record.to_json()) == record
