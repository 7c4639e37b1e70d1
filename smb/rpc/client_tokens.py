"""The client's tokens: what it was given for each segment when it opened a buffer, on which links it has shown it, and
their renewal.

A token is for one session, one segment, reading or writing, for a while (docs/protocol.md). Its secret comes from the
coordinator over TLS; on a link it is proved, never sent. Without credentials there are none, and nothing here has
anything to do. Threads: any; `_lock` guards the books and is never held while a server is asked.
"""

from __future__ import annotations

import hmac
import logging
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from smb.config.backoff import Backoff
from smb.engine import EngineError, Link, Token
from smb.errors import Error, NotFoundError, PermissionDeniedError
from smb.rpc import control_pb2 as pb
from smb.security.bond import bond_of_caller

RIGHT_READ, RIGHT_WRITE = 1, 2
_RENEW_AT = 0.5  # of its life: as long may the coordinator be away
_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 1.0
_SHOW_MS = 3000
_CONTROL_LANE = 0xFFFF  # of proofs on the control plane: csrc/base/access.h

_log = logging.getLogger("smb")


@dataclass(slots=True)
class _Opened:
    name: str  # as last heard: buffers are renamed
    renew_at: float
    segments: list[int] = field(default_factory=list)
    backoff: Backoff = field(default_factory=lambda: Backoff(_RETRY_FIRST_S, _RETRY_MAX_S))


