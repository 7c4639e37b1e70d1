"""The bytes of a file: some of a buffer's own, and generated headers. Pure.

A view is exact, or there is none: a .npy or .safetensors file reads back as it was written, to the last byte. So such a
file becomes a buffer of its dtype and shape only if its header equals the generated one. Files of numpy and of the
safetensors library have that header; any other file is kept as bytes.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from smb.arrays.dtypes import DTYPES
from smb.errors import InvalidArgumentError
from smb.files.names import Form, escaped, is_long, name_of, path_of
from smb.rpc.metadata import encode
from smb.tensors import TensorPlace, TensorTable

_npy: Any = np.lib.format  # without types before numpy 2.3

METADATA_KEY = "safetensors"  # of a buffer's metadata: __metadata__ of the file that it was made from
FILES_KEY = "smb.files"  # of a buffer's metadata: what its file is beside its bytes
EMPTY = {"nbytes": 0}  # there, of a file without a byte: no buffer can be that small
HEADER_BYTES_MAX = 100 << 20  # the safetensors format's own limit
_NPY_HEADER_BYTES_MAX = 10 + 0xFFFF
# https://github.com/huggingface/safetensors: names of element types, little-endian.
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_NUMPY = {name: dtype for dtype, name in _SAFETENSORS.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes of a file from byte `at`: of the buffer from its byte `start`, or `header`."""

    at: int
    length: int
    start: int = 0
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class View:
    """A file's pieces, in their order, without gaps."""

    pieces: tuple[Piece, ...]
    nbytes: int

    def parts(self, offset: int, length: int) -> Iterator[tuple[int, int, Piece, int]]:
        """Give (from, to, piece, offset in the piece) for all of a range of the file, from and to counted from the
        range's start. Bytes past the file's end are left out.
        """
        end = min(offset + length, self.nbytes)
        for piece in self.pieces:
            first, last = max(offset, piece.at), min(end, piece.at + piece.length)
            if first < last:
                yield first - offset, last - offset, piece, first - piece.at


@dataclass(frozen=True, slots=True)
class Plan:
    """The buffer that a file becomes: dtype and shape, or tensors; where the file's bytes lie in it."""

    name: str
    view: View
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    tensors: TensorTable | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def forms_of(dtype: np.dtype[Any], shape: tuple[int, ...], table: TensorTable | None) -> tuple[Form, ...]:
    """Return the forms that are worth showing: plain bytes are shown as they are."""
    if table:
        return (Form.RAW, Form.NPY, Form.SAFETENSORS) if _safetensors_can(table) else (Form.RAW, Form.NPY)
    return (Form.RAW,) if dtype == np.uint8 and len(shape) == 1 else (Form.RAW, Form.NPY)


def view_of(
    form: Form, dtype: np.dtype[Any], shape: tuple[int, ...], table: TensorTable | None, metadata: Mapping[str, Any]
) -> View | None:
    """Return the view of such a buffer in that form; None if it has none."""
    nbytes = math.prod(shape) * dtype.itemsize
    if form is Form.RAW and may_be_empty(dtype, shape) and _of_file(metadata).items() >= EMPTY.items():
        return View((), 0)
    if form is Form.RAW:
        return _with_header(b"", [(0, nbytes)])
    if form is Form.NPY:
        return _with_header(npy_header(dtype, shape), [(0, nbytes)])
    if not table or not _safetensors_can(table):
        return None
    header = safetensors_header(table, metadata.get(METADATA_KEY))
    return _with_header(header, [(place.offset, place.nbytes) for place in table.values()])


def path_in(metadata: Mapping[str, Any]) -> str | None:
    """Return the path of a buffer whose name is a digest, as its metadata says it; None if it says none."""
    name = _of_file(metadata).get("name")
    return path_of(name) if isinstance(name, str) else None


def named(plan: Plan) -> Plan:
    """Return the plan with its path in the metadata where the name can't say it."""
    if not is_long(name_of(plan.name)):
        return plan
    entry = {**_of_file(plan.metadata), "name": escaped(plan.name)}
    return replace(plan, metadata={**plan.metadata, FILES_KEY: entry})


