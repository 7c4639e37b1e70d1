"""Secrets of the data plane: of sessions, of the keys that memory servers share with us, and of the tokens that we make
with these. All of them follow from one, which lies in the store and is shown to nobody.

A session's secret proves, when it is renewed, closed, or opens a buffer, that it is the client's that it was given to.
A server's key is its own, so that no server can make tokens for another; it changes with each generation (a day), and
servers have three: the tokens of the last generation are good until they expire, and the next one's are known in time.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import time
from collections.abc import Callable

from smb.coordinator.store import Store
from smb.errors import InvalidArgumentError, PermissionDeniedError
from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import RIGHT_READ, RIGHT_WRITE

LIFETIME_S = 3600.0  # a client renews at half of it: for so long at least the coordinator may be away
LIFETIME_S_MIN, LIFETIME_S_MAX = 1.0, 43_200.0
GENERATION_S = 86_400  # more than two lifetimes
_KEY = "access/root"
_BYTES = 32


class TokenIssuer:
    def __init__(self, root: bytes, lifetime_s: float = LIFETIME_S, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970. Raises InvalidArgumentError."""
        if not LIFETIME_S_MIN <= lifetime_s <= LIFETIME_S_MAX:
            raise InvalidArgumentError(
                f"--token-lifetime {lifetime_s:g}: use {LIFETIME_S_MIN:g} to {LIFETIME_S_MAX:g} seconds"
            )
        self._root = root
        self.lifetime_ms = round(lifetime_s * 1000)
        self._clock = clock

    @staticmethod
    async def open(store: Store, lifetime_s: float = LIFETIME_S) -> TokenIssuer:
        """Read the root from the store, or make one."""
        text = (await store.load()).get(_KEY)
        if text is None:
            text = secrets.token_hex(_BYTES)
            await store.change({_KEY: text})
        return TokenIssuer(bytes.fromhex(text), lifetime_s)

    def session_secret(self, session_id: int) -> bytes:
        """Return what the session's client proves itself with."""
        return self._derive(b"smb session", struct.pack("<Q", session_id))

    def check_session(self, session_id: int, secret: bytes) -> None:
        """Raise PermissionDeniedError unless the secret is that session's."""
        if not hmac.compare_digest(self.session_secret(session_id), secret):
            raise PermissionDeniedError("this session is another client's: it was opened with another secret")

    def keys(self, server: str) -> pb.AccessKeys:
        """Return the keys for a memory server that registers or renews."""
        now_ms = self._now_ms()
        generation = self._generation(now_ms)
        return pb.AccessKeys(
            now_ms=now_ms,
            keys=[
                pb.AccessKey(generation=each, key=self._server_key(server, each))
                for each in (generation - 1, generation, generation + 1)
            ],
        )

    def add_to(self, buffer: pb.Buffer, session_id: int, *, may_write: bool) -> None:
        """Put a token for the session with every segment of the buffer."""
        now_ms = self._now_ms()
        generation = self._generation(now_ms)
        rights = RIGHT_READ | (RIGHT_WRITE if may_write else 0)
        expires_ms = now_ms + self.lifetime_ms
        for segment in buffer.layout.segments:
            text = struct.pack(  # as csrc/base/access.c makes it
                "<16sQQIIQQ",
                b"smb token 1",
                session_id,
                segment.id,
                segment.epoch or buffer.layout.epoch,  # of two copies: of their roles
                rights,
                generation,
                expires_ms,
            )
            segment.token.CopyFrom(
                pb.Token(
                    rights=rights,
                    generation=generation,
                    expires_at_ms=expires_ms,
                    lifetime_ms=self.lifetime_ms,
                    secret=hmac.digest(self._server_key(segment.server, generation), text, "sha256"),
                )
            )

    def _server_key(self, server: str, generation: int) -> bytes:
        return self._derive(b"smb server key", struct.pack("<I", generation) + server.encode())

    def _derive(self, label: bytes, text: bytes) -> bytes:
        return hmac.digest(self._root, struct.pack("<16s", label) + text, "sha256")

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _generation(self, now_ms: int) -> int:
        return now_ms // (GENERATION_S * 1000)
