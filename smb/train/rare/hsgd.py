"""HSGD: the workers of a host take the mean of every step; one of them, the host's root, runs SEASGD for all."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from smb.config.settings import text_of
from smb.daemon.failpoint import failpoint
from smb.errors import Error, InvalidArgumentError, LockLostError, NotFoundError
from smb.train import member_table as t
from smb.train.bsp import BSP
from smb.train.elastic import ElasticExchange
from smb.train.exchange.elastic_force import Elastic, check_settings
from smb.train.group_making import enter
from smb.train.guards import RefusedContributionError
from smb.train.parameters import ArrayParameters, Parameters
from smb.train.scheme import Exchange, Footprint, Scheme
from smb.train.traits import ELASTIC, Traits

if TYPE_CHECKING:
    from smb.client import Client
    from smb.train.group import Group

# In the row of the host's group: the last round after which the host was exchanged with the shared model.
_MET = t.GROUP_EXTRA
# Servers that are probed at most to find those on this host; a server with the host's name is probed first.
_PROBED_MAX = 16

_log = logging.getLogger("smb")


@dataclass(frozen=True)
class HSGD(Scheme):
    """Two levels: inside a host every local step is a round of BSP, and between hosts there is SEASGD.

    The host's model H moves by the mean of the workers' changes. After every `every`-th (tau) round the host's root
    runs SEASGD on H, with W the shared model of all hosts:

        H += mean of (w_i - H);   d = alpha * (H - W);   H -= d;   W += d;   w_i = H

    (Ahn and others: ShmCaffe, 2018.) All workers of the host go on from the new H. The root sends W's half in the
    background while they compute; where T_host is the time of the round inside the host:

        iteration = max(T_compute, T_write + T_accumulate) + T_host + T_read + T_local

    H lives in a nested group, NAME/host/HOST, on the memory servers of that host, so that its rounds go through shared
    memory. If no server runs there, the coordinator chooses the servers. Between hosts only the roots' 2n floats move.
    The host is the machine's name, or $SMB_TRAIN_HOST, for several hosts on one machine or containers that share one.

    The ranks of a mesh (smb.torch.join with mesh=; FSDP2 or DDP, by NCCL or gloo), which step together anyway, count as
    one host: one member without a nested group, which exchanges as in SEASGD.

    The root is the member that has been in the round's group for longest. If the root dies or leaves, the next member
    is root from the exchange for which the others are waiting; after a death that is about a lease later. A dead root's
    contribution counts at most once for each element, and is not sent again. A root that was only stopped changes
    nothing afterwards, because its writes are fenced. If step() raises at a live root, since the servers of the shared
    model are away, its host waits until the root calls step() again or leaves. Workers that join a host do not wait. A
    host whose workers have all left starts from the shared model when one comes back. If the guards refuse a
    difference, at the root, it is not sent, and the host starts again from the shared model. Each worker's change is
    checked before it counts in the host's mean.

    Taxonomy: data parallel; central, in two levels; synchronous inside a host, asynchronous between hosts; workers with
    their host's model each step, roots with the shared one every tau steps.

    Staleness: 0 inside a host (BSP); between hosts as SEASGD, unbounded, with p the number of hosts.
    """

    NAME: ClassVar[str] = "hsgd"
    TRAITS: ClassVar[Traits] = Traits(way=ELASTIC, no_overlap="it sends in the background already")
    alpha: float = 0.2
    every: int = 1

    def __post_init__(self) -> None:
        if self.alpha is None:
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: alpha must be a number, not None, because the number of hosts is not known"
            )
        check_settings(self.NAME, self.alpha, self.every)

    def footprint(self) -> Footprint:
        """Counts the shared model, and what BSP keeps for each host."""
        inside = BSP().footprint()
        return Footprint(1, worker=inside.worker, host=inside.group)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange. Joins the host's group, which is made first if it does not exist."""
        if parameters.in_ranks:
            return ElasticExchange(group, parameters, self.alpha, self.every, hidden=True)
        return HostExchange(group, parameters, self.alpha, self.every)