class ClientTokens:
    def __init__(self, open_again: Callable[[pb.Kind, str, int], pb.Buffer]) -> None:
        """`open_again` asks the coordinator for a buffer by its id, whatever its name is now; for a lock or barrier by
        name.
        """
        self._open_again = open_again
        self.look_every_s = float("inf")
        self._followers: list[weakref.WeakMethod[Callable[[int], None]]] = []
        self._lock = threading.Lock()
        self._tokens: dict[int, Token] = {}
        self._opened: dict[tuple[pb.Kind, int], _Opened] = {}  # by id: one name may be of several in turn
        self._shown: weakref.WeakKeyDictionary[Link, dict[int, Token]] = weakref.WeakKeyDictionary()

    def learn(self, buffer: pb.Buffer) -> None:
        """Take note of the tokens that came with a buffer.

        They are due when the ones before them were: links that nobody shows the newer ones still live by those.
        """
        given = [segment for segment in buffer.layout.segments if segment.HasField("token")]
        if not given:
            return
        life_s = min(segment.token.lifetime_ms for segment in given) / 1000
        renew_at = time.monotonic() + _RENEW_AT * life_s
        with self._lock:
            before = self._opened.get((buffer.kind, buffer.id))
            renew_at = min(renew_at, before.renew_at) if before else renew_at
            self._opened[buffer.kind, buffer.id] = _Opened(buffer.name, renew_at, [segment.id for segment in given])
            for segment in given:
                token, epoch = segment.token, segment.epoch or buffer.layout.epoch
                known = self._tokens.get(segment.id)
                if known is None or known.epoch <= epoch:  # answers may come in another order
                    self._tokens[segment.id] = Token(
                        segment.id, epoch, token.rights, token.generation, token.expires_at_ms, token.secret
                    )

    def read_only(self, segment_id: int) -> bool:
        """Whether the coordinator refused us the right to write there."""
        token = self._tokens.get(segment_id)
        return token is not None and not token.rights & RIGHT_WRITE

    def follow(self, call: Callable[[int], None]) -> None:
        """Have a method called with each segment whose token was renewed, or is none any more; it may block."""
        self._followers.append(weakref.WeakMethod(call))

    def proof(self, segment_id: int, session_id: int, certificate: bytes) -> pb.TokenProof | None:
        """Return what shows a memory server's control service that the session has the segment's token; None: it has
        none.

        It goes there over TLS, and is good for as long as the token, with the certificate that is shown there, ours.
        """
        with self._lock:
            token = self._tokens.get(segment_id)
        if token is None:
            return None
        text = struct.pack("<16sQQQQ", b"smb proof 2", 0, 0, session_id, _CONTROL_LANE) + bond_of_caller(certificate)
        return pb.TokenProof(
            segment_id=segment_id,
            epoch=token.epoch,
            rights=token.rights,
            generation=token.generation,
            expires_at_ms=token.expires_at_ms,
            proof=hmac.digest(token.secret, text, "sha256"),
        )

    def shows(self, link: Link, segment_id: int) -> bool:
        """Whether `show` has nothing to do."""
        with self._lock:
            token = self._tokens.get(segment_id)
            return token is None or self._shown.get(link, {}).get(segment_id) is token

    def show(self, link: Link, segment_id: int, timeout_ms: int) -> None:
        """Have a link's server let us use a segment, if that takes a token that it has not seen. EngineError."""
        with self._lock:
            token = self._tokens.get(segment_id)
            shown = self._shown.setdefault(link, {})
        if token is None or shown.get(segment_id) is token:
            return
        link.authorize(token, timeout_ms)
        shown[segment_id] = token

    def keep(self, link: Link, segment_id: int) -> None:
        """Have a link show the segment's token, if there is one, from its next connection on. EngineError."""
        with self._lock:
            token = self._tokens.get(segment_id)
            shown = self._shown.setdefault(link, {})
        if token is None:
            return
        link.keep_token(token)
        shown[segment_id] = token

    def next_s(self) -> float:
        """Seconds until it should be looked at whether a token is due."""
        with self._lock:
            soonest = min((opened.renew_at for opened in self._opened.values()), default=float("inf"))
        return min(max(0.0, soonest - time.monotonic()), self.look_every_s)

    def renew(self) -> None:
        """Renew what is due, and show it on the links that the old ones were shown on. Of what is gone nothing is kept.
        A coordinator that is away is asked again soon: the old ones are good for as long as they are.
        """
        now = time.monotonic()
        with self._lock:
            due = [(key, opened) for key, opened in self._opened.items() if opened.renew_at <= now]
        for (kind, number), opened in due:
            try:
                opened.renew_at = float("inf")  # what is given for it now counts from now
                buffer = self._open_again(kind, opened.name, number)
            except (NotFoundError, PermissionDeniedError) as error:
                _log.debug("no token for %s any more: %s", opened.name, error)
                self._forget((kind, number))
                continue
            except Error as error:
                _log.debug("the token for %s was not renewed: %s", opened.name, error)
                opened.renew_at = time.monotonic() + opened.backoff.next_s()
                continue
            if buffer.id != number or not any(s.HasField("token") for s in buffer.layout.segments):
                self._forget((kind, number))
                continue
            for segment_id in opened.segments:
                self._show_again(segment_id)

    def _show_again(self, segment_id: int) -> None:
        with self._lock:
            links = [link for link, shown in self._shown.items() if segment_id in shown]
        for link in links:
            try:
                if link.alive() and not link.connected():
                    self.keep(link, segment_id)  # to show it would make a connection, which nobody may need
                    if link.connected():  # since then, and perhaps with the old one
                        self._shown[link].pop(segment_id, None)
                if link.connected():
                    self.show(link, segment_id, _SHOW_MS)
            except EngineError as error:
                _log.debug("a renewed token was not shown: %s", error)
        self._tell(segment_id)

    def _tell(self, segment_id: int) -> None:
        for follower in self._followers:
            call = follower()
            if call is not None:
                call(segment_id)

    def _forget(self, key: tuple[pb.Kind, int]) -> None:
        with self._lock:
            gone = self._opened.pop(key).segments
            for segment_id in gone:
                self._tokens.pop(segment_id, None)
                for shown in self._shown.values():
                    shown.pop(segment_id, None)
        for segment_id in gone:
            self._tell(segment_id)
