"""The buffers that a memory server's relay may reach, in a cluster with credentials: from the state alone.

A relay shows its server's certificate. Of a server that has no mirrors that opens nothing. Of one that has it opens
what these are made from, for reading: their source, the source's other mirrors, and the words that say what has arrived
there. For writing it opens its own mirrors, and their words, which it also makes. Nothing else, by any name.
"""

from __future__ import annotations

from collections.abc import Iterator

from smb.coordinator.records import BufferRecord
from smb.coordinator.state import ARRIVED, State
from smb.errors import PermissionDeniedError
from smb.rpc import control_pb2 as pb

_WORDS_SHAPE, _WORDS_DTYPE = (18,), "int64"  # smb/relay/arrived.py


def check_open(state: State, server: str, name: str) -> bool:
    """Return whether that server's relay may also write to a buffer. Raises PermissionDeniedError if it may not even
    read it, whether there is one of that name or not."""
    base, own = name.removesuffix(ARRIVED), tuple(_mirrors_on(state, server))
    if any(base == mirror.name for mirror, _ in own):
        return True
    if any(name == source.name or any(base == each.name for each in state.mirrors(source)) for _, source in own):
        return False
    raise _refusal(server, f'open "{name}"')


def check_create(state: State, server: str, request: pb.CreateBufferRequest) -> None:
    """Raise PermissionDeniedError unless it is to make the words beside one of its mirrors, on itself."""
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
    """Raise PermissionDeniedError unless these are words on itself, whose mirror was deleted when they were made. It
    could ruin them anyway: they lie there."""
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
    """Yield each mirror on that server, and its source."""
    for record in state.buffers.values():
        if record.mirror_of and record.ready and record.segments[0].server == server:
            source = state.source(record)
            if source is not None:
                yield record, source


def _refusal(server: str, what: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f'memory server "{server}" may not {what}: it opens its own mirrors, their source and its other mirrors, and '
        f"nothing else"
    )
