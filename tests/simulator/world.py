"""One simulated cluster, from a plan: it starts, faults happen while clients work, all is mended, and rests.

A plan has everything that a run depends on beside the code: the seed, how many there are of each, and the faults.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.commit_log import Committed
from smb.coordinator.events import BufferMade, CopyBegun, CopyDropped, Event, RolesSwitched, Ticked
from smb.coordinator.state import State
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from tests.simulator import invariants
from tests.simulator.clients import EVENTS, Client
from tests.simulator.coordinators import PORT, CoordinatorProcess
from tests.simulator.engine import LOCK_LEASE_S, Host
from tests.simulator.faults import FAULTS, Step, draw
from tests.simulator.loop import Loop, Process, this_process
from tests.simulator.network import Channel, Network, checksum
from tests.simulator.servers import Server
from tests.simulator.stores import Directory, EtcdServer
from tests.simulator.truth import Part, Truth

WHOLE_S = 60.0  # after which all is whole again, once faults have ended
REST_S = 12.0
START_S = 20.0
FAULTS_S = 40.0  # until the last of them is over
CALM_S = 18.0  # for so long nothing has befallen a host that is well
LOOK_S = 0.5
REACHED_S = 9.0  # in which a server has renewed or registered again: a lease, and a little
LATE_S_MAX = 9.5  # after which servers that were cut off together may be taken for dead: two leases, less two renewals
QUIET_S = 45.0  # of a client's last event: it may ask for a buffer's data for so long
EPISODES_MAX = 4
SWARMS = 0.7  # the part of runs whose clients' events have weights of their own
EVENTS_BY = (0.0, 0.3, 1.0, 1.0, 3.0)
ALWAYS = ("create", "write")  # without these there is nothing to lose
TRACE_MAX = 400
_LOG = logging.getLogger("simulator")


@dataclass(frozen=True)
class Plan:
    """What a run depends on."""

    seed: int
    servers: int
    clients: int
    etcd: bool
    steps: tuple[Step, ...]
    zones: str = ""  # of each server, one letter; empty: they have none
    likelier: tuple[tuple[str, float], ...] = ()  # events of clients, and by how much in this run; the others: by 1

    def zone_of(self, server: str) -> str:
        """Return a memory server's zone."""
        return self.zones[int(server[1:]) % len(self.zones)] if self.zones else ""

    @staticmethod
    def of(seed: int) -> Plan:
        """Draw one. In most runs clients do some things more often and others never: all of them together hide what
        few of them show, e.g. a deletion what a failed copy has left.
        """
        rng, likelier = Random(f"{seed} plan"), dict[str, float]()
        if rng.random() < SWARMS:
            likelier = {act.__name__: rng.choice(EVENTS_BY) for _, act in EVENTS}
            likelier |= {name: max(1.0, likelier[name]) for name in ALWAYS}
        pause_s = rng.choice((2.0, 15.0, 15.0, 30.0))
        at, steps = 2.0, []
        for _ in range(rng.randint(1, EPISODES_MAX)):
            for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):  # around each other: who goes first, and is back first
                at += rng.choice((0.0, rng.uniform(0.0, 0.5), rng.uniform(0.0, 3.0)))
                steps.append(draw(rng, at))
            at += rng.uniform(pause_s / 3, pause_s)
        servers, clients, etcd = rng.choice((2, 3, 3, 4)), rng.choice((1, 2, 3)), rng.random() < 0.4
        zones = rng.choice(("", "ab", "aab", "abca"))
        return Plan(seed, servers, clients, etcd, tuple(steps), zones, tuple(likelier.items()))


@dataclass(frozen=True)
class Finding:
    """What is wrong: the invariant, and in which way."""

    invariant: str
    text: str
    at: float


@dataclass
class Outcome:
    """The result of a run."""

    plan: Plan
    finding: Finding | None
    events: int
    seconds: float  # of the simulated time
    checksum: int
    trace: list[str] = field(default_factory=list)


