"""What happens to a cluster. A fault is a coroutine with @fault(weight): it gets the world and its step, and undoes
itself after `step.lasts`. `World.heal` ends what is left of all of them.

Memory of one host is lost at a time: the next loss waits until the product says that all is whole.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from smb.rpc import control_pb2 as pb
from tests.simulator.engine import Host

if TYPE_CHECKING:
    from tests.simulator.world import World


@dataclass(frozen=True)
class Step:
    """A fault at a moment; `seed` is for all that it draws itself. Times are seconds."""

    at: float
    kind: str
    victim: int
    lasts: float
    seed: int

    def rng(self) -> Random:
        """Return its own numbers."""
        return Random(self.seed)


# At which somebody may be struck.
METHODS = (
    "CreateSegment", "CreateSegment", "DeleteSegment", "TakeRoles", "TakeRoles", "Inventory", "EndSessions",
    "RetireSegments", "RegisterServer", "RegisterServer", "RenewServer", "CreateBuffer", "DeleteBuffer", "RenameBuffer",
)  # fmt: skip
NAMES_CHANGE = ("create", "delete", "find")  # of the events of clients, those by which names change
NEW_DATA = ("create", "write")
LATE_S = 12.0  # how long a message takes, at most, that arrives after its sender's successor leads
WAITS_S = 10.0  # how long a fault that is to happen to a cluster which is whole waits for that, at most
Fault = Callable[["World", Step], Awaitable[None]]
FAULTS: dict[str, tuple[int, Fault]] = {}


def fault(weight: int) -> Callable[[Fault], Fault]:
    """Have it happen so often, beside the others."""

    def take(act: Fault) -> Fault:
        FAULTS[act.__name__] = (weight, act)
        return act

    return take


def draw(rng: Random, at: float) -> Step:
    """Draw a step."""
    (kind,) = rng.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])
    lasts = rng.choice((0.0, rng.uniform(0.0, 0.5), rng.uniform(0.3, 3.0), rng.uniform(3.0, 10.0)))
    return Step(at, kind, rng.randrange(1000), lasts, rng.randrange(1 << 30))


def _server(world: World, step: Step) -> str:
    names = sorted(world.hosts)
    return names[step.victim % len(names)]


# ---- memory servers


@fault(4)
async def server_killed(world: World, step: Step) -> None:
    """A memory server's process ends, and comes back with its memory: at once, or late."""
    name = _server(world, step)
    world.kill_server(name)
    await asyncio.sleep(step.lasts)
    world.start_server(name)


@fault(7)
async def memory_lost(world: World, step: Step) -> None:
    """A host is lost with its memory, and back, empty: at once, within the leases, or when they have run out."""
    name = _server(world, step)
    if world.may_lose():
        world.lose(name)
        await asyncio.sleep(step.lasts)
        world.start_server(name)


@fault(8)
async def old_memory(world: World, step: Step) -> None:
    """A host is lost, and later it is back with the memory from before, which a new one had taken the place of."""
    name = _server(world, step)
    if not await world.until(world.may_lose, WAITS_S):
        return
    old: Host = copy.deepcopy(world.hosts[name])
    world.lose(name)
    await asyncio.sleep(step.lasts)
    world.start_server(name)
    for _ in range(200):
        await asyncio.sleep(0.2)
        if world.may_lose():
            world.lose(name)
            world.hosts[name].segments, world.hosts[name].stamps = old.segments, old.stamps
            world.hosts[name].quarantined = old.quarantined
            world.start_server(name)
            return


@fault(3)
async def lost_as_copies_move(world: World, step: Step) -> None:
    """A host is lost with its memory and its network, so nobody is refused there and its lease runs on. Meanwhile an
    operator has copies moved whose other ones it had.
    """
    rng, name = step.rng(), _server(world, step)
    if not await world.until(world.may_lose, WAITS_S):
        return
    cuts = {pair for other in world.coordinator_names for pair in ((name, other), (other, name))}
    world.network.cuts |= cuts
    world.lose(name)
    await asyncio.sleep(rng.uniform(0.5, 3.0))
    moves = rebalanced if rng.random() < 0.2 else drained
    moving = asyncio.ensure_future(moves(world, replace(step, victim=step.victim + rng.randint(1, 3))))
    await asyncio.sleep(rng.choice((step.lasts, 3.5 + step.lasts)))
    world.network.cuts -= cuts
    world.start_server(name)
    await moving