class HostExchange(Exchange):
    """One worker's side. Every step blocks for the round inside the host, and every `every` steps for the root's
    exchange.
    """

    def __init__(self, group: Group, parameters: Parameters, alpha: float, every: int) -> None:
        self._group = group
        self._alpha = alpha
        self._every = every
        self._elastic: Elastic | None = None  # once this worker is root
        self._samples = 0
        self._due: int | None = None  # the host's round whose exchange with the shared model is not done
        # None: not computed; otherwise the base is the host's new model, and with True its difference must be sent.
        self._taken: bool | None = None
        # Whether the base has been written as the host's model, so that the difference must be sent.
        self._base_is_shared = False
        self._refused: RefusedContributionError | None = None
        name = f"{group.name}/host/{host_name()}"
        placement = _placement(group.client, name)
        shared = np.empty(parameters.size, np.float32)
        group.read(shared)
        start = ArrayParameters(shared, f"join of training {name!r}")
        copies = group.weights.info.replicas
        self._host: Group = enter(
            group.client,
            name,
            start,
            BSP(),
            group.guards,
            group.lease,
            lambda host: host,
            members=t.SLOTS,  # as before rounds took more, so that releases of both kinds train together on a host
            replicas=copies,
            **placement,
        )
        group.nested = self._host
        self._host.time_spent = group.time_spent  # one worker's
        try:
            self._revive()
            self._inner = BSP().run(self._host, parameters)
        except BaseException:
            self._host.leave()
            raise

    @property
    def root(self) -> bool:
        """True if this worker has been its host's root."""
        return self._elastic is not None

    def step(self, samples: int) -> None:
        """Take part in the host's round. Every `every` rounds the root exchanges with the shared model for all."""
        if self._due is None:
            try:
                self._inner.step(samples)
            except RefusedContributionError as error:
                self._refused = error  # raised after the exchange, because the others wait for that
            self._samples += samples
            self._due = self._host.round
        if self._due % self._every == 0:
            self._meet(self._due)
        self._due = None
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def restart(self) -> None:
        self._inner.restart()

    def flush(self) -> None:
        """Wait until the root's difference has arrived."""
        if self._elastic is not None:
            self._send_taken(self._elastic)
            self._elastic.finish()

    def close(self) -> None:
        """Leave the host's group, too."""
        try:
            self.flush()
            self._inner.close()
        finally:
            self._host.leave()

    def abandon(self) -> int:
        """Leave the host's group, if this worker is still in it. Counts the steps that are in no round of the host."""
        lost = 0
        if self._elastic is not None:
            self._elastic.abandon()
        with contextlib.suppress(Error):
            lost = self._inner.abandon()
            self._host.leave()
        return lost

    # ---- the exchange

    def _meet(self, due: int) -> None:
        """Wait until the host has been exchanged with the shared model after this round, or exchange it as root. Then
        take over the host's model.

        No member contributes to the round before that, so the round stays open and no other process writes the host's
        model.
        """
        host = self._host
        if self._elastic is not None:
            self._send_taken(self._elastic)  # the last call failed after it wrote the host's model
        while True:
            rows = host.table.read()
            if rows[host.member.row, t.INCARNATION] != host.member.incarnation:
                raise host.member.lost()
            if not _waited_for(rows, due):
                break
            root = _root(rows, host.live(rows), due)
            if root == host.member.slot:
                self._exchange(due)
                return
            if not host.wait():
                host.member.check()
                host.reap([root])
        self._inner.restart()
        self._group.count(self._samples, 0, contributions=0)
        self._samples = 0

    def _exchange(self, due: int) -> None:
        """As root: move the host's model and the shared model towards each other."""
        if self._elastic is None:
            own = ArrayParameters(self._inner.mover.fetched, "hsgd")
            self._elastic = Elastic(self._group, self._alpha, own)
            _log.info("training %r: worker %d is root of its host", self._host.name, self._host.member.slot)
        elastic, model = self._elastic, self._inner.mover.fetched
        elastic.finish()
        if self._taken is None:  # otherwise the last call failed half-way, and this call repeats it
            try:
                elastic.take()
            except RefusedContributionError as error:
                self._refused = error
                # In one assignment: if the read fails, the base is unchanged.
                model[...] = self._group.weights.read(wire="exact")
                self._taken = False
            else:
                elastic.pay()
                self._taken = True
        failpoint("hsgd-taken")
        self._tell_host(due)
        failpoint("hsgd-base-shared")
        self._send_taken(elastic)
        self._inner.restart()

    def _send_taken(self, elastic: Elastic) -> None:
        """Send the difference once the host's new model is written. Does nothing before."""
        if not self._base_is_shared:
            return
        if self._taken:
            elastic.send(self._samples)
            failpoint("hsgd-sent")
        self._base_is_shared, self._taken = False, None
        self._samples = 0

    def _tell_host(self, due: int) -> None:
        """Write the base as the host's model, and wake the others. Raises MembershipLostError if this worker may not
        write it.

        Errors after the write are logged: the lock ends with its ttl, and the others look again by themselves.
        """
        host = self._host
        try:
            with host.weights.lock(ttl=host.lease, timeout=2 * host.lease) as fence:
                rows = host.table.read()
                ours = rows[host.member.row, t.INCARNATION] == host.member.incarnation
                if not ours or not _waited_for(rows, due):
                    raise host.member.lost()
                host.weights.write(self._inner.mover.fetched, fence=fence, wire="exact")
                failpoint("hsgd-written")
                host.table.swap(0, _MET, int(rows[0, _MET]), due)
                self._base_is_shared = True
            host.wake()
        except Error as error:
            if self._base_is_shared:
                _log.warning("training %r: after the host's model was written: %s", host.name, error)
            elif isinstance(error, LockLostError):
                raise host.member.lost() from error
            else:
                raise

    def _revive(self) -> None:
        """Let a host without live workers start from the shared model. Its own model may be as old as the host, whether
        or not it ever closed a round. The oldest of the workers that come back does this.
        """
        host = self._host
        if host.made:
            return
        host.reap(host.live(host.table.read()))
        rows = host.table.read()
        oldest = min(int(rows[1 + slot, t.INCARNATION]) for slot in {*host.live(rows), host.member.slot})
        if oldest == host.member.incarnation:
            # Otherwise a round that a dead closer left half-closed would replace the weights written here.
            host.read_by(lambda _: None)
            shared = self._group.weights.read(wire="exact")
            with host.weights.lock(ttl=host.lease, timeout=2 * host.lease) as fence:
                host.weights.write(shared, fence=fence, wire="exact")


