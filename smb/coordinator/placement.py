"""On which servers a new buffer lies, and how it is cut. Pure: equal arguments give equal results."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smb.config.parse import format_bytes
from smb.coordinator.records import BufferRecord, copy_stride_bytes
from smb.engine import segment_bytes, segment_file_bytes
from smb.errors import InvalidArgumentError, OutOfMemoryError, UnavailableError

SERVERS_PER_BUFFER_MAX = 1024  # csrc/smb/types.h: SMB_SEGMENTS_PER_BUFFER_MAX
# A call keeps as many links busy as its range has stripes. A stripe of one chunk, the largest frame, is the smallest
# one that does not slow any call down (`python -m perf.scaling stripes`): with it, 4 MiB on 8 servers move twice as
# fast as with 1 MiB.
STRIPE_BYTES_DEFAULT = 256 << 10
# A view maps each stripe, and Linux gives a process 65 530 mappings: buffers beyond half of that get larger stripes.
STRIPE_BYTES_LARGE = 1 << 20
LARGE_BYTES = 8 << 30
STRIPE_BYTES_MIN = 4096
CHUNK_BYTES_MAX = 256 << 10  # csrc/smb/types.h: SMB_CHUNK_BYTES_DEFAULT
SERVERS_SHOWN_MAX = 8  # in one message
# Segments that servers of unequal weights get together (at least two per server if there are more than eight). This is
# enough to give one server a tenth of nine others' traffic, and few enough that each is worth its file and its place in
# every client's call.
ROUND_MAX = 16
ROUND_SLACK = 1.02  # a round is good enough if no server has more than this times its share


@dataclass(frozen=True, slots=True)
class Share:
    """One segment and its server: bytes of data, and bytes of the server's capacity."""

    server: str
    nbytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class BufferPlacement:
    """A cut, with its segments in order. A server has several segments if its weight is higher than the others'."""

    stripe_bytes: int
    chunk_bytes: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """The servers on which buffers can be placed: free bytes of each live server, names of known servers that are not
    alive, and weights. A weight is the server's share of the traffic relative to others (default 1). `stripe_bytes`:
    the cluster's default stripe; 0: see `place`. `draining`: live servers on which nothing is placed.
    """

    free_bytes: Mapping[str, int]
    dead: frozenset[str] = frozenset()
    weights: Mapping[str, float] = field(default_factory=dict)
    stripe_bytes: int = 0
    hosts: Mapping[str, str] = field(default_factory=dict)  # the machine of each live server that names it
    addresses: Mapping[str, str] = field(default_factory=dict)  # the host of each live server's data address
    zones: Mapping[str, str] = field(default_factory=dict)  # the zone of each live server that has one
    draining: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()  # live servers that take data without TLS

    def alive(self, server: str) -> bool:
        """Whether the server's lease runs."""
        return server in self.free_bytes or server in self.draining

    def may_copy(self, server: str, other: str) -> bool:
        """Whether one of the servers may hold a copy of the other's segments: both must take data in the same way, with
        TLS or without, because changes are forwarded like other data."""
        return server != other and (server in self.plain) == (other in self.plain)

    def nearness(self, server: str, other: str) -> int:
        """Return how much two servers share that may be lost at once: 1 for a zone, 2 for a host, 3 for both."""
        zone = self.zones.get(server, "")
        one_zone = bool(zone) and zone == self.zones.get(other, "")
        return one_zone + 2 * self._on_one_host(server, other)

    def _on_one_host(self, server: str, other: str) -> bool:
        """Whether two servers are on one machine. In a rolling upgrade only some name theirs. Then their addresses
        count."""
        if server in self.hosts and other in self.hosts:
            return self.hosts[server] == self.hosts[other]
        return self.addresses.get(server) == self.addresses.get(other)

    def round_of(self, servers: Sequence[str], most: int) -> list[str]:
        """Return the order of turns, stripe by stripe, until it repeats: at least one turn each, at most `most`."""
        turns = weighted_round([self.weights.get(name, 1.0) for name in servers], most)
        return [servers[index] for index in turns]