def _of_file(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = metadata.get(FILES_KEY)
    return entry if isinstance(entry, Mapping) else {}


def may_be_empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether the buffer's metadata must be looked at, as it may stand for an empty file."""
    return shape == (1,) and dtype == np.uint8


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header that numpy.save writes for a C-contiguous array; bfloat16 is "<V2" there."""
    file = io.BytesIO()
    _npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return file.getvalue()


def safetensors_header(table: TensorTable, metadata: object = None) -> bytes:
    """Return the header of a file in which the tensors follow each other without gaps, as the format wants it."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, place in table.items():
        header[name] = {
            "dtype": _SAFETENSORS[place.dtype.name],
            "shape": list(place.shape),
            "data_offsets": [end, end + place.nbytes],
        }
        end += place.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def plan_of(path: str, head: bytes, nbytes: int) -> Plan:
    """Return what a new file of `nbytes` bytes, which begins with `head`, becomes: a typed buffer where that shows the
    same bytes, else one of bytes under its whole name. `head` is at least header_bytes() long, or the whole file.
    """
    if nbytes == 0:
        return Plan(path, View((), 0), shape=(1,), metadata={FILES_KEY: EMPTY})
    plan = None
    if path.endswith(Form.NPY.value) and not path.endswith("/" + Form.NPY.value):
        plan = _npy_plan(path[: -len(Form.NPY.value)], head)
    elif path.endswith(Form.SAFETENSORS.value) and not path.endswith("/" + Form.SAFETENSORS.value):
        plan = _safetensors_plan(path[: -len(Form.SAFETENSORS.value)], head)
    if plan is not None and plan.view.nbytes == nbytes and head.startswith(plan.view.pieces[0].header):
        return plan
    return plain_plan(path, nbytes)


def plain_plan(path: str, nbytes: int) -> Plan:
    """Return the buffer of bytes that a file of at least one becomes under its whole name."""
    return Plan(path, _with_header(b"", [(0, nbytes)]), shape=(nbytes,))


def header_bytes(head: bytes) -> int:
    """Return how much of a file plan_of must see, given its first 16 bytes."""
    if head.startswith(b"\x93NUMPY"):
        return _NPY_HEADER_BYTES_MAX
    size = int.from_bytes(head[:8], "little")
    return 8 + size if 0 < size <= HEADER_BYTES_MAX and head[8:9] == b"{" else 16


def parse_safetensors(head: bytes) -> tuple[TensorTable, object, list[tuple[int, int]]]:
    """Return (table, __metadata__ or None, (first, last) byte of each tensor's data after the header) from a file's
    beginning. Raises InvalidArgumentError for anything else.
    """
    try:
        size = int.from_bytes(head[:8], "little")
        if len(head) < 8 + size or size > HEADER_BYTES_MAX:
            raise ValueError(f"its header has {size} bytes")
        header = json.loads(head[8 : 8 + size])
        metadata = header.pop("__metadata__", None)
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        forms = {name: (tuple(entry["shape"]), _NUMPY[entry["dtype"]]) for name, entry in ordered}
        ranges = [(int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for _, entry in ordered]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"this is no safetensors file that can be kept as tensors: {error!r}") from None
    table = TensorTable.of(forms, "safetensors")
    if any(last - first != table[name].nbytes for (name, _), (first, last) in zip(ordered, ranges, strict=True)):
        raise InvalidArgumentError("this is no safetensors file: a tensor's bytes are not what its shape needs")
    return table, metadata, ranges


def _npy_plan(name: str, head: bytes) -> Plan | None:
    try:
        file = io.BytesIO(head[:_NPY_HEADER_BYTES_MAX])
        if _npy.read_magic(file) != (1, 0):
            return None
        shape, _, dtype = _npy.read_array_header_1_0(file)
    except (ValueError, TypeError):
        return None
    if dtype.name not in DTYPES or any(extent < 1 for extent in shape) or Form.NPY not in forms_of(dtype, shape, None):
        return None
    # As the buffer has it: of another byte order the header is another one, and the file is kept as bytes.
    view = view_of(Form.NPY, DTYPES[dtype.name].numpy, shape, None, {})
    return Plan(name, view, dtype.name, shape) if view is not None else None


def _safetensors_plan(name: str, head: bytes) -> Plan | None:
    try:
        table, own, _ = parse_safetensors(head)
    except InvalidArgumentError:
        return None
    metadata: dict[str, Any] = {} if own is None else {METADATA_KEY: own}
    try:
        encode("", {**metadata, **table.to_metadata()})
    except InvalidArgumentError:  # more than a buffer can carry
        return None
    view = view_of(Form.SAFETENSORS, table.dtype, (table.size,), table, metadata)
    return Plan(name, view, tensors=table, metadata=metadata) if view is not None else None


def _safetensors_can(table: Mapping[str, TensorPlace]) -> bool:
    return all(place.dtype.name in _SAFETENSORS for place in table.values())


def _with_header(header: bytes, ranges: list[tuple[int, int]]) -> View:
    """Return the view of a header and then these (start, length) of the buffer, neighbours joined."""
    pieces = [Piece(0, len(header), header=header)] if header else []
    end = len(header)
    for start, length in ranges:
        last = pieces[-1] if pieces and not pieces[-1].header else None
        if last is not None and last.start + last.length == start:
            pieces[-1] = Piece(last.at, last.length + length, last.start)
        elif length:
            pieces.append(Piece(end, length, start))
        end += length
    return View(tuple(pieces), end)