@fault(3)
async def server_stopped(world: World, step: Step) -> None:
    """A memory server stands still, and goes on."""
    process = world.servers[_server(world, step)].process
    process.stop()
    await asyncio.sleep(step.lasts)
    process.resume()


@fault(2)
async def unheard(world: World, step: Step) -> None:
    """A memory server is started anew, and the coordinators do not hear it for a while; perhaps without its memory."""
    name = _server(world, step)
    if step.rng().random() < 0.6 and await world.until(world.may_lose, WAITS_S):
        world.lose(name)
    else:
        world.kill_server(name)
    cuts = {(name, other) for other in world.coordinator_names}
    world.network.cuts |= cuts
    await asyncio.sleep(step.rng().random())
    world.start_server(name)
    await asyncio.sleep(step.rng().choice((step.lasts, 3.5 + step.lasts)))
    world.network.cuts -= cuts


@fault(11)
async def struck(world: World, step: Step) -> None:
    """Who sends or gets a certain message is killed just then, with or without its memory."""
    rng = step.rng()
    method = rng.choice(METHODS)
    count, at_sender, loses, after_s = rng.randint(1, 6), rng.random() < 0.5, rng.random() < 0.5, rng.random() * 0.004
    hit: list[str] = []

    def strike(source: str, target: str, name: str) -> bool:
        nonlocal count
        victim = source if at_sender else target
        if name == method and (victim in world.hosts or victim in world.coordinator_names):
            count -= 1
            if count <= 0:
                hit.append(victim)
        return count <= 0

    world.strikes.append(strike)
    slow = rng.choice(("", "", *sorted(world.hosts)))  # so that more is under way
    if slow:
        world.network.slow[slow] = 1.5
    for _ in range(2000):
        await asyncio.sleep(0.005)
        if hit:
            break
    world.loop.call_later(2.0, world.network.slow.pop, slow, None)
    if not hit:
        return
    await asyncio.sleep(after_s)
    (name,) = hit
    if name in world.hosts:
        if loses and world.may_lose():
            world.lose(name)
        else:
            world.kill_server(name)
        await asyncio.sleep(step.lasts)
        world.start_server(name)
    else:
        world.kill_coordinator(name)
        await asyncio.sleep(step.lasts)
        world.start_coordinator(name)


# ---- coordinators