def host_name() -> str:
    """Return the name of this process's host: $SMB_TRAIN_HOST or the machine's, as a part of a buffer's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text_of("client.train_host") or socket.gethostname())


def _waited_for(rows: t.Rows, due: int) -> bool:
    """Return True if this round is open and the host has not been exchanged with the shared model
    since the last round.
    """
    return int(rows[0, t.ROUND]) >> t.ROUND_SHIFT == due and int(rows[0, _MET]) < due


def _root(rows: t.Rows, live: list[int], due: int) -> int:
    """Return the slot of the oldest member that waits before this round. A member that joined during the round does not
    wait.
    """
    waiting = [slot for slot in live if t.clock_of(rows[1 + slot, t.MARK]) == due]
    return min(waiting, key=lambda slot: int(rows[1 + slot, t.INCARNATION]))


def _placement(client: Client, name: str) -> dict[str, list[str]]:
    """Return the placement of the host's group: the servers of this host. Empty if the group exists, or no server is on
    this host.
    """
    try:
        client.open(name)
        return {}
    except NotFoundError:
        here = _servers_here(client, name)
        return {"servers": here} if here else {}


def _servers_here(client: Client, name: str) -> list[str]:
    """Return the memory servers whose memory this process can map."""
    names = [server.name for server in client.servers() if server.may_live]
    here = []
    for server in sorted(names, key=lambda each: each != socket.gethostname())[:_PROBED_MAX]:
        probe = f"{name}/probe/{secrets.token_hex(8)}"
        try:
            buffer = client.create(probe, 1, "int64", servers=[server])
            here += [server] if buffer.transports == ("shm",) else []
        except Error as error:
            _log.debug("memory server %s: %s", server, error)
        finally:
            with contextlib.suppress(Error):  # failures of the probe must not end the join
                client.delete(probe, missing_ok=True)
    return here
