"""A training in a file: weights, outer state, round, settings and metadata, exact. It is saved while the training goes
on.

The file is a .safetensors file whatever its name is. It has the group's tensors, by their names (a group of
smb.train.join has one, "values"), including running statistics. The outer optimizer's momentum, if there is one, is the
tensor "smb.outer.0"; its latest step, if workers read that, is "smb.step". The rest of the group stands in
__metadata__, with a SHA-256 of all bytes after the header. A file that is torn or was changed is not loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from smb.buffer import Buffer
from smb.client import Client
from smb.config.limits import BYTES_MAX, TRAINING_HEADER_BYTES_MAX, TRAINING_HEADER_PARTS_MAX
from smb.config.parse import format_bytes
from smb.config.untrusted import open_regular, parse_json, quoted, shortened
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError, OutOfMemoryError
from smb.lock import Lock
from smb.safetensors import parse_safetensors, safetensors_header
from smb.tensors import TensorInfo, TensorTable
from smb.train import group as groups
from smb.train import member_table as t
from smb.train.exchange.round_closing import momentum_name, state_slot, step_name
from smb.train.fragments import Span
from smb.train.group_deletion import remove_leftovers
from smb.train.group_making import check_lease, check_placement
from smb.train.guards import Guards
from smb.train.parameters import BLOCK_ELEMENTS
from smb.train.progress import progress_of
from smb.train.scheme import Scheme, Values, is_number, is_whole, scheme_of

STATISTICS = "state"  # NAME/state, made by smb.torch.join
_KEY = "smb.train"
_OUTER = {"smb.outer.0": momentum_name, "smb.step": step_name}  # each has two slots that are used in turn
_WHOLE = "values"
_FORMAT_VERSION = 1
_ROUNDS_MAX = 1 << (62 - t.ROUND_SHIFT)  # a word of the table holds a round
_COUNT_MAX = 1 << 62  # limit of steps and samples, which the table adds to
_TRIES = 3  # attempts without a lock that keeps rounds from being closed
_LOCK_S = 60.0

_log = logging.getLogger("smb")


@dataclass(frozen=True)
class _Source:
    """Tensors of the file, and the buffers that they come from. `names` maps each tensor to its name in the file.
    `ranges` are the parts of the vector in which the tensors lie, in order, each with the float32 buffer that has its
    valid values.
    """

    ranges: tuple[tuple[Buffer, Span], ...]
    table: TensorTable
    names: dict[str, str]


@dataclass(frozen=True)
class _Head:
    """The checked header of a file. `extents` has each tensor's first byte in the file and its number of elements;
    `nbytes` is the size of the whole file.
    """

    fields: dict[str, Any]
    scheme: Scheme
    guards: Guards
    extents: dict[str, tuple[int, int]]
    start: int
    nbytes: int


def save(client: Client, name: str, path: str | os.PathLike[str]) -> int:
    """Write a training into a file while it goes on. Return its round; 0 in schemes without rounds.

    ```python
    smb.train.save(client, "run", "run.smbtrain")
    smb.train.load(client, "copy", "run.smbtrain")
    ```

    The file is of one round, and exact, whatever wire= says. If rounds close faster than the model can be read, the
    next one waits for the file. The file appears as a whole at the end, in place of an older one. Takes a fixed amount
    of memory. It does not contain what belongs to workers: inner optimizers, the models of hosts in HSGD, work units.
    Raises NotFoundError, InvalidArgumentError (no group), OSError.
    """
    group, target = groups.view(client, name), Path(path)
    if not target.parent.is_dir():  # otherwise the error would name the temporary file
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(target.parent))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a directory", str(target))
    part = target.with_name(f"{target.name}.part-{secrets.token_hex(8)}")
    try:
        for attempt in range(2 * _TRIES):
            with _still(group) if attempt >= _TRIES else contextlib.nullcontext():
                before = group.table.get(0, t.ROUND)
                if not before & groups.BUILT:
                    part.unlink(missing_ok=True)  # left by an earlier attempt
                    _write(group, before >> t.ROUND_SHIFT, part)
                    after = group.table.get(0, t.ROUND)
                    # BUILT: the weights of the round that is still open are being replaced.
                    if after >> t.ROUND_SHIFT == before >> t.ROUND_SHIFT and not after & groups.BUILT:
                        part.replace(target)
                        _sync(target.parent)
                        return before >> t.ROUND_SHIFT
            group.read_by(lambda _: None)  # waits until no round is being closed, and finishes a dead worker's closing
    finally:
        part.unlink(missing_ok=True)
    raise Error(f"save of training {name!r}: rounds were closed during each of {2 * _TRIES} attempts; try again")


def load(client: Client, name: str, path: str | os.PathLike[str], **placement: Any) -> int:
    """Make a training from a file, in any cluster, under any name. Return its round. Workers that join continue from
    there.

    `placement` is servers=, stripe=, wire= and replicas= of Client.create; wire and replicas default to the saved
    training's. Raises AlreadyExistsError if there is a training of that name (smb.train.delete), InvalidArgumentError
    if the file is incomplete or not a saved training, OSError.

    ```python
    smb.train.save(client, "run", "run.smbtrain")
    smb.train.load(client, "copy", "run.smbtrain")  # 0: the round
    ```
    """
    check_placement(f"load of {path}", placement)
    with os.fdopen(open_regular(path), "rb") as file:
        head = _head(file, str(path))
        fields, number = head.fields, int(head.fields["round"])
        before = _stamp(file)
        _check_room(client, head, str(path))
        if before[0] != head.nbytes or _digest(file, head.start) != fields["sha256"]:
            raise InvalidArgumentError(
                f"load of {path}: the file is incomplete or was changed: its bytes do not match its checksum"
            )
        settings = groups.settings_of(head.scheme, head.guards, float(fields["lease"]))
        metadata = {**fields["metadata"], groups.METADATA: settings}
        saved = {"wire": fields.get("wire", "exact"), "replicas": fields.get("replicas", 1)}
        placement = {**saved, **{key: value for key, value in placement.items() if value is not None}}
        check_placement(f"load of {path}", placement)
        with client.lock(f"{name}/setup", timeout=_LOCK_S, replicas=placement["replicas"]) as setup:
            with contextlib.suppress(NotFoundError):
                groups.view(client, name)
                raise AlreadyExistsError(
                    f"load of {path}: there is a training {name!r}; delete it first (smb train rm, smb.train.delete), "
                    f"or take another name"
                )
            made: list[Buffer] = []
            try:
                ready = _make(client, name, file, head, metadata, placement, made, setup)
                if _stamp(file) != before:
                    raise InvalidArgumentError(f"load of {path}: the file was changed while it was read; try again")
                ready.add(0, t.READY, 1)
            except BaseException:
                try:
                    for each in reversed(made):
                        setup.check()  # a process that was stopped meanwhile must not delete another's new buffers
                        _drop(client, each)
                except Error as error:
                    _log.warning("load of %s: could not delete what it made of training %r: %s", path, name, error)
                raise
    return number


def _drop(client: Client, made: Buffer) -> None:
    """Delete a buffer of a failed load. A failure is only logged, because the caller raises the earlier error."""
    try:
        client.delete(made, missing_ok=True)
    except Error as error:
        _log.warning("buffer %r is left over; delete it: %s", made.name, error)


# ---- writing


def _write(group: groups.Group, number: int, part: Path) -> None:
    """Write the file as of a round that is open and stays open."""
    weights = group.weights
    table = weights.table or _whole(weights.size)
    sources = [_Source(_all(weights), table, {each: each for each in table})]
    metadata = {key: value for key, value in weights.metadata.items() if key != groups.METADATA}
    head_fields: dict[str, Any] = {
        "version": _FORMAT_VERSION,
        "scheme": group.scheme.NAME,
        "settings": group.scheme.settings(),
        "guards": group.guards.settings(),
        "lease": group.lease,
        "wire": weights.wire,
        "replicas": weights.info.replicas,
        "round": number,
        "steps": progress_of(group.table.read()).steps,
        "samples": progress_of(group.table.read()).samples,
        "size": weights.size,
        "metadata": metadata,
    }
    with contextlib.suppress(NotFoundError):
        statistics = group.client.open(f"{group.name}/{STATISTICS}")
        sources.append(_Source(_all(statistics), statistics.table, {each: each for each in statistics.table}))
        head_fields["statistics"] = {"size": statistics.size, "metadata": statistics.metadata}
    if group.scheme.traits.outer:
        for stored, name_of in _OUTER.items():
            with contextlib.suppress(NotFoundError):  # no step was made yet, or the scheme has no such state
                slots = [group.client.open(f"{group.name}/{name_of(slot)}") for slot in (0, 1)]
                ranges = tuple((slots[slot], span) for slot, span in _good_states(group.spans, number))
                sources.append(_Source(ranges, _whole(weights.size), {_WHOLE: stored}))
    forms: dict[str, tuple[tuple[int, ...], str]] = {}
    for source in sources:
        for each, stored in source.names.items():
            if stored in forms:
                raise InvalidArgumentError(f"save of training {group.name!r}: two tensors have the name {stored!r}")
            forms[stored] = source.table[each].shape, "float32"
    placed = TensorTable.of(forms, "save")
    with part.open("xb") as file:
        head = _header(placed, head_fields | {"sha256": "0" * 64})
        file.write(head)
        digest = hashlib.sha256()
        for source in sources:
            for each in source.names:
                for block in _read(source.ranges, source.table[each]):
                    digest.update(block)
                    file.write(block)
        file.seek(0)
        file.write(_header(placed, head_fields | {"sha256": digest.hexdigest()}))
        file.flush()
        os.fsync(file.fileno())


def _header(table: TensorTable, head_fields: dict[str, Any]) -> bytes:
    return safetensors_header(table, {_KEY: json.dumps(head_fields)})


def _all(buffer: Buffer) -> tuple[tuple[Buffer, Span], ...]:
    return ((buffer, Span(0, buffer.size)),)


def _good_states(spans: tuple[Span, ...], number: int) -> Iterator[tuple[int, Span]]:
    """Yield for each fragment the slot of the outer state that is valid in round `number`: the one that the fragment's
    next round reads.
    """
    for index, span in enumerate(spans):
        yield state_slot(number + (index - number) % len(spans), len(spans)), span


def _read(ranges: tuple[tuple[Buffer, Span], ...], info: TensorInfo) -> Iterator[memoryview]:
    first, end = info.offset // 4, info.offset // 4 + info.size
    for buffer, (offset, count) in ranges:
        for begin in range(max(first, offset), min(end, offset + count), BLOCK_ELEMENTS):
            length = min(BLOCK_ELEMENTS, end - begin, offset + count - begin)
            yield buffer.read(begin, length, wire="exact").view(np.uint8).data


@contextlib.contextmanager
def _still(group: groups.Group) -> Iterator[None]:
    """Keep rounds from being closed while the block runs."""
    with group.weights.lock(ttl=group.lease, timeout=_LOCK_S):
        yield


def _whole(size: int) -> TensorTable:
    return TensorTable.of({_WHOLE: ((size,), "float32")})


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading


def _head(file: IO[bytes], path: str) -> _Head:
    """Read and check the header. Raises InvalidArgumentError for a header that smb.train.save would not write."""
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= TRAINING_HEADER_BYTES_MAX:
        raise InvalidArgumentError(
            f"load of {path}: this is not a saved training: its header must have 1 to "
            f"{TRAINING_HEADER_BYTES_MAX} bytes, not {size}"
        )
    file.seek(0)
    start = file.read(8 + size)
    if len(start) < 8 + size:
        raise InvalidArgumentError(f"load of {path}: the file is incomplete: it ends within its header")
    try:
        table, metadata, ranges = parse_safetensors(start, TRAINING_HEADER_BYTES_MAX, TRAINING_HEADER_PARTS_MAX)
        if metadata is None or _KEY not in metadata:
            raise ValueError("its metadata has no training")
        fields = parse_json(metadata[_KEY], TRAINING_HEADER_PARTS_MAX)
        if not isinstance(fields, dict) or not is_whole(fields.get("version"), 0):
            raise ValueError("its metadata has no training")
        if fields["version"] != _FORMAT_VERSION:
            raise ValueError(
                f"its format has version {quoted(fields['version'])}, and this release of smb reads {_FORMAT_VERSION}"
            )
        if any(info.dtype != np.float32 for info in table.values()):
            raise ValueError("all tensors must be float32")
        extents = {each: (8 + size + first, table[each].size) for each, (first, _) in zip(table, ranges, strict=True)}
        scheme, guards = _checked(fields)
        _check_tensors(fields, extents)
    # Settings of other types raise the latter three.
    except (Error, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InvalidArgumentError(
            f"load of {path}: this is not a saved training: it was not written by smb.train.save ({shortened(error)})"
        ) from None
    return _Head(fields, scheme, guards, extents, 8 + size, 8 + size + ranges[-1][1])


def _checked(fields: dict[str, Any]) -> tuple[Scheme, Guards]:
    """Return the scheme and the guards. Raises ValueError; settings of wrong types may also raise TypeError and the
    like.
    """
    shapes: dict[str, bool] = {
        "scheme": isinstance(fields.get("scheme"), str),
        "settings": isinstance(fields.get("settings"), dict),
        "guards": isinstance(fields.get("guards"), dict),
        "lease": is_number(fields.get("lease")),
        "wire": fields.get("wire", "exact") in groups.WIRE_BYTES,
        "round": is_whole(fields.get("round"), 0, _ROUNDS_MAX),
        "steps": is_whole(fields.get("steps"), 0, _COUNT_MAX),
        "samples": is_whole(fields.get("samples"), 0, _COUNT_MAX),
        "size": is_whole(fields.get("size"), 1, BYTES_MAX // 4),
        "metadata": isinstance(fields.get("metadata"), dict),
        "sha256": isinstance(fields.get("sha256"), str),
    }
    if wrong := [name for name, fits in shapes.items() if not fits]:
        raise ValueError(f"its {wrong[0]} is {quoted(fields.get(wrong[0]))}")
    check_lease("the saved training", float(fields["lease"]))
    if foreign := fields["guards"].keys() - Guards.__dataclass_fields__.keys():
        raise ValueError(f"there is no guard {quoted(min(foreign))}")
    return scheme_of(fields["scheme"], fields["settings"]), Guards(**fields["guards"])


def _check_tensors(fields: dict[str, Any], extents: dict[str, tuple[int, int]]) -> None:
    """Raise Error or ValueError unless the file has each tensor that must be filled, with the
    right number of elements.
    """
    size = fields["size"]
    table = TensorTable.from_metadata(fields["metadata"], np.dtype(np.float32), 4 * size) or _whole(size)
    wanted = {each: info.size for each, info in table.items()} | {each: size for each in _OUTER if each in extents}
    if (kept := fields.get("statistics")) is not None:
        if not isinstance(kept, dict) or not isinstance(kept.get("metadata"), dict):
            raise ValueError("its statistics are not those of a training")
        if not is_whole(kept.get("size"), 1, BYTES_MAX // 4):
            raise ValueError(f"the size of its statistics is {quoted(kept.get('size'))}")
        statistics = TensorTable.from_metadata(kept["metadata"], np.dtype(np.float32), 4 * kept["size"])
        if statistics.nbytes != 4 * kept["size"]:
            raise ValueError("its statistics are not those of a training")
        wanted |= {each: info.size for each, info in statistics.items()}
    for each, count in wanted.items():
        if each not in extents:
            raise ValueError(f"the file has no tensor {quoted(each)}")
        if extents[each][1] != count:
            raise ValueError(f"tensor {quoted(each)} has {extents[each][1]} elements, not {count}")


def _check_room(client: Client, head: _Head, path: str) -> None:
    """Raise OutOfMemoryError for a training that the cluster's servers could never hold. Otherwise reading a sparse
    file that claims such a size would take for ever.
    """
    there = sum(server.capacity for server in client.servers())
    if (wanted := 4 * head.fields["size"]) > there:
        raise OutOfMemoryError(
            f"load of {path}: its weights take {format_bytes(wanted)}, and the memory servers have "
            f"{format_bytes(there)} together"
        )


def _stamp(file: IO[bytes]) -> tuple[int, int, int]:
    """Return a file's size and times, which change with its bytes."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(file: IO[bytes], start: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while block := file.read(4 * BLOCK_ELEMENTS):
        digest.update(block)
    return digest.hexdigest()


