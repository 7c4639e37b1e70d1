"""HSGD: the workers of a host take the mean of every step; one of them, its root, runs SEASGD for all."""

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
from smb.train import group as groups
from smb.train import member_table as t
from smb.train.bsp import BSP
from smb.train.elastic import ElasticExchange
from smb.train.exchange.elastic_force import Elastic, check_settings
from smb.train.guards import RefusedContributionError
from smb.train.parameters import ArrayParameters, Parameters
from smb.train.scheme import Exchange, Footprint, Scheme
from smb.train.traits import ELASTIC, Traits

if TYPE_CHECKING:
    from smb.client import Client
    from smb.train.group import Group

_MET = t.GROUP_EXTRA  # in the row of the host's group: the last round after which the host met the shared model
_PROBED_MAX = 16  # servers that are asked whether they are on this host; one of its name is asked first

_log = logging.getLogger("smb")


@dataclass(frozen=True)
class HSGD(Scheme):
    """Two levels: inside a host every local step is a round of BSP, and between hosts there is SEASGD.

    The host's model H moves by the mean of what the steps did. After every `every`-th (tau) round the host's root runs
    SEASGD on H, with W the shared model of all hosts:

        H += mean of (w_i - H);   d = alpha * (H - W);   H -= d;   W += d;   w_i = H

    (Ahn and others: ShmCaffe, 2018.) All workers of the host go on from H - d. The root sends W's half in the
    background while they compute; with T_host the round inside the host:

        iteration = max(T_compute, T_write + T_accumulate) + T_host + T_read + T_local

    H lives in a nested group, NAME/host/HOST, on the memory servers of that host, so that its rounds go through shared
    memory. If no server runs there, the coordinator chooses the place. Between hosts only the roots' 2n floats move.
    The host is the machine's name, or $SMB_TRAIN_HOST, for several hosts on one machine or containers that share one.

    The ranks of a mesh (smb.torch.join with mesh=; FSDP2 or DDP, by NCCL or gloo), which step together anyway, are a
    host by themselves: one member without a nested group, whose exchange is SEASGD's.

    The root is the member that has been in the round's group for longest. If it dies or leaves, the next member is root
    from the exchange on for which the others wait: after a death about a lease later. A dead root's contribution counts
    at most once for each element, and is not sent again. A root that was only stopped changes nothing afterwards,
    because its writes are fenced. If step() raises at a live root, since the servers of the shared model are away, its
    host waits until the root calls step() again or leaves. Workers that join a host wait for nobody. A host whose
    workers have all gone starts from the shared model when one comes back. If the guards refuse a difference (Guards,
    at the root), it is not sent, and the host starts again from the shared model. What one worker's step did is checked
    before it counts in the host's mean.

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
            raise InvalidArgumentError(f"scheme {self.NAME!r}: alpha=None; the number of hosts is not known, so say it")
        check_settings(self.NAME, self.alpha, self.every)

    def footprint(self) -> Footprint:
        """The shared model, and what BSP keeps in each host."""
        inside = BSP().footprint()
        return Footprint(1, worker=inside.worker, host=inside.group)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange. Joins the host's group, made first where there is none."""
        if parameters.in_ranks:
            return ElasticExchange(group, parameters, self.alpha, self.every, hidden=True)
        return HostExchange(group, parameters, self.alpha, self.every)


