"""Elects one of several coordinators: the leader is the one whose key is in etcd, under a lease that it keeps alive.

Invariant: a change is made only while the leader's key is the one that this coordinator made; the transaction itself
compares it. A leader counts its lease from before it asked for the lease, so it stops answering before etcd lets
another one lead.

A transaction without an answer is sent again, and the first one may arrive after the second. So there is
one more key in etcd, PREFIX/head, whose value counts the changes. Each transaction that puts something compares this
value with the last known one, and sets the next one: only one of two equal transactions succeeds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from smb.config.backoff import Backoff
from smb.config.untrusted import parse_json
from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.etcd.connection import Etcd, EtcdLocation, RefusedError, SilentError
from smb.coordinator.outside import Outside
from smb.coordinator.store import DeposedError, StoreError, StoreFullError

_KEEPS_PER_LEASE = 4
_ASK_S = 5.0
_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.1, 1.0  # pauses after a renewal that failed, as it may have at once
_HEAD_FORMAT = "1"
_LEADER_PARTS_MAX = 16  # brackets and commas in the value of the leader's key

_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader: its address, and the revision at which its term began."""

    address: str
    term: int


def _leader_key(location: EtcdLocation) -> bytes:
    return f"{location.prefix}/leader".encode()


def _head_key(location: EtcdLocation) -> bytes:
    return f"{location.prefix}/head".encode()


async def leader_of(etcd: Etcd, location: EtcdLocation, timeout_s: float = _ASK_S) -> Leader | None:
    """Return the current leader; None if there is none. Raises SilentError, RefusedError."""
    found = await etcd.range(pb.RangeRequest(key=_leader_key(location)), timeout_s)
    for each in found.kvs:
        try:
            address = str(parse_json(each.value, _LEADER_PARTS_MAX)["address"])
        except (ValueError, TypeError, KeyError):
            address = "?"
        return Leader(address, each.create_revision)
    return None


async def campaign(
    etcd: Etcd, location: EtcdLocation, address: str, lease_s: int, outside: Outside | None = None
) -> Lead | None:
    """Try once to become the leader. Returns the lead; None if another coordinator leads. `outside`: None for this
    host's clocks. Raises SilentError, RefusedError, and StoreError if the records are of another format version.
    """
    outside = outside or Outside()
    asked_at = outside.boot_s()
    granted = await etcd.grant(lease_s, _ASK_S)
    # The random id lets us recognize our own key if the first answer was lost.
    value = json.dumps({"address": address, "id": f"{outside.new_id():016x}"}).encode()
    key = _leader_key(location)
    look = [_get(key), _get(_head_key(location))]
    request = pb.TxnRequest(
        compare=[pb.Compare(target=pb.Compare.CREATE, key=key, create_revision=0)],
        success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=granted.ID)), *look],
        failure=look,
    )
    reply, _ = await etcd.transact(request, _ASK_S)
    leader, head = (response.response_range.kvs for response in reply.responses[-2:])
    if not leader or leader[0].value != value:
        await etcd.revoke(granted.ID, _ASK_S)
        return None
    known = head[0].value if head else b""
    if known and known.split()[0].decode(errors="replace") != _HEAD_FORMAT:
        await etcd.revoke(granted.ID, _ASK_S)
        raise StoreError(
            f"{location} has another format version than {_HEAD_FORMAT}, which this coordinator uses; start the "
            f"release that wrote it, or give another prefix"
        )
    return Lead(etcd, location, granted.ID, float(granted.TTL), leader[0].create_revision, known, asked_at, outside)