@fault(6)
async def coordinator_killed(world: World, step: Step) -> None:
    """A coordinator ends, and comes back; of several mostly the leader."""
    name = world.leader_name() or world.coordinator_names[0]
    if step.victim % 4 == 0:
        name = world.coordinator_names[step.victim // 4 % len(world.coordinator_names)]
    world.kill_coordinator(name)
    await asyncio.sleep(step.lasts)
    world.start_coordinator(name)


@fault(2)
async def coordinator_stopped(world: World, step: Step) -> None:
    """A coordinator stands still, and goes on."""
    process = world.coordinators[world.leader_name() or world.coordinator_names[0]].process
    process.stop()
    await asyncio.sleep(step.lasts)
    process.resume()


@fault(2)
async def coordinator_held_up(world: World, step: Step) -> None:
    """A coordinator gets no processor for longer than servers' leases run."""
    process = world.coordinators[world.leader_name() or world.coordinator_names[0]].process
    process.stop()
    await asyncio.sleep(6.5 + step.lasts)
    process.resume()


@fault(3)
async def all_late(world: World, step: Step) -> None:
    """No memory server reaches a coordinator for a while, nor the other way around; all else goes on."""
    names, coordinators = sorted(world.hosts), world.coordinator_names
    well = world.is_calm(*names, *coordinators, for_s=6.0)
    cuts = {pair for one in names for other in coordinators for pair in ((one, other), (other, one))}
    world.network.cuts |= cuts
    if well:
        world.late_since, world.late_by = dict.fromkeys(names, world.loop.time()), frozenset(world.network.cuts)
    await asyncio.sleep(5.0 + step.lasts / 3)  # leases run out meanwhile, and servers are back within two
    world.network.cuts -= cuts


@fault(1)
async def wall_clock_set(world: World, step: Step) -> None:
    """Somebody sets the wall clock."""
    world.wall_ahead_s += step.rng().choice((-86400.0, -60.0, 60.0, 86400.0))


# ---- the store


@fault(6)
async def disk_full(world: World, step: Step) -> None:
    """The store takes nothing that is new; perhaps for as long as leases, and all that follows from them, take."""
    world.store.full = True
    await asyncio.sleep(step.rng().choice((step.lasts, 28.0 + step.lasts)))
    world.store.full = False


@fault(1)
async def power_lost(world: World, step: Step) -> None:
    """The coordinator's host loses power, and the store its last changes."""
    await _without_coordinators(world, step, lambda: world.put_back(world.lose_power()))


# Changes after which a backup shows only their beginning.
BEGINNINGS = ("BufferWanted", "BufferWanted", "CopyBegun", "CopiesEnded", "ServerReturned")


@fault(2)
async def backup_restored(world: World, step: Step) -> None:
    """A backup of the store is made, perhaps within a change of many steps, and put back: at once, or later."""
    rng, later_s = step.rng(), 2.0 + step.lasts
    if rng.random() < 0.6:
        later_s = rng.choice((rng.random() * 0.02, rng.random(), later_s))
        await world.until_stored(rng.choice(BEGINNINGS), within_s=6.0)
    restore = _restoring(world)
    await asyncio.sleep(later_s)
    await _without_coordinators(world, step, restore)


def _restoring(world: World) -> Callable[[], None]:
    """Make a backup of the store now, and return what puts it back."""
    backup, made_at = world.store.backup(), world.loop.time()

    def restore() -> None:
        world.store.restore(backup)
        world.put_back(made_at)

    return restore


@fault(2)
async def made_after_backup(world: World, step: Step) -> None:
    """A backup of the store that was made within a creation is put back. Meanwhile a client was told that the buffer is
    there, and has written to it. Its servers may have heard of no later change of the store.
    """
    await world.until_stored("BufferWanted", within_s=6.0)
    parts = world.truth.parts
    known, restore, world.prefers = set(parts), _restoring(world), NEW_DATA
    await world.until(lambda: any(part.acknowledged for number, part in parts.items() if number not in known), 1.5)
    world.prefers = ()
    await _without_coordinators(world, step, restore)


@fault(8)
async def made_late(world: World, step: Step) -> None:
    """A host is back without its memory, some of which nobody else had. A backup of the store is put back as the
    coordinator has a segment made there: that message arrives once the next coordinator leads, whose records do not
    have the segment.
    """
    world.prefers = ("create",)
    if not await world.until(world.may_lose, WAITS_S):
        world.prefers = ()
        return
    names = sorted(world.alone_on()) or sorted(world.hosts)
    name = names[step.victim % len(names)]
    world.lose(name)
    await asyncio.sleep(step.rng().random())
    world.start_server(name)
    await world.until(partial(world.is_registered, name), WAITS_S)
    restore = _restoring(world)
    sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_late(source: str, target: str, method: str) -> bool:
        if method == "CreateSegment" and target == name and not sent.done():
            world.network.slow[name] = LATE_S
            sent.set_result(None)
        return sent.done()

    def act() -> None:
        world.network.slow.pop(name, None)
        restore()

    world.strikes.append(is_late)
    await asyncio.wait({sent}, timeout=WAITS_S)
    world.prefers = ()
    sent.cancel()
    await _without_coordinators(world, step, act)


NAMES_CHANGE_S = 8.0  # after a restore: for longer than servers have to report what they hold


@fault(3)
async def cluster_restored(world: World, step: Step) -> None:
    """A backup of the store is put back after buffers were made and deleted, and perhaps moved. Clients go on with
    that. All servers are started anew with the coordinators, or one did not hear of the last deletions: not before the
    coordinators were killed, or not before others lead, and then it hears of them from the dead.
    """
    rng, restore = step.rng(), _restoring(world)
    if rng.random() < 0.5:
        if await world.until(world.may_lose, WAITS_S):
            await memory_lost(world, step)
        await world.until(world.may_lose, WAITS_S)
    world.prefers = NAMES_CHANGE
    await asyncio.sleep(rng.uniform(1.0, 6.0))
    names = sorted(world.hosts) if rng.random() < 0.5 else []
    unheard = {(other, _server(world, step)) for other in world.coordinator_names}
    world.network.cuts |= unheard
    await asyncio.sleep(rng.uniform(0.5, 2.0))
    for name in names:
        world.kill_server(name)
    late = not names and rng.random() < 0.7
    if not late:
        world.network.cuts -= unheard
    await _without_coordinators(world, step, restore)
    for name in names:
        world.start_server(name)
    if late:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        world.network.cuts -= unheard
    await asyncio.sleep(NAMES_CHANGE_S)
    world.prefers = ()


@fault(3)
async def moved_after_backup(world: World, step: Step) -> None:
    """A backup of the store is put back after copies have left a server that was drained. Clients go on, and make
    buffers that are to move together with what has moved.
    """
    name, rng = _server(world, step), step.rng()
    if not await world.until(world.may_lose, WAITS_S):
        return
    restore = _restoring(world)
    await world.operate("DrainServer", pb.DrainServerRequest(name=name))
    await world.until(lambda: not world.has_copies(name), WAITS_S)
    await asyncio.sleep(rng.random())
    world.prefers = NAMES_CHANGE
    await _without_coordinators(world, step, restore)
    await asyncio.sleep(NAMES_CHANGE_S)
    world.prefers = ()


async def _without_coordinators(world: World, step: Step, act: Callable[[], None]) -> None:
    for name in world.coordinator_names:
        world.kill_coordinator(name)
    act()
    await asyncio.sleep(step.lasts / 3)
    for name in world.coordinator_names:
        world.start_coordinator(name)


# ---- the network


@fault(3)
async def link_cut(world: World, step: Step) -> None:
    """Two hosts do not reach each other, or one of them not the other."""
    rng = step.rng()
    one, other = rng.sample([*sorted(world.hosts), *world.coordinator_names, "etcd"], 2)
    if rng.random() < 0.4:
        one, other = "etcd", world.leader_name() or other
    cuts = {(one, other)} if rng.random() < 0.5 else {(one, other), (other, one)}
    world.network.cuts |= cuts
    await asyncio.sleep(rng.choice((step.lasts, 5.0 + step.lasts)))
    world.network.cuts -= cuts


def _around(world: World, name: str, *, also: Iterable[str] = ()) -> set[tuple[str, str]]:
    """Return the links of a memory server with all other hosts of the cluster, but not with clients, and with these."""
    others = [other for other in (*world.hosts, *world.coordinator_names, *also) if other != name]
    return {(name, other) for other in others} | {(other, name) for other in others}


@fault(3)
async def server_alone(world: World, step: Step) -> None:
    """Clients reach a memory server, and no other host of the cluster does."""
    cuts = _around(world, _server(world, step))
    world.network.cuts |= cuts
    await asyncio.sleep(step.rng().choice((step.lasts, 6.5 + step.lasts)))
    world.network.cuts -= cuts


@fault(2)
async def successor_alone(world: World, step: Step) -> None:
    """Nobody reaches a memory server until others have taken over. As it is back, one of those is alone: nobody can ask
    it whether it has what it took over.
    """
    rng = step.rng()
    cuts = _around(world, _server(world, step), also=[client.name for client in world.clients])
    world.network.cuts |= cuts
    await asyncio.sleep(rng.uniform(6.5, 9.0))
    world.network.cuts -= cuts
    cuts = _around(world, _server(world, replace(step, victim=step.victim + rng.randint(1, 3))))
    world.network.cuts |= cuts
    await asyncio.sleep(1.0 + step.lasts)
    world.network.cuts -= cuts


@fault(3)
async def network_parts(world: World, step: Step) -> None:
    """Hosts are in two parts, which do not reach each other; clients reach both, or are in one of them."""
    rng = step.rng()
    names = [*sorted(world.hosts), *world.coordinator_names, "etcd"]
    if rng.random() < 0.5:
        names += [client.name for client in world.clients]
    part = {name for name in names if rng.random() < 0.5}
    cuts = {(one, other) for one in names for other in names if (one in part) != (other in part)}
    world.network.cuts |= cuts
    await asyncio.sleep(step.lasts)
    world.network.cuts -= cuts


@fault(2)
async def host_slow(world: World, step: Step) -> None:
    """A host's messages take long."""
    name = step.rng().choice((*sorted(world.hosts), *world.coordinator_names, "etcd"))
    world.network.slow[name] = step.rng().choice((0.05, 0.3, 1.5, 4.0))
    await asyncio.sleep(step.lasts)
    world.network.slow.pop(name, None)


@fault(2)
async def connections_break(world: World, step: Step) -> None:
    """Calls lose their connections: before the effect, or after it."""
    await _break(world, "", step.rng().choice((0.01, 0.05, 0.2)), step.lasts)


@fault(4)
async def answers_lost(world: World, step: Step) -> None:
    """Calls of one method lose their connections, most of them after the effect; all other calls are answered."""
    rng = step.rng()
    await _break(world, rng.choice(METHODS), rng.choice((0.3, 0.6, 0.6, 1.0)), 1.0 + step.lasts)


async def _break(world: World, method: str, share: float, lasts_s: float) -> None:
    world.network.breaks, world.network.breaks_of = share, method
    world.note_trouble()  # the first calls may break before anybody looks
    await asyncio.sleep(lasts_s)
    world.network.breaks, world.network.breaks_of = 0.0, ""


# ---- operators


@fault(2)
async def drained(world: World, step: Step) -> None:
    """A memory server is drained, and later no more."""
    name = _server(world, step)
    await world.operate("DrainServer", pb.DrainServerRequest(name=name))
    await asyncio.sleep(3.0 + 2 * step.lasts)
    await world.operate("DrainServer", pb.DrainServerRequest(name=name, undo=True))


@fault(3)
async def drain_given_up(world: World, step: Step) -> None:
    """A memory server is drained while calls that make copies get no answer, and no more before they are repeated:
    nobody needs any longer what such a call made.
    """
    rng, name = step.rng(), _server(world, step)
    breaks = asyncio.ensure_future(_break(world, rng.choice(("CreateSegment", "CreateSegment", "TakeRoles")), 0.5, 4.0))
    await world.operate("DrainServer", pb.DrainServerRequest(name=name))
    await asyncio.sleep(rng.uniform(0.3, 3.0))
    await world.operate("DrainServer", pb.DrainServerRequest(name=name, undo=True))
    await breaks


@fault(2)
async def maintained(world: World, step: Step) -> None:
    """An operator plans work on a server, or on all, and perhaps ends that; or it ends by itself."""
    rng = step.rng()
    name = _server(world, step) if rng.random() < 0.7 else ""
    request = pb.MaintainRequest(name=name, all=not name, for_ms=round(1000 * (1.0 + 3 * step.lasts)))
    await world.operate("Maintain", request)
    await asyncio.sleep(rng.choice((step.lasts, 4 * step.lasts)))
    await world.operate("Maintain", pb.MaintainRequest(name=name, all=not name, end=True))


@fault(3)
async def rebalanced(world: World, step: Step) -> None:
    """Roles switch, and copies move, so that servers have equal shares."""
    await world.operate("Rebalance", pb.RebalanceRequest(single_copies=step.victim % 2 == 0))


@fault(1)
async def forgotten(world: World, step: Step) -> None:
    """An operator frees what is quarantined at a server."""
    await world.forget(_server(world, step))
