"""Secrets of the data plane: sessions' secrets, the keys that memory servers share with the coordinator, and the tokens
made with these keys. All of them derive from one root, which is in the store and never leaves the coordinator.

A session's secret proves, when the session is renewed, closed or opens a buffer, that the caller is the client that
opened the session. Each server has its own keys, so that no server can make tokens for another one. A key changes with
each generation (a day), and servers have three: tokens of the last generation are valid until they expire, and the next
key is known in time.
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

LIFETIME_S = 3600.0  # clients renew at half of it, so the coordinator may be unreachable for the other half
LIFETIME_S_MIN, LIFETIME_S_MAX = 1.0, 43_200.0
GENERATION_S = 86_400  # must be more than two lifetimes
_KEY = "access/root"
_BYTES = 32


class TokenIssuer:
    def __init__(self, root: bytes, lifetime_s: float = LIFETIME_S, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970. Raises InvalidArgumentError."""
        if not LIFETIME_S_MIN <= lifetime_s <= LIFETIME_S_MAX:
            raise InvalidArgumentError(
                f"--token-lifetime must be from {LIFETIME_S_MIN:g} to {LIFETIME_S_MAX:g} seconds, not {lifetime_s:g}"
            )
        self._root = root
        self.lifetime_ms = round(lifetime_s * 1000)
        self._clock = clock

    @staticmethod
    async def open(store: Store, lifetime_s: float = LIFETIME_S) -> TokenIssuer:
        """Read the root secret from the store, or make one."""
        text = (await store.load()).get(_KEY)
        if text is None:
            text = secrets.token_hex(_BYTES)
            await store.change({_KEY: text})
        return TokenIssuer(bytes.fromhex(text), lifetime_s)

    def session_secret(self, session_id: int) -> bytes:
        """Return the secret with which the session's client proves itself."""
        return self._derive(b"smb session", struct.pack("<Q", session_id))

    def check_session(self, session_id: int, secret: bytes) -> None:
        """Raise PermissionDeniedError unless the secret belongs to that session."""
        if not hmac.compare_digest(self.session_secret(session_id), secret):
            raise PermissionDeniedError(
                "this session belongs to another client: the secret does not match; connect again for a new session"
            )

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
        """Add a token for the session to each segment of the buffer."""
        now_ms = self._now_ms()
        generation = self._generation(now_ms)
        rights = RIGHT_READ | (RIGHT_WRITE if may_write else 0)
        expires_ms = now_ms + self.lifetime_ms
        for segment in buffer.layout.segments:
            text = struct.pack(  # the same bytes as in csrc/channel/access.c
                "<16sQQIIQQ",
                b"smb token 1",
                session_id,
                segment.id,
                segment.epoch or buffer.layout.epoch,  # the epoch of the roles if the segment has any
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
