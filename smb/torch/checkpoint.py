"""`torch.distributed.checkpoint` on buffers: a model and its optimizer, saved by some ranks and loaded by any others.
It uses what users import of smb, how smb.torch changes tensors into bytes, and limits.

    dcp.save(state, storage_writer=smb.torch.checkpoint.Writer(client, "run/ckpt"))
    dcp.load(state, storage_reader=smb.torch.checkpoint.Reader(client, "run/ckpt"))

A checkpoint NAME is two buffers of bytes. NAME.<save>.data has the pieces of the tensors as ranks have them, rank after
rank, each piece at a multiple of 64 bytes. NAME is the index: JSON (the tensors, and where their pieces lie), then the
values that are not tensors, each in torch's form that `weights_only` loads. The index is made as NAME.<save>.index, and
renamed in one step when all ranks have written everything. Until then NAME is the former checkpoint.

If two saves of one NAME overlap, the later one deletes, when it begins, what the earlier one has written. Beginning,
committing and deleting take turns by the lock NAME.saves, and a commit checks in its turn that its data exist. So the
earlier save fails, and the index never names data that are gone.

Nothing here unpickles bytes from a server. The index is JSON. Values that are not tensors pass torch's restricted
loader, and DCP's planner, which unpickles, gets bytes that this process has made anew.
"""

# torch prescribes the arguments of the methods below.
# ruff: noqa: ARG002

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import secrets
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from smb.config.limits import BYTES_MAX, CHECKPOINT_INDEX_BYTES_MAX, CHECKPOINT_INDEX_PARTS_MAX
from smb.config.parse import format_bytes
from smb.config.untrusted import count_parts, parse_json, quoted, shortened
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.tensors import ALIGNMENT_BYTES
from smb.torch.tensor_values import changing, check_dense, has_bits, plain

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client
    from smb.lock import Lock

METADATA = "smb.checkpoint"  # in an index's metadata: {"data": the other buffer's name, "json": bytes of JSON}
_FORMAT = 1
_PACK_BYTES = 8 << 20  # small tensors are sent together, up to this size per call
_CALLS_MAX = 4  # calls of one rank in flight at once
_SAVE = r"\.[0-9a-f]{16}\.(data|index)"
_OPENINGS_MAX = 10
_TURN_S = 10.0  # for how long a process that is killed during its turn blocks the next one

_log = logging.getLogger("smb")


