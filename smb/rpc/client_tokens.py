"""The client's tokens: those given for each segment when a buffer was opened, the links on which each was shown, and
their renewal.

A token is for one session and one segment, for reading or writing, for a limited time (docs/protocol.md). Its secret
comes from the coordinator over TLS. On a link the secret is proved, never sent. Without credentials there are no
tokens, and this module does nothing. Threads: any; `_lock` guards the books and is never held while a server is asked.
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
_RENEW_AT = 0.5  # of the token's life, so the coordinator may be unreachable for the other half
_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 1.0
_SHOW_MS = 3000
_CONTROL_LANE = 0xFFFF  # the lane number in proofs on the control plane: csrc/channel/access.h

_log = logging.getLogger("smb")


@dataclass(slots=True)
class _Opened:
    name: str  # the last known name; buffers may be renamed
    renew_at: float
    segments: list[int] = field(default_factory=list)
    backoff: Backoff = field(default_factory=lambda: Backoff(_RETRY_FIRST_S, _RETRY_MAX_S))


class ClientTokens:
    def __init__(self, open_again: Callable[[pb.Kind, str, int], pb.Buffer]) -> None:
        """`open_again` asks the coordinator for a buffer by its id, whatever its name is now, and for a lock or barrier
        by its name.
        """
        self._open_again = open_again
        self.look_every_s = float("inf")
        self._followers: list[weakref.WeakMethod[Callable[[int], None]]] = []
        self._lock = threading.Lock()
        self._tokens: dict[int, Token] = {}
        self._opened: dict[tuple[pb.Kind, int], _Opened] = {}  # by id, since a name may pass to another buffer
        self._shown: weakref.WeakKeyDictionary[Link, dict[int, Token]] = weakref.WeakKeyDictionary()

    def learn(self, buffer: pb.Buffer) -> None:
        """Store the tokens that came with a buffer.

        They are due for renewal when the former ones were, because links that were not shown the new ones still depend
        on the former ones.
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
                if known is None or known.epoch <= epoch:  # answers may arrive out of order
                    self._tokens[segment.id] = Token(
                        segment.id, epoch, token.rights, token.generation, token.expires_at_ms, token.secret
                    )

    def read_only(self, segment_id: int) -> bool:
        """Whether the coordinator gave us only the right to read the segment."""
        token = self._tokens.get(segment_id)
        return token is not None and not token.rights & RIGHT_WRITE

    def follow(self, call: Callable[[int], None]) -> None:
        """Have a method called for each segment whose token was renewed or has ended. The method may block."""
        self._followers.append(weakref.WeakMethod(call))

    def proof(self, segment_id: int, session_id: int, certificate: bytes) -> pb.TokenProof | None:
        """Return the proof that the session has the segment's token, for a memory server's control service; None
        without a token.

        The proof travels over TLS. It is valid as long as the token, and only with our own certificate.
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
        """Whether the link has been shown the segment's current token already."""
        with self._lock:
            token = self._tokens.get(segment_id)
            return token is None or self._shown.get(link, {}).get(segment_id) is token

    def show(self, link: Link, segment_id: int, timeout_ms: int) -> None:
        """Prove the segment's token on a link, unless it was done. Raises EngineError."""
        with self._lock:
            token = self._tokens.get(segment_id)
            shown = self._shown.setdefault(link, {})
        if token is None or shown.get(segment_id) is token:
            return
        link.authorize(token, timeout_ms)
        shown[segment_id] = token

    def keep(self, link: Link, segment_id: int) -> None:
        """Have a link prove the segment's token, if there is one, from its next connection on. Raises EngineError."""
        with self._lock:
            token = self._tokens.get(segment_id)
            shown = self._shown.setdefault(link, {})
        if token is None:
            return
        link.keep_token(token)
        shown[segment_id] = token

    def next_s(self) -> float:
        """Seconds until the next look for tokens that are due."""
        with self._lock:
            soonest = min((opened.renew_at for opened in self._opened.values()), default=float("inf"))
        return min(max(0.0, soonest - time.monotonic()), self.look_every_s)

    def renew(self) -> None:
        """Renew the tokens that are due, and prove them on the links that were shown the former ones. Tokens of deleted
        buffers are forgotten. An unreachable coordinator is asked again soon, since the former tokens still hold.
        """
        now = time.monotonic()
        with self._lock:
            due = [(key, opened) for key, opened in self._opened.items() if opened.renew_at <= now]
        for (kind, number), opened in due:
            try:
                opened.renew_at = float("inf")  # so that the time of the new tokens counts
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
                    self.keep(link, segment_id)  # proving it now would make a connection that may not be needed
                    if link.connected():  # meanwhile, and perhaps with the former token
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