def _get(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


class Lead:
    """The lead of one coordinator, until it is lost. Run `keep` meanwhile, and call `close` at the end."""

    def __init__(
        self,
        etcd: Etcd,
        location: EtcdLocation,
        lease_id: int,
        lease_s: float,
        term: int,
        head: bytes,
        asked_at: float,
        outside: Outside,
    ) -> None:
        self._now, self._draw = outside.boot_s, outside.draw
        self._etcd = etcd
        self._location = location
        self._lease_id = lease_id
        self._lease_s = lease_s
        self.term = term
        self._head = head
        self._count = 0
        self._kept_at = asked_at
        self._reason = ""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def holds(self) -> bool:
        """Whether no other coordinator can lead now."""
        return not self._reason and self._now() < self._kept_at + self._lease_s

    def lose(self, reason: str) -> None:
        """Stop leading at once."""
        if not self._reason:
            self._reason = reason
            if not self.lost.done():
                self.lost.set_result(reason)

    async def keep(self) -> None:
        """Keep the lease alive until it is lost or the task is cancelled. Either way the lead ends."""
        try:
            await self._keep()
        finally:
            self.lose("its lease is not renewed any more")

    async def _keep(self) -> None:
        backoff = self._pauses()
        while not self._reason:
            await asyncio.sleep(max(0.0, self._kept_at + self._lease_s / _KEEPS_PER_LEASE - self._now()))
            asked_at = self._now()
            left_s = self._kept_at + self._lease_s - asked_at
            try:
                lease_s = await self._etcd.keep_alive(self._lease_id, max(left_s, 0.01))
                if lease_s > 0:
                    self._kept_at, self._lease_s = asked_at, float(lease_s)
                    await self.check()
                    backoff = self._pauses()
                else:
                    self.lose("its lease ran out")
            except (SilentError, RefusedError, DeposedError) as error:
                if not self.holds:
                    self.lose(f"its lease could not be kept: {error}")
                else:
                    _log.warning("%s", error)
                    await asyncio.sleep(backoff.next_s())

    def _pauses(self) -> Backoff:
        return Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, lambda: self._kept_at + self._lease_s - self._now(), self._draw)

    async def check(self) -> None:
        """Raise DeposedError unless the leader's key is ours, and SilentError or RefusedError if that is unknown."""
        found = await leader_of(self._etcd, self._location)
        if found is None or found.term != self.term:
            self.lose(f"{found.address} leads" if found else "its key was removed from etcd")
            raise self._deposed()

    async def change(self, operations: Sequence[pb.RequestOp]) -> None:
        """Make all of these changes, or none. Only one call at a time is allowed.

        Raises StoreError if etcd refuses, and then nothing was changed. Raises DeposedError if this coordinator does
        not lead, or if the outcome is unknown.
        """
        if not self.holds:
            raise self._deposed()
        puts = any(operation.HasField("request_put") for operation in operations)
        head = self._head
        if puts:
            self._count += 1
            head = f"{_HEAD_FORMAT} {self.term} {self._count}".encode()
            moved = pb.RequestOp(request_put=pb.PutRequest(key=_head_key(self._location), value=head))
            operations = [*operations, moved]
        await self._transact(operations, head)
        self._head = head

    def _fenced(self, operations: Sequence[pb.RequestOp]) -> pb.TxnRequest:
        leader, head = _leader_key(self._location), _head_key(self._location)
        if self._head:
            same = pb.Compare(target=pb.Compare.VALUE, key=head, value=self._head)
        else:
            same = pb.Compare(target=pb.Compare.CREATE, key=head, create_revision=0)
        return pb.TxnRequest(
            compare=[pb.Compare(target=pb.Compare.CREATE, key=leader, create_revision=self.term), same],
            success=operations,
            failure=[_get(leader), _get(head)],
        )

    async def _transact(self, operations: Sequence[pb.RequestOp], head: bytes) -> None:
        """Send the transaction until it is answered. `head` is the head's value after it."""
        request, end = self._fenced(operations), self._now() + self._lease_s
        unanswered = False
        while True:
            try:
                reply, repeated = await self._etcd.transact(request, _ASK_S)
            except SilentError as error:
                unanswered = True
                if not self.holds or self._now() >= end:
                    self.lose(f"etcd does not answer: {error}")
                    raise self._deposed("unknown") from None
                continue
            except RefusedError as error:
                await self._refused(error, unanswered or error.repeated, operations, head)
                return
            if not reply.succeeded:
                leader, there = (response.response_range.kvs for response in reply.responses)
                ours = bool(leader) and leader[0].create_revision == self.term
                # The head was moved by our own earlier attempt, which was carried out though it had no answer.
                moved = head != self._head and bool(there) and there[0].value == head
                if not (ours and moved and (unanswered or repeated)):
                    self.lose("another coordinator leads")
                    raise self._deposed("unknown")
            return

    async def _refused(
        self, error: RefusedError, unanswered: bool, operations: Sequence[pb.RequestOp], head: bytes
    ) -> None:
        """Return normally if the transaction was carried out all the same: etcd may carry out a transaction that uses
        up its quota, and answer that it has no room. Raises StoreError if it was not carried out, and DeposedError if
        that is unknown.
        """
        try:
            done = error.full and await self._was_done(operations, head)
        except (SilentError, RefusedError):
            done, unanswered = False, True
        if done:
            return
        if unanswered:
            # An attempt may still arrive, and the refusal says nothing about it. The next leader reads the result.
            self.lose(f"the outcome of a change is unknown: {error}")
            raise self._deposed("unknown")
        if error.full:
            raise StoreFullError(
                f"cannot write: {error}; nothing was changed. Compact and defragment etcd, then disarm its alarm"
            )
        raise StoreError(f"cannot write: {error}; nothing was changed")

    async def _was_done(self, operations: Sequence[pb.RequestOp], head: bytes) -> bool:
        if head != self._head:
            found = await self._etcd.range(pb.RangeRequest(key=_head_key(self._location)), _ASK_S)
            return bool(found.kvs) and found.kvs[0].value == head
        first = operations[0].request_delete_range.key  # all operations were carried out, or none
        return not (await self._etcd.range(pb.RangeRequest(key=first), _ASK_S)).kvs

    async def close(self) -> None:
        """Let another coordinator lead at once, if this one still leads."""
        self.lose("it stops")
        try:
            await self._etcd.revoke(self._lease_id, 1.0)
        except (SilentError, RefusedError) as error:
            _log.info("another coordinator can lead once the lease runs out: %s", error)

    def _deposed(self, outcome: str = "not applied") -> DeposedError:
        reason = self._reason or "its lease ran out"
        return DeposedError(
            f"this coordinator does not lead any more ({reason}); ask the other coordinators",
            outcome="unknown" if outcome == "unknown" else "not applied",
        )