def _make(
    client: Client,
    name: str,
    file: IO[bytes],
    head: _Head,
    metadata: dict[str, Any],
    placement: dict[str, Any],
    made: list[Buffer],
    setup: Lock,
) -> t.Table:
    """Make the group's buffers, and return the table, in which the caller marks the group as ready. The caller holds
    the setup lock. The table is made first, so that buffers left by a killed load are known as parts of a training that
    is not ready.
    """
    fields, where = head.fields, head.extents
    remove_leftovers(client, name, setup.check)
    replicas = placement["replicas"]

    def new(buffer_name: str, *args: Any, **options: Any) -> Buffer:
        buffer = client.create(buffer_name, *args, **{"replicas": replicas, **options})
        made.append(buffer)
        return buffer

    shape = (1 + head.scheme.MEMBERS_MAX, t.FIELDS)
    members = t.Table(new(f"{name}/members", shape, "int64", servers=1, stripe=t.STRIPE))
    new(f"{name}/tick", 1, "int64", servers=1)
    weights = new(name, fields["size"], "float32", metadata=metadata, **placement)
    for each, info in (weights.table or _whole(weights.size)).items():
        _fill(weights, info.offset // 4, file, *where[each])
    spans = head.scheme.spans(weights)
    for stored in _OUTER.keys() & where.keys():
        slots = [new(f"{name}/{_OUTER[stored](slot)}", like=weights) for slot in (0, 1)]
        for slot, (offset, count) in _good_states(spans, fields["round"]):
            _fill(slots[slot], offset, file, where[stored][0] + 4 * offset, count)
    if (kept := fields.get("statistics")) is not None:
        statistics = new(f"{name}/{STATISTICS}", kept["size"], metadata=kept["metadata"])
        values = np.zeros(kept["size"], np.float32)
        for each, info in statistics.table.items():
            begin, count = where[each]
            file.seek(begin)
            values[info.offset // 4 :][:count] = _next(file, count)
        statistics.publish(values)
    members.swap(0, t.ROUND, 0, fields["round"] << t.ROUND_SHIFT)
    # The counts are entered as if a former member in the first slot had done all of it.
    members.add(1, t.STEPS, fields["steps"])
    members.add(1, t.SAMPLES_BEFORE, fields["samples"])
    return members


def _fill(buffer: Buffer, offset: int, file: IO[bytes], begin: int, count: int) -> None:
    file.seek(begin)
    for at in range(0, count, BLOCK_ELEMENTS):
        buffer.write(_next(file, min(BLOCK_ELEMENTS, count - at)), offset + at, wire="exact")


def _next(file: IO[bytes], count: int) -> Values:
    """Return the next elements. Raises InvalidArgumentError if the file was cut meanwhile."""
    found = file.read(4 * count)
    if len(found) != 4 * count:
        raise InvalidArgumentError("the file of the training was cut while it was read")
    return np.frombuffer(found, "<f4")