class World:
    """All of it."""

    def __init__(self, plan: Plan, tell: Callable[[str], None] | None = None) -> None:
        """`tell` gets each line of the trace."""
        self.plan, self._tell = plan, tell
        self.finding: Finding | None = None
        self.trace: deque[str] = deque(maxlen=TRACE_MAX)
        self._sum = 0
        self._ids = Random(f"{plan.seed} ids")
        self.rng_delays = Random(f"{plan.seed} delays")
        self.loop = Loop()
        self.network = Network(self.loop, self.rng_delays, self._saw)
        self.wall_ahead_s = 0.0
        self.coordinator_names = ["c0", "c1"] if plan.etcd else ["c0"]
        self.coordinator_addresses = ",".join(f"{name}:{PORT}" for name in self.coordinator_names)
        self.hosts = {f"s{number}": Host(f"s{number}") for number in range(plan.servers)}
        self.truth = Truth(self.hosts)
        self.servers: dict[str, Server] = {}
        self.coordinators: dict[str, CoordinatorProcess] = {}
        self.clients: list[Client] = []
        self.store: Directory | EtcdServer
        if plan.etcd:
            self.store = EtcdServer(self.loop)
            etcd = Process(self.loop, "etcd", "etcd")
            for port in (2379, 2380):
                self.network.listen(f"etcd:{port}", etcd, self.store.serve)
        else:
            self.store = Directory(Random(f"{plan.seed} disk"), self.loop.time)
        self._lost: set[str] = set()  # hosts whose loss is not over
        self._put_back_at = -1.0
        self._locks: dict[str, tuple[str, int, float]] = {}  # by name: the session's client, its id, until when
        self._closed: set[int] = set()  # sessions
        self._tokens: dict[str, tuple[int, int]] = {}  # by name: the highest one, and whose
        self.copies_begun = 0
        self.copies_missing = 0  # at most, at one time since faults ended
        self._troubled_at: dict[str, float] = {}  # by host: when something last befell it
        self._unreached_at: dict[str, float] = {}  # by host: when its network, or its store, was last in trouble
        self._down_at: dict[str, float] = {}  # by host: when its process was last killed or stopped
        self.late_since: dict[str, float] = {}  # servers that were cut off together, while all was well otherwise
        self.late_by: frozenset[tuple[str, str]] = frozenset()  # what cuts them off
        self.prefers: tuple[str, ...] = ()  # the events that clients choose from; empty: all
        self.lost_at: dict[str, float] = {}  # by host: when its memory was lost last
        self.held_since: float | None = None  # since when lost copies are not made anew, for maintenance
        self._alone_since: dict[int, float] = {}
        self._copying_since: dict[tuple[str, int, int, int, int], float] = {}
        self._ghosts_since: dict[tuple[str, int], float] = {}
        self._unlisted_since: dict[tuple[str, int], float] = {}
        self._unlisted_turns: dict[tuple[str, int], int] = {}  # how often its server has renewed or registered since
        self._stubs: dict[str, Any] = {}  # by address
        self.strikes: list[Callable[[str, str, str], bool]] = []  # are asked about each message; true: they are over
        self._awaited: list[tuple[str, asyncio.Future[None]]] = []  # kinds of events, and who waits for them

    # ---- what is told

    def is_calm(self, *names: str, for_s: float = CALM_S) -> bool:
        """Whether nothing has befallen these hosts for a while; an empty name is none."""
        now = self.loop.time()
        return all(name and now - self._troubled_at.get(name, 0.0) >= for_s for name in names)

    def answers_at_once(self, *, without: str) -> bool:
        """Whether nothing delays a message or a stored change, but for what befalls one host."""
        delayed = self.network.slow or self.network.breaks or self.store.takes_nothing
        leader_ran = self.loop.time() - self._down_at.get(self.leader_name(), 0.0) >= 1.0
        return not delayed and leader_ran and self.is_calm(*(self.hosts.keys() - {without}), "etcd", for_s=1.0)

    def is_reached(self, name: str) -> bool:
        """Whether a server, the leader and the store have reached each other for a while, and the server runs. The
        leader may have stood still.
        """
        now = self.loop.time()
        wire = (name, self.leader_name(), "etcd")
        reached = all(now - self._unreached_at.get(each, 0.0) >= REACHED_S for each in wire)
        return reached and now - self._down_at.get(name, 0.0) >= REACHED_S

    def is_late_only(self, name: str) -> bool:
        """Whether a server was cut off together with all others, for less than two leases, and nothing else befell it
        or the leader since.
        """
        since, now = self.late_since.get(name), self.loop.time()
        if since is None or now - since > LATE_S_MAX:
            return False
        return all(self._down_at.get(each, 0.0) < since for each in (name, *self.coordinator_names))

    def note_trouble(self) -> None:
        """See which hosts are in trouble."""
        now, network = self.loop.time(), self.network
        processes = [each.process for each in (*self.servers.values(), *self.coordinators.values())]
        down = {each.host for each in processes if not each.alive or each.stopped}
        unreached = {name for cut in network.cuts for name in cut} | network.slow.keys()
        if network.breaks:
            unreached |= {*self.hosts, *self.coordinator_names, "etcd"}
        if self.store.takes_nothing:
            unreached |= {*self.coordinator_names}
        self._down_at |= dict.fromkeys(down, now)
        self._unreached_at |= dict.fromkeys(unreached, now)
        self._troubled_at |= dict.fromkeys(down | unreached, now)

    async def _look(self) -> None:
        """See which hosts are in trouble, and who waits."""
        while True:
            now, network = self.loop.time(), self.network
            if network.slow or network.breaks or network.cuts not in (self.late_by, set()):
                self.late_since = {}  # something else is wrong with the network, too
            self.note_trouble()
            state = self.leading_state()
            if state is not None:
                self._look_at_copies(state)
                self._look_at_lists(state)
                self._look_at_roles(state)
            for client in self.clients:
                if client.waits_for is not None:
                    part, since = client.waits_for
                    invariants.check(self, "wait", part, client.name, now - since)
            await asyncio.sleep(LOOK_S)

    def new_id(self) -> int:
        """Return a random id."""
        return self._ids.getrandbits(64) or 1

    def say(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.loop.time():9.4f}  {text}"
        self._sum = checksum(line.encode(), self._sum)
        self.trace.append(line)
        if self._tell is not None:
            self._tell(line)

    def _saw(self, source: str, target: str, method: str, message: Any) -> None:
        self._sum = checksum(message, self._sum)
        if self.strikes and method.startswith("/smb"):
            name = method.rpartition("/")[2]
            self.strikes = [strike for strike in self.strikes if not strike(source, target, name)]
        if self._tell is not None or method != "feed":
            size = len(message) if isinstance(message, bytes) else message
            line = f"{self.loop.time():9.4f}  {source} -> {target}  {method.rpartition('/')[2]} {size}"
            self.trace.append(line)
            if self._tell is not None:
                self._tell(line)

    def finds(self, invariant: str, text: str) -> None:
        """Take note of what is wrong; the first counts, and ends the run."""
        if self.finding is None:
            self.finding = Finding(invariant, text, self.loop.time())
            self.say(f"FOUND {invariant}: {text}")

    def _look_at_copies(self, state: State) -> None:
        """See for how long segments have had one copy of two."""
        lost, now = state.lost_segments(self.now()), self.loop.time()
        bundles = Bundles(state.buffers.values())
        alone = {
            segment.id: (record.title, {member.id for _, member in bundles.members(record, segment)})
            for record in state.buffers.values()
            for segment in record.segments
            if record.replicas == 2 and record.ready and not segment.backup and segment.id not in lost
        }
        # Nobody copies a bundle of which a segment is lost: smb status says that, until the lost buffer is deleted.
        alone = {number: (title, members) for number, (title, members) in alone.items() if members.isdisjoint(lost)}
        # Nor over memory of it that a server keeps beside the records.
        beside = {number for held in state.unexplained.values() for number in held}
        alone = {number: (title, members) for number, (title, members) in alone.items() if members.isdisjoint(beside)}
        if state.copies_held(self.now()):  # nobody copies anything, for maintenance
            alone, self.held_since = {}, now if self.held_since is None else self.held_since
        else:
            self.held_since = None
        if any(server.draining for server in state.servers.values()):  # a copy may have no other place
            alone = {}
        self._alone_since = {number: self._alone_since.get(number, now) for number in alone}
        for number, (title, _) in alone.items():
            invariants.check(self, "alone", number, title, now - self._alone_since[number])

    def _look_at_lists(self, state: State) -> None:
        """See for how long memory has been listed that a server does not hold any more, or held that is not listed."""
        now = self.loop.time()
        ghosts = {
            (name, number)
            for name, held in state.unexplained.items()
            for number in held
            if number not in self.hosts[name].segments
        }
        self._ghosts_since = {each: self._ghosts_since.get(each, now) for each in ghosts}
        for (name, number), since in self._ghosts_since.items():
            invariants.check(self, "listed", name, number, now - since)
        there = {(copy.server, copy.id) for record in state.buffers.values() for copy in record.copies}
        # What a server may have yet to make of an interrupted creation counts as taken there, in place of what it has.
        unsure = {
            copy.server for record in state.buffers.values() if record.id in state.interrupted for copy in record.copies
        }
        unlisted = {
            (name, number)
            for name, host in self.hosts.items()
            for number in host.segments
            if name not in unsure and (name, number) not in there and number not in state.unexplained.get(name, ())
        }
        self._unlisted_since = {each: self._unlisted_since.get(each, now) for each in unlisted}
        self._unlisted_turns = {each: self._unlisted_turns.get(each, 0) for each in unlisted}
        for (name, number), since in self._unlisted_since.items():
            turns = self._unlisted_turns[name, number]
            invariants.check(self, "unlisted", name, number, now - since, turns)

    def _look_at_roles(self, state: State) -> None:
        """See which servers answer reads of a segment without asking anybody, and whom the records have in their place;
        and for how long copies have not gone on.
        """
        where, now = state.where(), self.loop.time()
        copying = {
            (name, server.instance_id, *each)
            for name, server in self.servers.items()
            if server.process.alive and not server.process.stopped
            for each in server.engine.copying()
        }
        self._copying_since = {each: self._copying_since.get(each, now) for each in copying}
        for (name, _, number, epoch, chunks), since in self._copying_since.items():
            invariants.check(self, "copying", name, number, epoch, chunks, now - since)
        for name, server in self.servers.items():
            for number, epoch in server.engine.answers(now) if server.process.alive else ():
                if number in where and where[number][1].server != name and where[number][1].epoch > epoch:
                    invariants.check(self, "answers", number, name, where[number][1])

    # ---- what happens, for invariants

    def was_answered(self, name: str) -> None:
        """A coordinator has answered a memory server's renewal, or registration."""
        for each in self._unlisted_turns:
            self._unlisted_turns[each] += each[0] == name

    def destroys(self, host: Host, number: int) -> None:
        """An engine destroys memory."""
        self.say(f"{host.name} destroys {number:016x}")
        invariants.check(self, "destroy", host, number)

    def wrote(self, part: Part, client: int, number: int, epoch: int, server: str) -> None:
        """A write was acknowledged."""
        if not part.loose:
            part.acknowledged[client] = max(part.acknowledged.get(client, 0), number)
        invariants.check(self, "write", part, epoch, server)

    def was_read(self, part: Part, least: dict[int, int], found: dict[int, int], server: str) -> None:
        """A read was answered."""
        invariants.check(self, "read", part, least, found, server)

    def was_listed(self, reply: pb.ListBuffersReply) -> None:
        """Somebody has listed all buffers."""
        invariants.check(self, "list", reply.buffers)

    def put_back_since(self, moment: float) -> bool:
        """Whether the store was put back since then."""
        return self._put_back_at >= moment

    def locked(self, name: str, client: Client, session: int, token: int, began: float) -> None:
        """A lock was given to a session."""
        if self.put_back_since(began):
            return
        highest, by = self._tokens.get(name, (0, 0))
        if token > highest:
            self._tokens[name] = (token, session)
        elif (token, session) != (highest, by):  # it holds it still, if it could not give it back
            invariants.check(self, "lock", name, token, highest)
        holder, other, until = self._locks.get(name, ("", 0, 0.0))
        state = self.leading_state()
        open_ = state is not None and other in state.sessions and other not in self._closed
        if other not in (0, session) and self.loop.time() < until and open_:
            invariants.check(self, "lock held", name, holder, client.name)
        self._locks[name] = (client.name, session, began + LOCK_LEASE_S)

    def unlocks(self, name: str, session: int, token: int) -> None:
        """Its session is about to give it back."""
        if self._locks.get(name, ("", 0, 0.0))[1] == session:
            del self._locks[name]

    def session_ends(self, session: int) -> None:
        """It is about to be closed. Servers may hear of that late, once records in which it is open were restored."""
        self._closed.add(session)
        self._locks = {name: held for name, held in self._locks.items() if held[1] != session}

    def _is_superseded(self, state: State) -> bool:
        """Whether another coordinator leads by now: this one stood still between storing an event and its answer."""
        states = [each.state for each in self.coordinators.values() if each.state is not None]
        earlier = {term for each in states for term, _ in each.lineage.terms[:-1]}
        return state.lineage.stamp.term in earlier

    async def until_stored(self, kind: str, within_s: float) -> None:
        """Wait until a coordinator stores an event of that kind, for at most so long."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((kind, stored))
        await asyncio.wait({stored}, timeout=within_s)

    def saw_commit(self, event: Event, before: State, committed: Committed, owes: bool) -> None:
        """A coordinator has stored an event; or it `owes` some of it to a full store, or others have changed that."""
        for awaited in [each for each in self._awaited if each[0] == type(event).__name__]:
            self._awaited.remove(awaited)
            if not awaited[1].done():
                awaited[1].set_result(None)
        self._sum = checksum(type(event).__name__.encode(), self._sum)
        if committed.state.buffers is not before.buffers:
            invariants.check(self, "commit", committed.state)
            invariants.check(self, "stored", committed.state, owes)
            invariants.check(self, "paired", before, committed.state)
            records = committed.state.buffers.values()
            missing = sum(bool(not segment.backup and segment.epoch) for each in records for segment in each.segments)
            self.copies_missing = max(self.copies_missing, missing)
        if isinstance(event, Ticked):
            for name in sorted(before.server_leases.ends.keys() - committed.state.server_leases.ends.keys()):
                invariants.check(self, "gone", name, before)
        if isinstance(event, BufferMade) and not self._is_superseded(committed.state):
            invariants.check(self, "made", committed.state, event.key)
        if isinstance(event, CopyBegun | CopyDropped | RolesSwitched):
            invariants.check(self, "moved", committed.state, event)
        if isinstance(event, CopyBegun):
            self.copies_begun += 1
            self._leaves(event, committed.state)
            invariants.check(self, "begun", before, event)
            invariants.check(self, "copy", before, committed.state, event)
        if self._tell is not None:
            self.say(f"commit {event}"[:400])

    def _leaves(self, event: CopyBegun, state: State) -> None:
        """A copy that leaves its server goes as the new one begins: until that is whole there is one, as the product
        says. The host of that one may have been lost since it confirmed it.
        """
        where = state.where()
        for number in event.members if event.leaving else ():
            part = self.truth.parts.get(number)
            if part is not None and number in where and number not in self.hosts[where[number][1].server].segments:
                part.lost = True

    # ---- processes

    def start_server(self, name: str) -> None:
        """Start a memory server with what its host has, unless it runs."""
        known = self.servers.get(name)
        if known is None or not known.process.alive:
            self.servers[name] = Server(self, name, self.hosts[name])
            self.say(f"{name} starts as {self.servers[name].instance_id:016x} with {len(self.hosts[name].segments)}")

    def kill_server(self, name: str) -> None:
        """As SIGKILL."""
        self._kill(self.servers[name].process)

    def server_ended(self, server: Server) -> None:
        """A server was refused for good: its supervisor starts it again."""
        self.say(f"{server.name} ends: {server.ended}")
        self._kill(server.process)
        Outsider(self).begin(self._start_again(server.name))

    async def _start_again(self, name: str) -> None:
        await asyncio.sleep(1.0)
        self.start_server(name)

    def _kill(self, process: Process) -> None:
        if process.alive:
            self.say(f"{process.name} is killed")
            # It may be back before the next look.
            self._troubled_at[process.host] = self._down_at[process.host] = self.loop.time()
            process.kill()
            self.network.died(process)

    def may_lose(self) -> bool:
        """Whether the product says that all is whole, in all runs of servers that there are: a loss is over."""
        state, now = self.leading_state(), self.now()
        if state is None or now is None or any(state.unexplained.values()):
            return False
        for name, server in self.servers.items():
            record = state.servers.get(name)
            if not server.process.alive or record is None or record.instance_id != server.instance_id:
                return False
            if not state.heard(name, now) or any(state.missing.get(name, ())):
                return False
        return not any(record.degraded for record in state.buffers.values())

    def survives(self, part: Part, lost: str) -> bool:
        """Whether the loss of that host leaves all that was acknowledged of a segment on another one.

        As soon as the records say that a copy is whole, its server is told, and makes it the primary if the other one
        is lost: the copy counts before that message has arrived.
        """
        if any(self.truth.holders(part, without=lost)):
            return True
        state = self.leading_state()
        found = state.where().get(part.id) if state is not None else None
        names = {found[1].server, found[1].backup} - {"", lost} if found is not None else set()
        return any(part.is_in(self.hosts[name].segments.get(part.id), counts=True) for name in names)

    def lose(self, name: str) -> None:
        """A host is gone, with its memory."""
        host = self.hosts[name]
        self.say(f"{name} is lost with {len(host.segments)}")
        self.kill_server(name)
        invariants.check(self, "lose", host)
        state = self.leading_state()
        where = state.where() if state is not None else {}
        for number in host.segments:
            part = self.truth.parts.get(number)
            # A buffer with one copy that has just moved here: the former server has been told to drop its memory.
            alone = number in where and where[number][0].replicas == 1 and not where[number][1].backup
            moved = alone and where[number][1].server == name
            if part is None and moved:
                self.truth.gone.add(number)
            elif part is not None and (moved or not self.survives(part, name)):
                part.lost = True
        host.segments, host.quarantined, host.stamps = {}, set(), ()
        self.truth.lost_at = self.lost_at[name] = self.loop.time()

    def start_coordinator(self, name: str) -> None:
        """Start it, unless it runs."""
        known = self.coordinators.get(name)
        if known is None or not known.process.alive:
            self.say(f"{name} starts")
            self.coordinators[name] = CoordinatorProcess(self, name)

    def kill_coordinator(self, name: str) -> None:
        """As SIGKILL."""
        self._kill(self.coordinators[name].process)

    def leader_name(self) -> str:
        """Return which coordinator leads; empty if none does."""
        return next((name for name, each in self.coordinators.items() if each.state is not None), "")

    def leading_state(self) -> State | None:
        """Return the state of the coordinator that leads."""
        name = self.leader_name()
        return self.coordinators[name].state if name else None

    def now(self) -> Any:
        """Return this moment, as the coordinator that leads has it; None if none does."""
        name = self.leader_name()
        return self.coordinators[name].now() if name else None

    def unexplained(self) -> Any:
        """Return what servers hold beside the records."""
        state = self.leading_state()
        return state.unexplained if state is not None else {}

    def lose_power(self) -> float:
        """Return since when the store has lost its changes."""
        if isinstance(self.store, Directory):
            return self.store.lose_power()
        return self.loop.time()

    def put_back(self, since: float) -> None:
        """The store is as it was then: what clients were told later may hold, or not."""
        self.say(f"the store is as it was at {since:.3f}")
        self._put_back_at = self.loop.time()
        self.truth.forget_order()
        self._locks, self._tokens = {}, {}
        for client in self.clients:
            client.forget(since)

    def stub(self, address: str) -> Any:
        """Return what makes calls of the coordinator there. It is kept: making one takes longer than a call."""
        if address not in self._stubs:
            self._stubs[address] = CoordinatorStub(Channel(self.network, address))  # type: ignore[no-untyped-call]
        return self._stubs[address]

    def has_copies(self, name: str) -> bool:
        """Whether the records have a copy on a memory server, as far as a leader shows them."""
        state = self.leading_state()
        return state is None or state.allocation(name).segments > 0

    def alone_on(self) -> set[str]:
        """Return the memory servers with the only copy of something, as far as a leader shows them."""
        state = self.leading_state()
        records = state.buffers.values() if state is not None else ()
        return {part.server for record in records if record.replicas == 1 for part in record.segments}

    def is_registered(self, name: str) -> bool:
        """Whether a coordinator leads that knows the present run of a memory server."""
        state = self.leading_state()
        return state is not None and self.has_registered(state, name)

    def has_registered(self, state: State, name: str) -> bool:
        """Whether the run of a memory server that the coordinator knows is the present one, and lives."""
        known, run = state.servers.get(name), self.servers[name]
        return known is not None and known.instance_id == run.instance_id and run.process.alive

    # ---- operators

    async def operate(self, method: str, request: Any) -> Any:
        """Make a call as an operator; None if it is refused."""
        name = self.leader_name()
        if not name:
            return None
        try:
            return await getattr(self.stub(f"{name}:{PORT}"), method)(request, timeout=5.0)
        except grpc.aio.AioRpcError as error:
            self.say(f"{method}: {error.details()}")
            return None

    async def forget(self, name: str) -> None:
        """Free what is quarantined at a server: it may be the last memory of something."""
        state = self.leading_state()
        for number in state.unexplained.get(name, {}) if state is not None else ():
            if number in self.truth.parts:
                self.truth.parts[number].may_go = True
        await self.operate("ForgetSegments", pb.ForgetSegmentsRequest(name=name, all=True))

    # ---- a life

    async def _live(self) -> None:
        for name in self.coordinator_names:
            self.start_coordinator(name)
        for name in self.hosts:
            self.start_server(name)
        if not await self.until(lambda: self.may_lose(), START_S):
            self.finds("start", "the cluster does not start")
            return
        if isinstance(self.store, Directory):
            self.store.flush()  # without this cluster's beginning a store is another cluster's
        self.clients = [Client(self, number) for number in range(self.plan.clients)]
        outsider = Outsider(self)
        began = self.loop.time()
        faults = [outsider.begin(self._befall(step)) for step in self.plan.steps]
        outsider.begin(self._look())
        await asyncio.sleep(max((step.at for step in self.plan.steps), default=0.0) + 1.0)
        await asyncio.wait(faults or [asyncio.ensure_future(asyncio.sleep(0))], timeout=FAULTS_S)
        await asyncio.sleep(1.0)
        for each in faults:
            each.cancel()
        self.heal()
        self.say(f"faults have ended after {self.loop.time() - began:.1f} s")
        self.copies_begun = 0
        whole = await self.until(self._is_whole, WHOLE_S)
        if not whole:
            self.finds("whole within a bound", self._why_not())
            return
        for client in self.clients:
            client.quiet = True
        await self.until(lambda: all(client.work.done() for client in self.clients), QUIET_S + 5.0)
        await asyncio.sleep(REST_S)
        if not await self.until(self._is_whole, WHOLE_S):
            self.finds("whole within a bound", self._why_not())
        for each in invariants.AT_REST:
            if self.finding is None and (text := each(self)):
                self.finds(each.__name__, text)

    async def _befall(self, step: Step) -> None:
        await asyncio.sleep(step.at)
        self.say(f"FAULT {step}")
        await FAULTS[step.kind][1](self, step)

    async def until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Wait for a condition; return whether it came to hold in time."""
        end = self.loop.time() + deadline_s
        while self.loop.time() < end:
            if condition():
                return True
            await asyncio.sleep(0.1)
        return False

    def heal(self) -> None:
        """End all faults."""
        self.network.cuts.clear()
        self.prefers = ()
        self.strikes = []
        self.network.slow.clear()
        self.network.breaks, self.network.breaks_of = 0.0, ""
        self.store.full = False
        for name in self.coordinator_names:
            self.start_coordinator(name)
            self.coordinators[name].process.resume()
        for name in self.hosts:
            self.start_server(name)
            self.servers[name].process.resume()
            Outsider(self).begin(self.operate("DrainServer", pb.DrainServerRequest(name=name, undo=True)))

    def _is_whole(self) -> bool:
        return not self._why_not()

    def _why_not(self) -> str:
        state, now = self.leading_state(), self.now()
        if state is None or now is None:
            return "no coordinator leads"
        for name in self.hosts:
            if not state.heard(name, now):
                return f"memory server {name} is not heard"
        bundles = Bundles(state.buffers.values())
        beside = {number for held in state.unexplained.values() for number in held}
        # What moves together with lost memory gets no second copy until somebody deletes what is lost.
        lost = {
            bundle_of(segment)
            for record in state.buffers.values()
            for segment in record.segments
            if segment.id in state.lost_segments(now)
        }
        for record in state.buffers.values():
            for segment in record.segments:
                if record.replicas == 2 and not segment.backup and bundle_of(segment) not in lost:
                    members = {member.id for _, member in bundles.members(record, segment)}
                    if members.isdisjoint(beside):
                        return f"{record.title}: {segment} has one copy"
        return ""

    def run(self) -> Outcome:
        """Live through it."""
        try:
            with _Watch(self):
                outsider = Outsider(self)
                life = outsider.begin(self._live())
                self.loop.run(10_000.0, lambda: life.done() or self.finding is not None or bool(self.loop.faults))
                if self.loop.faults and self.finding is None:
                    self.finds("fault", self.loop.faults[0])
                if life.done() and not life.cancelled() and (error := life.exception()) is not None:
                    raise error
        finally:
            outcome = Outcome(self.plan, self.finding, self.loop.events, self.loop.time(), self._sum, list(self.trace))
            self.loop.close()
        return outcome


