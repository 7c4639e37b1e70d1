"""Bounds of all texts, lists and maps in requests on the control plane, including fields that are added later.

They are checked before any other code looks at a request, so that no part of a refused request reaches a log, a record
or a rule. gRPC's bound of a whole message (smb/daemon/process.py) comes first. Pure, except for the interceptor of
threaded servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from smb.config.limits import FILE_ATTRIBUTES_BYTES_MAX
from smb.errors import InvalidArgumentError
from smb.rpc import metadata

CHARACTERS_MAX = 255  # of a text
BYTES_MAX = 255  # of a secret, a proof or an RDMA address
ITEMS_MAX = 256  # of a list or a map

# Fields that need larger bounds, with the source of each number.
_MORE: Mapping[str, int] = {
    "smb.v1.CreateBufferRequest.packed_metadata": metadata.PACKED_BYTES_MAX,
    "smb.v1.RenameBufferRequest.file_attributes": FILE_ATTRIBUTES_BYTES_MAX,
    "smb.v1.RenameBufferRequest.attributes_before": FILE_ATTRIBUTES_BYTES_MAX,
    "smb.v1.CreateBufferRequest.server_names": 1024,  # the number of servers that a buffer can have
    "smb.v1.RenewServerRequest.broken": 4096,
    "smb.v1.RegisterServerRequest.segment_ids": 131_072,  # twice the mappings that Linux gives a process
    "smb.v1.RegisterServerRequest.segment_epochs": 131_072,
    "smb.v1.RegisterServerRequest.segment_flags": 131_072,
    "smb.v1.InventoryRequest.ids": 131_072,
    "smb.v1.TakeRolesRequest.quarantine_segment_ids": 131_072,
    "smb.v1.TakeRolesRequest.taken_up_segment_ids": 131_072,
    "smb.v1.EndSessionsRequest.session_ids": 65_536,  # the number of ended sessions that the coordinator remembers
}


def check_bounds(request: Message) -> None:
    """Raise InvalidArgumentError, with the field and its bound, if any field of a request is beyond its bound.

    Fields that this release does not know have no bound; they are dropped from the request, also in messages within it.
    """
    request.DiscardUnknownFields()
    _check(request, request.DESCRIPTOR.name.removesuffix("Request"))


def _check(message: Message, where: str) -> None:
    for field, value in message.ListFields():
        at = f"{where}: {field.name}"
        if isinstance(value, str):
            _count(at, len(value), _MORE.get(field.full_name, CHARACTERS_MAX), "characters")
        elif isinstance(value, bytes):
            _count(at, len(value), _MORE.get(field.full_name, BYTES_MAX), "bytes")
        elif isinstance(value, Message):
            _check(value, at)
        elif not isinstance(value, (int, float)):
            _count(at, len(value), _MORE.get(field.full_name, ITEMS_MAX), "items")
            _check_items(value, at)


def _check_items(items: Any, at: str) -> None:
    if hasattr(items, "items"):
        found = [each for pair in items.items() for each in pair]
    elif isinstance(items[0], int):  # ids, which may be very many, so their values are not visited
        return
    else:
        found = items
    for each in found:
        if isinstance(each, str):
            _count(f"an item of {at}", len(each), CHARACTERS_MAX, "characters")
        elif isinstance(each, bytes):
            _count(f"an item of {at}", len(each), BYTES_MAX, "bytes")
        elif isinstance(each, Message):
            _check(each, at)


def _count(what: str, found: int, most: int, of: str) -> None:
    if found > most:
        raise InvalidArgumentError(f"{what} has {found} {of}; it may have at most {most}")


class Bounds(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Checks requests before each call of a threaded server."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler behind the check. An unknown method has no handler, and gRPC refuses it."""
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler

        def ask(request: Message, context: grpc.ServicerContext) -> Any:
            try:
                check_bounds(request)
            except InvalidArgumentError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return cast("Callable[..., Any]", handler.unary_unary)(request, context)

        return grpc.unary_unary_rpc_method_handler(
            ask, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