def place(
    pool: Pool,
    nbytes: int,
    *,
    count: int = 0,
    names: Sequence[str] = (),
    stripe_bytes: int = 0,
    versions: int = 1,
) -> BufferPlacement:
    """Place `nbytes` on the servers `names`, or on `count` servers, or (without either) on as many as the data fills.

    Servers with the most free bytes come first, and by name among equals, so that small buffers are spread. A buffer
    with fewer stripes than servers lies on the first of them, one stripe each. stripe_bytes=0 means the pool's stripe,
    or else 256 KiB (1 MiB for more than 8 GiB). The default is smaller if one of the wanted servers would otherwise get
    no part. Several versions take copies of whole stripes, for which the default stripe is no larger than the data
    needs.

    Servers of unequal weights get segments in proportion, as far as stripes and room allow. If a server has no room for
    its part by weight, the same servers share evenly.

    Raises UnavailableError if too few servers are alive, OutOfMemoryError if they are full, InvalidArgumentError for
    unknown names or more servers than a buffer can have.
    """
    _check_servers(pool, count, names)
    free_bytes = sum(pool.free_bytes.values())
    if versions * nbytes > free_bytes:  # this also keeps all later sizes within the engine's 64 bits
        raise _no_room(pool, versions * nbytes, "")
    wanted = len(names) or count
    order = list(names) or sorted(pool.free_bytes, key=lambda name: (-pool.free_bytes[name], name))
    parts = len(pool.round_of(order[:wanted], SERVERS_PER_BUFFER_MAX)) if wanted else 0
    stripe = stripe_bytes or _default_stripe(nbytes, parts, versions, pool.stripe_bytes)
    stripes = -(-nbytes // stripe)
    most = min(wanted or len(order), stripes, SERVERS_PER_BUFFER_MAX)
    # With fewer servers each share is larger, but the servers with the least room are left out.
    for count_now in range(most, 0, -1):
        servers = order[:count_now]
        weighted = pool.round_of(servers, min(stripes, SERVERS_PER_BUFFER_MAX))
        for turns in (weighted, servers) if weighted != servers else (servers,):
            stored = _stored_bytes(nbytes, stripe, len(turns), versions)
            if stored <= free_bytes:
                placement = _cut(stored, stripe, chunk_bytes(stripe), turns)
                if _fits(pool, placement):
                    return placement
        if wanted:
            break
    where = f" over {most} servers" if most > 1 else ""
    raise _no_room(pool, _stored_bytes(nbytes, stripe, most, versions), where)


def place_like(pool: Pool, like: BufferRecord, *, versions: int = 1) -> BufferPlacement:
    """Place on the same servers as `like`, in the same order and with the same cut. Raises as `place` does."""
    names = [segment.server for segment in like.segments]
    _check_servers(pool, 0, names)
    stored = _stored_bytes(like.nbytes, like.stripe_bytes, len(names), versions)
    placement = _cut(stored, like.stripe_bytes, like.chunk_bytes, names)
    if not _fits(pool, placement):
        raise _no_room(pool, stored, f' on the servers of "{like.name}"')
    return placement


def place_backups(pool: Pool, placement: BufferPlacement, like: BufferRecord | None = None) -> tuple[str, ...]:
    """Return the server of each share's second copy: another server, on another host and in another zone if one there
    has room. Among the candidates it is the one with the least of this buffer, then the one with the most free bytes.
    For a buffer placed like another one it is the server of that buffer's copy if it has room, so that both still lie
    together after a server is lost.

    Raises UnavailableError if only one server is alive, OutOfMemoryError if no server has room.
    """
    if len(pool.free_bytes) < 2:
        raise UnavailableError(
            f"replicas=2 needs two live memory servers; alive: {', '.join(pool.free_bytes)}. Start another one"
        )
    free = dict(pool.free_bytes)
    given = dict.fromkeys(free, 0)
    for share in placement.shares:
        free[share.server] -= share.file_bytes
    backups = []
    beside = [segment.backup for segment in like.segments] if like is not None else [""] * len(placement.shares)
    for share, wanted in zip(placement.shares, beside, strict=True):
        others = [name for name in free if pool.may_copy(share.server, name) and free[name] >= share.file_bytes]
        if not others:
            raise _no_room(pool, 2 * sum(share.file_bytes for share in placement.shares), " in two copies")
        chosen = min(others, key=lambda name: (pool.nearness(share.server, name), given[name], -free[name], name))
        if wanted in others and pool.nearness(share.server, wanted) == pool.nearness(share.server, chosen):
            chosen = wanted
        free[chosen] -= share.file_bytes
        given[chosen] += share.file_bytes
        backups.append(chosen)
    return tuple(backups)


def place_together(pool: Pool, like: BufferRecord) -> tuple[BufferPlacement, tuple[str, ...]]:
    """Place each segment and its second copy on the servers of the same copies of `like`. A second copy that `like`
    lacks for now is left out here, too. Raises as `place_like` does.
    """
    backups = tuple(segment.backup for segment in like.segments)
    _check_servers(pool, 0, tuple(dict.fromkeys(filter(None, backups))))
    placement = place_like(pool, like)
    taken: Counter[str] = Counter()
    for share, backup in zip(placement.shares, backups, strict=True):
        for name in filter(None, (share.server, backup)):
            taken[name] += share.file_bytes
    if any(nbytes > pool.free_bytes[name] for name, nbytes in taken.items()):
        raise _no_room(pool, taken.total(), f' on the servers of "{like.name}" and of its second copies')
    return placement, backups


def place_copy(pool: Pool, server: str, file_bytes: int) -> str:
    """Return the server for a new copy of a segment of `server`, chosen as in `place_backups`; empty: none has room."""
    others = [name for name, free in pool.free_bytes.items() if pool.may_copy(server, name) and free >= file_bytes]
    return min(others, key=lambda name: (pool.nearness(server, name), -pool.free_bytes[name], name), default="")


def chunk_bytes(stripe_bytes: int) -> int:
    """Return the chunk size for a stripe: the largest whole number of pages up to 256 KiB that divides the stripe."""
    pages = stripe_bytes // STRIPE_BYTES_MIN
    most = min(pages, CHUNK_BYTES_MAX // STRIPE_BYTES_MIN)
    return next(count for count in range(most, 0, -1) if pages % count == 0) * STRIPE_BYTES_MIN


def weighted_round(weights: Sequence[float], most: int) -> list[int]:
    """Return the order in which servers with these weights take turns: at least one turn each, and at most
    max(`most`, number of servers).

    Equal weights take one turn each, in order. Unequal weights take as many turns as the shortest round in which the
    busiest server has at most 1.02 times its share. If no round is that good, the best one of up to 16 turns is taken
    (2 for each server if these are more). A server's turns are spread evenly over the round, so that any few stripes in
    a row are spread too.
    """
    servers = len(weights)
    if len(set(weights)) == 1:
        return list(range(servers))
    total = sum(weights)
    longest = max(servers, min(most, max(ROUND_MAX, 2 * servers)))
    # Each further turn goes to the server that it loads least. No other choice has a lower highest load.
    loads = [(2 * total / weight, index) for index, weight in enumerate(weights)]
    heapq.heapify(loads)
    highest = total / min(weights)
    given: list[int] = []
    best, best_load = 0, highest / servers
    while best_load > ROUND_SLACK and servers + len(given) < longest:
        load, index = loads[0]
        heapq.heapreplace(loads, (load + total / weights[index], index))
        given.append(index)
        highest = max(highest, load)
        if highest / (servers + len(given)) < best_load:
            best, best_load = len(given), highest / (servers + len(given))
    turns = Counter([*range(servers), *given[:best]])
    return [index for _, index in sorted(((2 * k + 1) / turns[i], i) for i in turns for k in range(turns[i]))]


def _default_stripe(nbytes: int, wanted: int, versions: int, stripe: int) -> int:
    largest = stripe or (STRIPE_BYTES_DEFAULT if versions * nbytes <= LARGE_BYTES else STRIPE_BYTES_LARGE)
    if wanted <= 1 and versions == 1:
        return largest
    even = -(-nbytes // max(wanted, 1))
    return min(largest, -(-even // STRIPE_BYTES_MIN) * STRIPE_BYTES_MIN)


def _stored_bytes(nbytes: int, stripe_bytes: int, segments: int, versions: int) -> int:
    return nbytes if versions == 1 else versions * copy_stride_bytes(nbytes, stripe_bytes, segments)


def _cut(stored_bytes: int, stripe_bytes: int, chunk: int, servers: Sequence[str]) -> BufferPlacement:
    """Cut the bytes over segments on these servers. A server that is listed several times gets several segments."""
    sizes = [segment_bytes(stored_bytes, stripe_bytes, chunk, len(servers), index) for index in range(len(servers))]
    shares = (Share(name, size, segment_file_bytes(size, chunk)) for name, size in zip(servers, sizes, strict=True))
    return BufferPlacement(stripe_bytes, chunk, tuple(shares))


def _fits(pool: Pool, placement: BufferPlacement) -> bool:
    taken = dict.fromkeys((share.server for share in placement.shares), 0)
    for share in placement.shares:
        taken[share.server] += share.file_bytes
    return all(nbytes <= pool.free_bytes[server] for server, nbytes in taken.items())


def _check_servers(pool: Pool, count: int, names: Sequence[str]) -> None:
    if max(count, len(names)) > SERVERS_PER_BUFFER_MAX:
        raise InvalidArgumentError(
            f"a buffer can lie on at most {SERVERS_PER_BUFFER_MAX} servers, not {max(count, len(names))}"
        )
    alive = ", ".join(sorted(pool.free_bytes)[:SERVERS_SHOWN_MAX]) or "none"
    for name in names:
        if name in pool.draining:
            raise UnavailableError(
                f'memory server "{name}" is being drained and gets no new segments; alive: {alive}. Choose others, or '
                f"stop draining it: smb undrain {name}"
            )
        if name not in pool.free_bytes and name not in pool.dead:
            raise InvalidArgumentError(f'no memory server is named "{name}"; alive: {alive}')
        if name in pool.dead:
            raise UnavailableError(
                f'memory server "{name}" is not alive; alive: {alive}. Start it again or choose others'
            )
    if not pool.free_bytes and pool.draining:
        raise UnavailableError(
            f"every live memory server is being drained: {', '.join(sorted(pool.draining))}; start another one, or "
            f"stop draining one (smb undrain NAME)"
        )
    if not pool.free_bytes:
        raise UnavailableError(
            "no memory server is alive; start one with: smb-memserver --coordinator HOST:PORT --capacity 1GiB"
        )
    if count > len(pool.free_bytes):
        raise UnavailableError(
            f"{count} servers were asked for, {len(pool.free_bytes)} are alive ({alive}); ask for fewer, or start more"
        )


def _no_room(pool: Pool, nbytes: int, where: str) -> OutOfMemoryError:
    most_free_first = sorted(pool.free_bytes.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} {format_bytes(max(free, 0))}" for name, free in most_free_first[:SERVERS_SHOWN_MAX])
    more = f" and {len(most_free_first) - SERVERS_SHOWN_MAX} more" if len(most_free_first) > SERVERS_SHOWN_MAX else ""
    return OutOfMemoryError(
        f"no room for {format_bytes(nbytes)}{where}; free: {shown}{more}. "
        f"Delete buffers (smb rm) or start another memory server (smb-memserver)"
    )