class HostExchange(Exchange):
    """One worker's side. Every step blocks for the round inside the host, every so many for the root's exchange."""

    def __init__(self, group: Group, parameters: Parameters, alpha: float, every: int) -> None:
        self._group = group
        self._alpha = alpha
        self._every = every
        self._elastic: Elastic | None = None  # once this worker is root
        self._samples = 0
        self._due: int | None = None  # the host's round, while what follows it is not done
        self._taken: bool | None = None  # the base is what the host's model is to be; True: and the difference is due
        self._base_is_shared = False  # the host's model is that base: the difference is to be sent
        self._refused: RefusedContributionError | None = None
        name = f"{group.name}/host/{host_name()}"
        placement = _placement(group.client, name)
        shared = np.empty(parameters.size, np.float32)
        group.read(shared)
        start = ArrayParameters(shared, f"join of training {name!r}")
        copies = group.weights.info.replicas
        self._host: Group = groups.enter(
            group.client, name, start, BSP(), group.guards, group.lease, lambda host: host, replicas=copies, **placement
        )
        group.nested = self._host
        try:
            self._revive()
            self._inner = BSP().run(self._host, parameters)
        except BaseException:
            self._host.leave()
            raise

    @property
    def root(self) -> bool:
        """Whether this worker has been its host's root."""
        return self._elastic is not None

    def step(self, samples: int) -> None:
        """The host's round; every so many rounds the exchange with the shared model, by the root for all."""
        if self._due is None:
            try:
                self._inner.step(samples)
            except RefusedContributionError as error:
                self._refused = error  # after the exchange: the others wait for it
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
        """Wait for what the root sent."""
        if self._elastic is not None:
            self._send_taken(self._elastic)
            self._elastic.finish()

    def close(self) -> None:
        """Leave the host's group too."""
        try:
            self.flush()
            self._inner.close()
        finally:
            self._host.leave()

    def abandon(self) -> None:
        """Leave the host's group, as far as we still are in it."""
        if self._elastic is not None:
            self._elastic.abandon()
        with contextlib.suppress(Error):
            self._inner.abandon()
            self._host.leave()

    # ---- the exchange

    def _meet(self, due: int) -> None:
        """Wait until the host has met the shared model after this round, or see to it; take over the host's model.

        Nobody contributes to the round before that, so it stays open, and the host's model is written by no one else.
        """
        host = self._host
        if self._elastic is not None:
            self._send_taken(self._elastic)  # the last call failed after the host's model was written
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
        """As root: draw the host's model and the shared one to each other."""
        if self._elastic is None:
            own = ArrayParameters(self._inner.mover.fetched, "hsgd")
            self._elastic = Elastic(self._group, self._alpha, own)
            _log.info("training %r: worker %d is root of its host", self._host.name, self._host.member.slot)
        elastic, model = self._elastic, self._inner.mover.fetched
        elastic.finish()
        if self._taken is None:  # else the last call failed in the middle, and this is its repetition
            try:
                elastic.take()
            except RefusedContributionError as error:
                self._refused = error
                model[...] = self._group.weights.read(wire="exact")  # at once: a read that fails leaves the base whole
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
        """Send the difference by which the host's model was drawn, once that is written. Else it does nothing."""
        if not self._base_is_shared:
            return
        if self._taken:
            elastic.send(self._samples)
            failpoint("hsgd-sent")
        self._base_is_shared, self._taken = False, None
        self._samples = 0

    def _tell_host(self, due: int) -> None:
        """Make the base the host's model, and wake the others. Raises MembershipLostError if it is another's.

        An error after that is logged: the lock ends with its ttl, and the others look again by themselves.
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
                _log.warning("training %r: after its host had the model: %s", host.name, error)
            elif isinstance(error, LockLostError):
                raise host.member.lost() from error
            else:
                raise

    def _revive(self) -> None:
        """A host in which nobody is left starts from the shared model, not from its own. That one may be as old as the
        host, whether it ever closed a round or not. The oldest of the workers that come back sees to it.
        """
        host = self._host
        if host.made:
            return
        host.reap(host.live(host.table.read()))
        rows = host.table.read()
        oldest = min(int(rows[1 + slot, t.INCARNATION]) for slot in {*host.live(rows), host.member.slot})
        if oldest == host.member.incarnation:
            host.read_by(lambda _: None)  # a round that a dead closer left half-closed would replace what we write
            shared = self._group.weights.read(wire="exact")
            with host.weights.lock(ttl=host.lease, timeout=2 * host.lease) as fence:
                host.weights.write(shared, fence=fence, wire="exact")


def host_name() -> str:
    """Return the name of this process's host: $SMB_TRAIN_HOST or the machine's, as a part of a buffer's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text_of("client.train_host") or socket.gethostname())


def _waited_for(rows: t.Rows, due: int) -> bool:
    """Whether the round is open, and the host has not met the shared model since the one before it was closed."""
    return int(rows[0, t.ROUND]) >> t.ROUND_SHIFT == due and int(rows[0, _MET]) < due


def _root(rows: t.Rows, live: list[int], due: int) -> int:
    """Return the slot of the oldest member that waits before this round; who joined during it does not wait."""
    waiting = [slot for slot in live if t.clock_of(rows[1 + slot, t.MARK]) == due]
    return min(waiting, key=lambda slot: int(rows[1 + slot, t.INCARNATION]))


def _placement(client: Client, name: str) -> dict[str, list[str]]:
    """Return the placement of the host's group: the servers of this host. Empty if it is there already, or no server
    is."""
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
            with contextlib.suppress(Error):  # the join is not about the probe
                client.delete(probe, missing_ok=True)
    return here
