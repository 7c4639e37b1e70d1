"""Which buffers a memory server's relay may reach in a cluster with credentials. Pure: it reads the state alone.

A relay shows the certificate of its server. On a server without mirrors, the certificate opens no buffer. On a server
with mirrors, the relay may read what the mirrors are made from: the source buffer, the source's other mirrors, and the
`.arrived` buffers beside these, which say what has arrived. It may write to its own mirrors and to their `.arrived`
buffers, which it also creates. No other buffer is open to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from smb.coordinator.records import BufferRecord
from smb.coordinator.state import ARRIVED, State
from smb.errors import PermissionDeniedError
from smb.rpc import control_pb2 as pb

_WORDS_SHAPE, _WORDS_DTYPE = (18,), "int64"  # smb/relay/arrived.py


def check_open(state: State, server: str, name: str) -> bool:
    """Return whether that server's relay may also write to the buffer. Raises PermissionDeniedError if the relay may
    not even read it, whether or not a buffer of that name exists."""
    base, own = name.removesuffix(ARRIVED), tuple(_mirrors_on(state, server))
    if any(base == mirror.name for mirror, _ in own):
        return True
    if any(name == source.name or any(base == each.name for each in state.mirrors(source)) for _, source in own):
        return False
    raise _refusal(server, f'open "{name}"')


def check_create(state: State, server: str, request: pb.CreateBufferRequest) -> None:
    """Raise PermissionDeniedError unless the request makes the `.arrived` buffer of one of its mirrors, on itself."""
    beside = any(request.name == mirror.name + ARRIVED for mirror, _ in _mirrors_on(state, server))
    words = pb.CreateBufferRequest(
        name=request.name, shape=_WORDS_SHAPE, dtype=_WORDS_DTYPE, server_names=[server], exist_ok=True, versions=1,
        replicas=1,
    )  # fmt: skip
    given = pb.CreateBufferRequest()
    given.CopyFrom(request)
    given.ClearField("attempt_id")
    if not beside or given != words:
        raise _refusal(server, f'create "{request.name}"')


def check_delete(state: State, server: str, name: str) -> None:
    """Raise PermissionDeniedError unless the name is an `.arrived` buffer on this server whose mirror was deleted while
    the buffer was made. The server could destroy that buffer anyway, since its memory is there."""
    words = state.buffers.get(name)
    if (
        words is None
        or not name.endswith(ARRIVED)
        or name.removesuffix(ARRIVED) in state.buffers
        or (words.shape, words.dtype) != (_WORDS_SHAPE, _WORDS_DTYPE)
        or [segment.server for segment in words.segments] != [server]
    ):
        raise _refusal(server, f'delete "{name}"')


def _mirrors_on(state: State, server: str) -> Iterator[tuple[BufferRecord, BufferRecord]]:
    """Yield each mirror on that server, with its source."""
    for record in state.buffers.at(server):
        if record.mirror_of and record.ready and record.segments[0].server == server:
            source = state.source(record)
            if source is not None:
                yield record, source


def _refusal(server: str, what: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f'memory server "{server}" may not {what}: a relay may open only the mirrors on its server, their source and '
        f"the source's other mirrors"
    )