class Outsider:
    """Who makes faults, and looks: a process that nothing befalls."""

    def __init__(self, world: World) -> None:
        self._process = Process(world.loop, "outside", "outside")
        self.begin = self._process.begin


class _Watch(logging.Handler):
    """Takes what the product calls a fault of its own in its log."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.DEBUG if world._tell is not None else logging.ERROR)
        self._world = world
        self._loggers = [logging.getLogger(name) for name in ("coordinator", "memserver", "asyncio")]

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line."""
        process = this_process()
        if record.exc_info and record.exc_info[1] is not None and record.levelno >= logging.ERROR:
            self._world.finds("fault", f"{process}: {record.getMessage()}: {record.exc_info[1]!r}")
        if self._world._tell is not None:
            self._world.say(f"{process} {record.levelname}: {record.getMessage()}")

    def __enter__(self) -> None:
        self._before = [(each.level, each.propagate) for each in self._loggers]
        for each in self._loggers:
            each.addHandler(self)
            each.setLevel(self.level)
            each.propagate = False

    def __exit__(self, *_: object) -> None:
        for each, (level, propagate) in zip(self._loggers, self._before, strict=True):
            each.removeHandler(self)
            each.setLevel(level)
            each.propagate = propagate


def run(plan: Plan, tell: Callable[[str], None] | None = None) -> Outcome:
    """Run a plan in a world of its own."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None  # coroutines of dead processes are closed
    gc.disable()
    gc.freeze()  # what there is already need not be looked through once the world has ended
    try:
        return World(plan, tell).run()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # and some of them never began
            while gc.collect():  # what coroutines' `finally` leaves is found by the next one
                pass
        gc.unfreeze()
        gc.enable()
        sys.unraisablehook = before