class _OfName:
    """The part of torch's interface that writers and readers share: the name of the checkpoint."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    @property
    def checkpoint_id(self) -> str:
        return self._name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this can be a name."""
        return isinstance(checkpoint_id, str)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See torch: a save or a load begins."""
        if checkpoint_id:
            self._name = os.fspath(checkpoint_id)


class Writer(_OfName, StorageWriter):
    """Saves into the cluster of `client` under `name`; `dcp.save(..., checkpoint_id=)` gives another name.

    Each rank has its own Writer, with a client of its own. `servers` and `stripe` are those of Client.create, for the
    tensors. Saving over a checkpoint takes memory for both. Save to one name one at a time: a later save deletes what
    an earlier one, killed or still running, has written so far. The earlier save then fails at its commit, and the
    checkpoint before it, or the later save's, stays. With `dcp.async_save` the call returns when the state is copied
    into this process's memory, and the rest happens in a thread (a process does not work, because a client can't move
    to another process). Raises torch's CheckpointException with the errors of all ranks: OutOfMemoryError,
    UnavailableError, and InvalidArgumentError for an object that torch.load(weights_only=True) would refuse.
    """

    def __init__(self, client: Client, name: str, *, servers: Any = None, stripe: Any = None) -> None:
        super().__init__(client, name)
        self._options = {"servers": servers, "stripe": stripe}
        self._data: Buffer  # the tensors of the save in progress, if this rank is the coordinator

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch. Raises InvalidArgumentError if ranks are to save independently."""
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                f"save {self._name!r}: without collectives each rank would make an index of its own; leave "
                f"use_collectives=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See torch."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See torch: the memory for the tensors of all ranks is made, and each rank gets its places in it."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise InvalidArgumentError(f"save {self._name!r}: plans can't be cached; leave enable_plan_caching=False")
        end = 0
        offsets: list[list[int]] = []
        for plan in plans:
            offsets.append([])
            for item in plan.items:
                offsets[-1].append(end)
                end += _padded(_nbytes_of(item))
        data = f"{self._name}.{secrets.token_hex(8)}.data"
        with _turn(self._client, self._name):
            _check_free(self._client, self._name, "save")
            _sweep(self._client, self._name)
            self._data = self._client.create(data, max(end, 1), "uint8", **self._options)
        return [
            replace(plan, storage_data=_SavedItems(data, tuple(own))) for plan, own in zip(plans, offsets, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """See torch: this rank's tensors are written. Blocks. Values that are not tensors go to the coordinator."""
        located: _SavedItems = plan.storage_data
        results: list[WriteResult] = []
        packer = _Packer(self._client.open(located.data))
        for item, offset in zip(plan.items, located.offsets, strict=True):
            content = planner.resolve_data(item)
            if isinstance(content, io.BytesIO):
                blob = content.getvalue()
                _safe_bytes(f"save {self._name!r}: {item.index.fqn!r}", blob)
                results.append(WriteResult(item.index, len(blob), blob))
                continue
            check_dense(f"save {self._name!r}", item.index.fqn, content)
            octets = _octets_of(plain(content))
            if octets.size != _nbytes_of(item):
                raise InvalidArgumentError(
                    f"save {self._name!r}: {item.index.fqn!r} has {octets.size} bytes, but the plan has "
                    f"{_nbytes_of(item)}"
                )
            packer.add(offset, octets)
            results.append(WriteResult(item.index, octets.size, offset))
        packer.finish()
        return _done(results)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """See torch: the new checkpoint replaces the former one. Raises NotFoundError, and the former one stays, if the
        tensors that were written are gone: another save of the name began meanwhile, or a memory server has lost them.
        """
        blobs, located, data = bytearray(), {}, self._data.name
        for result in (result for rank in results for result in rank):
            if isinstance(result.storage_data, bytes):
                located[result.index] = len(blobs), len(result.storage_data)
                blobs += result.storage_data
            else:
                located[result.index] = result.storage_data, result.size_in_bytes
        text = json.dumps(_index_of(self._name, metadata, located), separators=(",", ":")).encode()
        if len(text) > CHECKPOINT_INDEX_BYTES_MAX or count_parts(text) > CHECKPOINT_INDEX_PARTS_MAX:
            raise InvalidArgumentError(
                f"save {self._name!r}: an index of {format_bytes(len(text))} could not be loaded again, because there "
                f"are too many pieces of tensors; save in several checkpoints"
            )
        made = f"{self._name}.{secrets.token_hex(8)}.index"
        index = self._client.create(
            made, len(text) + len(blobs), "uint8", metadata={METADATA: {"data": data, "json": len(text)}}
        )
        try:
            index.write(np.frombuffer(text + blobs, np.uint8))
            with _turn(self._client, self._name):
                self._check_data()
                _check_free(self._client, self._name, "save")
                self._client.rename(index, self._name, replace=True)
                try:
                    _sweep(self._client, self._name)
                except Error as error:  # the checkpoint exists; the next save deletes the rest
                    _log.warning("save %r: could not delete what former saves left: %s", self._name, error)
        except BaseException:
            with suppress(Error):
                if index.name == made:  # the index has not become the checkpoint
                    self._client.delete(index, missing_ok=True)
            raise

    def _check_data(self) -> None:
        """Raise NotFoundError unless the data that were written exist."""
        try:
            found = self._client.open(self._data.name)
        except NotFoundError:
            found = None
        if found is None or found.info.id != self._data.info.id:
            raise NotFoundError(
                f"save {self._name!r}: another save of this name began meanwhile, and deleted what this one had "
                f"written; the checkpoint is that save's, or the former one. Save to one name one at a time"
            )
        if lost := [segment.server for segment in found.layout.segments if segment.lost]:
            raise NotFoundError(
                f"save {self._name!r}: memory server {lost[0]} has lost what was written to it; the former checkpoint "
                f"stays. Save again"
            )


class Reader(_OfName, StorageReader):
    """Loads what a Writer saved, into any ranks and any sharding. Each rank has its own Reader, with a client of its
    own.

    All ranks load the same checkpoint, as a whole. If another save replaces it meanwhile, the load fails with
    CheckpointException and NotFoundError in it; call it again then. `dcp.load(..., checkpoint_id=)` gives another name.
    """

    def __init__(self, client: Client, name: str) -> None:
        super().__init__(client, name)
        self._index: _CheckpointContents | None = None
        self._failure: Error | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See torch: a load begins."""
        super().reset(checkpoint_id)
        self._index = self._failure = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the checkpoint's metadata. Raises NotFoundError, and InvalidArgumentError if the buffer is not a
        checkpoint.
        """
        if self._failure is not None and "rank" in kwargs:
            # Later releases of torch drop that failure, and ask for the metadata that only this rank saved. The failure
            # is raised below.
            return dcp.Metadata({})
        self._failure = None
        try:
            self._index = _read_index(self._client, self._name)
        except Error as error:
            # A new error object, because the traceback of the old one refers to this frame and so to this reader.
            self._failure = type(error)(str(error), outcome=error.outcome)
            raise
        return self._index.metadata

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch. Raises the error of read_metadata if torch went on after it."""
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See torch: this rank says which checkpoint it found."""
        return replace(plan, storage_data=self._found.data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See torch: all ranks must load the same checkpoint."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise NotFoundError(f"load {self._name!r}: another checkpoint replaced it meanwhile; load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """See torch: this rank's parts are read. Blocks."""
        index, asked = self._found, f"load {self._name!r}"
        under_way: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        try:
            buffer = self._client.open(index.data)
            for item in plan.items:
                found_at = index.located[item.storage_index]
                if item.type == LoadItemType.BYTE_IO:
                    blob = index.blobs[found_at[0] : found_at[0] + found_at[1]]
                    planner.load_bytes(item, io.BytesIO(_safe_bytes(f"{asked}: {item.storage_index.fqn!r}", blob)))
                    continue
                _start_read(buffer, index, item, planner, under_way)
                while len(under_way) > _CALLS_MAX:
                    _end_read(under_way)
            while under_way:
                _end_read(under_way)
        except NotFoundError as error:
            raise NotFoundError(f"{asked}: another checkpoint replaced it meanwhile; load again ({error})") from error
        finally:
            # A read that ended later would overwrite what the caller does with these tensors after the error.
            wait([future for future, _ in under_way])
        return _done(None)

    @property
    def _found(self) -> _CheckpointContents:
        assert self._index is not None, "torch reads the metadata first"
        return self._index


def delete(client: Client, name: str, *, missing_ok: bool = False) -> None:
    """Delete a checkpoint, and what killed saves of its name left.

    Raises NotFoundError unless missing_ok, and InvalidArgumentError if a buffer of that name is not a checkpoint.

    ```python
    import smb.torch.checkpoint

    smb.torch.checkpoint.delete(client, "run/ckpt", missing_ok=True)
    ```
    """
    with _turn(client, name):
        _check_free(client, name, "delete")
        client.delete(name, missing_ok=missing_ok)
        _sweep(client, name)


# ---- where tensors lie


@dataclass(frozen=True)
class _SavedItems:
    """For a rank's plan: the buffer of the tensors, and where each item begins in it."""

    data: str
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class _CheckpointContents:
    """A checkpoint's contents. `located`: (offset, bytes); for tensors in the buffer `data`, for other values in
    `blobs`.
    """

    metadata: dcp.Metadata
    located: dict[dcp.MetadataIndex, tuple[int, int]]
    data: str
    blobs: bytes


def _nbytes_of(item: WriteItem) -> int:
    """Return the bytes of a tensor's piece; 0 for a value that is not a tensor."""
    if item.type == WriteItemType.BYTE_IO:
        return 0
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _turn(client: Client, name: str) -> Lock:
    """Return the lock for changing which buffers belong to the name."""
    return client.lock(f"{name}.saves", ttl=_TURN_S)


def _check_free(client: Client, name: str, doing: str) -> None:
    """Raise InvalidArgumentError if another kind of buffer has the name of the checkpoint."""
    try:
        there = client.open(name)
    except NotFoundError:
        return
    if METADATA not in there.metadata:
        raise InvalidArgumentError(
            f"{doing} {name!r}: a buffer of that name exists and is not a checkpoint; take another name"
        )


def _sweep(client: Client, name: str) -> None:
    """Delete all saves of the name, except the one that its index names."""
    try:
        current = client.open(name).metadata.get(METADATA, {}).get("data")
    except NotFoundError:
        current = None
    for info in client.list():
        if info.name != current and info.name.startswith(name) and re.fullmatch(_SAVE, info.name[len(name) :]):
            client.delete(info.name, missing_ok=True)


# ---- the index


def _index_of(name: str, metadata: dcp.Metadata, located: dict[dcp.MetadataIndex, tuple[int, int]]) -> dict[str, Any]:
    """Return the metadata as JSON. Raises InvalidArgumentError for planner data that JSON can't hold."""
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            pieces = [
                [list(chunk.offsets), list(chunk.sizes), located[dcp.MetadataIndex(fqn, chunk.offsets)][0]]
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[fqn] = {"dtype": dtype, "shape": list(entry.size), "pieces": pieces}
        else:
            objects[fqn] = located[dcp.MetadataIndex(fqn)]
    paths = metadata.planner_data or {}
    if not isinstance(paths, dict) or not all(
        isinstance(part, (str, int)) for path in paths.values() for part in cast(Iterable[Any], path)
    ):
        raise InvalidArgumentError(
            f"save {name!r}: the planner's data must map names to paths, as DCP's own planner's do"
        )
    return {
        "format": _FORMAT,
        "tensors": tensors,
        "objects": objects,
        "paths": {fqn: list(path) for fqn, path in paths.items()},
    }


def _read_index(client: Client, name: str) -> _CheckpointContents:
    for _ in range(_OPENINGS_MAX):
        index = client.open(name)
        mark = index.metadata.get(METADATA)
        if not isinstance(mark, dict) or not isinstance(mark.get("json"), int) or not isinstance(mark.get("data"), str):
            raise InvalidArgumentError(f"load {name!r}: this buffer is not a checkpoint of smb.torch.checkpoint")
        try:
            _check_index(index.nbytes, mark["json"])
            content = index.read().tobytes()
            text = parse_json(content[: mark["json"]], CHECKPOINT_INDEX_PARTS_MAX)
            return _parsed(text, mark["data"], content[mark["json"] :])
        except NotFoundError:
            continue  # another checkpoint replaced it
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            if isinstance(error, Error) and not isinstance(error, InvalidArgumentError):
                raise  # an error of the read
            raise Error(f"load {name!r}: its index can't be read: {shortened(error)}") from error
    raise NotFoundError(f"load {name!r}: it was replaced {_OPENINGS_MAX} times while it was read; load again")


def _check_index(nbytes: int, text_bytes: int) -> None:
    """Raise ValueError unless JSON of this size may be part of an index of `nbytes` bytes, and is small enough to be
    parsed.
    """
    if not 0 < text_bytes <= min(nbytes, CHECKPOINT_INDEX_BYTES_MAX):
        raise ValueError(
            f"its JSON has {text_bytes} of {nbytes} bytes, and at most {format_bytes(CHECKPOINT_INDEX_BYTES_MAX)} are "
            f"parsed"
        )


def _parsed(text: dict[str, Any], data: str, blobs: bytes) -> _CheckpointContents:
    if text["format"] != _FORMAT:
        raise ValueError(f"its format is {text['format']}, and this release reads {_FORMAT}")
    entries: dict[str, Any] = {}
    located: dict[dcp.MetadataIndex, tuple[int, int]] = {}
    for fqn, tensor in text["tensors"].items():
        dtype = vars(torch).get(tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{quoted(fqn)} has the dtype {quoted(tensor['dtype'])}, which torch does not have")
        shape = _size(fqn, tensor["shape"])
        chunks = []
        for begins, extents, offset in tensor["pieces"]:
            begin, sizes = _size(fqn, begins), _size(fqn, extents)
            if not len(begin) == len(sizes) == len(shape) or not 0 <= offset <= BYTES_MAX:
                raise ValueError(f"a piece of {quoted(fqn)} lies at {quoted((begins, extents, offset))}")
            chunks.append(dcp.ChunkStorageMetadata(begin, sizes))
            located[dcp.MetadataIndex(fqn, begin)] = int(offset), math.prod(sizes) * dtype.itemsize
        properties = dcp.TensorProperties(dtype=dtype)
        entries[fqn] = dcp.TensorStorageMetadata(properties, shape, chunks)
    for fqn, (offset, nbytes) in text["objects"].items():
        if not 0 <= offset <= offset + nbytes <= len(blobs):
            raise ValueError(f"{quoted(fqn)} lies at {quoted((offset, nbytes))} of {len(blobs)} bytes")
        entries[fqn] = dcp.BytesStorageMetadata()
        located[dcp.MetadataIndex(fqn)] = int(offset), int(nbytes)
    paths = {fqn: tuple(path) for fqn, path in text["paths"].items()}
    return _CheckpointContents(
        dcp.Metadata(entries, planner_data=paths, storage_meta=dcp.StorageMeta()), located, data, blobs
    )


def _size(fqn: str, extents: object) -> torch.Size:
    """Return the size in a list of JSON. Raises ValueError, because torch.Size takes any integer
    and fails only in use.
    """
    if not isinstance(extents, list) or not all(type(each) is int and 0 <= each <= BYTES_MAX for each in extents):
        raise ValueError(f"{quoted(fqn)} has the extents {quoted(extents)}")
    return torch.Size(extents)


def _check_unpacked(blob: bytes) -> None:
    """Raise ValueError unless the bytes are as torch.save writes them: an archive whose members are not compressed. A
    few bytes of compressed members could become gigabytes.
    """
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its archive has compressed members")
    if sum(member.file_size for member in members) > len(blob):
        raise ValueError("the members of its archive overlap each other")


def _safe_bytes(asked: str, blob: bytes) -> bytes:
    """Return an object's bytes, made anew from what torch's restricted loader has read."""
    try:
        _check_unpacked(blob)
        value = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidArgumentError(
            f"{asked} is not an object that torch.load(weights_only=True) takes: leave it out, make it of tensors, "
            f"numbers, strings, lists and dicts, or allow its class by torch.serialization.add_safe_globals "
            f"({shortened(error)})"
        ) from error
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# ---- bytes


class _Packer:
    """Writes pieces in ascending places: small neighbours together, a few calls at a time."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._pack = bytearray()
        self._begin = 0
        self._calls: deque[Future[None]] = deque()

    def add(self, offset: int, octets: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if self._pack and offset + octets.size - self._begin > _PACK_BYTES:
            self._send()
        if octets.size > _PACK_BYTES:
            self._write(octets, offset)
            return
        if not self._pack:
            self._begin = offset
        self._pack += bytes(offset - self._begin - len(self._pack))
        self._pack += octets.data

    def finish(self) -> None:
        """Return when everything has been written."""
        if self._pack:
            self._send()
        while self._calls:
            self._calls.popleft().result()

    def _send(self) -> None:
        pack, self._pack = self._pack, bytearray()
        self._write(np.frombuffer(pack, np.uint8), self._begin)

    def _write(self, octets: np.ndarray[Any, np.dtype[np.uint8]], offset: int) -> None:
        while len(self._calls) >= _CALLS_MAX:
            self._calls.popleft().result()
        self._calls.append(self._buffer.write_async(octets, offset))


def _start_read(
    buffer: Buffer,
    index: _CheckpointContents,
    item: ReadItem,
    planner: LoadPlanner,
    under_way: deque[tuple[Future[Any], Callable[[], None]]],
) -> None:
    """Begin to read an item: all rows (along the first dimension) of its piece that are wanted."""
    target = planner.resolve_tensor(item).detach()
    entry = index.metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
    lengths, begins = tuple(item.lengths), tuple(item.storage_offsets)
    if target.shape != item.lengths:
        raise InvalidArgumentError(
            f"{item.storage_index.fqn!r}: the tensor must have shape {list(item.lengths)}, not {list(target.shape)}"
        )
    if target.numel() == 0:
        planner.commit_tensor(item, target)
        return
    shape = (lengths[0], *sizes[1:]) if lengths else ()
    row_bytes = math.prod(sizes[1:]) * entry.properties.dtype.itemsize
    offset = index.located[item.storage_index][0] + (begins[0] * row_bytes if begins else 0)
    in_place = (
        target.device.type == "cpu"
        and target.is_contiguous()
        and not has_bits(target)
        and (target.dtype, tuple(target.shape)) == (entry.properties.dtype, shape)
    )
    rows = target if in_place else torch.empty(shape, dtype=entry.properties.dtype, device="cpu")

    def end() -> None:
        if not in_place:
            part = rows
            for dimension, (begin, length) in enumerate(zip(begins[1:], lengths[1:], strict=True), 1):
                part = part.narrow(dimension, begin, length)
            with changing([target]):
                target.copy_(part)
        planner.commit_tensor(item, target)

    octets = _octets_of(rows)
    under_way.append((buffer.read_async(offset, octets.size, out=octets), end))


def _end_read(under_way: deque[tuple[Future[Any], Callable[[], None]]]) -> None:
    call, end = under_way[0]
    call.result()  # the call stays in the queue while it is waited for
    under_way.popleft()
    end()


def _octets_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a contiguous tensor's bytes, without a copy."""
    return cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else np.empty(0, np.uint8)


def _done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future
