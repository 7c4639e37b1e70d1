"""The bytes of a file: ranges of a buffer, and generated headers. Pure.

A file reads back exactly as it was written, to the last byte. So a .npy or .safetensors file becomes a buffer of its
dtype and shape only if its header equals the generated one. Files of numpy and of the safetensors library have that
header; any other file is kept as bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from smb.arrays.dtypes import DTYPES
from smb.config.limits import DIMENSIONS_MAX, HEADER_BYTES_MAX
from smb.errors import InvalidArgumentError
from smb.files.names import Form, escaped, is_long, name_of, path_of
from smb.safetensors import can_be_metadata, can_hold, parse_safetensors, safetensors_header
from smb.spi import encode
from smb.tensors import TensorTable

_npy: Any = np.lib.format  # has no types before numpy 2.3

METADATA_KEY = "safetensors"  # in a buffer's metadata: __metadata__ of the file that it was made from
FILES_KEY = "smb.files"  # in a buffer's metadata: facts about its file that its bytes do not show
EMPTY = {"nbytes": 0}  # the entry under FILES_KEY of an empty file, since a buffer has at least one byte
_NPY_HEADER_BYTES_MAX = 10 + 0xFFFF
# The header as numpy writes it, for the kinds of numbers that a buffer can have. numpy's own reader evaluates the text
# as Python, so it raises errors of the tokenizer and the parser, and warns of some kinds, which is an error under
# `python -W error`.
_NPY_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<|][biufc]\d{1,2})', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(?:\d{1,20}(?:, \d{1,20}){0,%d},?)?)\), \} *\n" % (DIMENSIONS_MAX - 1)
)


@dataclass(frozen=True, slots=True)
class FileExtent:
    """`length` bytes of a file from byte `at` on: those of the buffer from its byte `start` on, or those of
    `header`.
    """

    at: int
    length: int
    start: int = 0
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class FileView:
    """A file's extents, in order and without gaps."""

    extents: tuple[FileExtent, ...]
    nbytes: int

    def parts(self, offset: int, length: int) -> Iterator[tuple[int, int, FileExtent, int]]:
        """Yield (from, to, extent, offset in the extent) for a range of the file.

        `from` and `to` count from the range's start. Bytes past the file's end are left out.
        """
        end = min(offset + length, self.nbytes)
        for extent in self.extents:
            first, last = max(offset, extent.at), min(end, extent.at + extent.length)
            if first < last:
                yield first - offset, last - offset, extent, first - extent.at


@dataclass(frozen=True, slots=True)
class FileSpec:
    """The buffer that a file becomes: dtype and shape, or tensors, and the location of the file's bytes in it."""

    name: str
    view: FileView
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    tensors: TensorTable | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def forms_of(dtype: np.dtype[Any], shape: tuple[int, ...], table: TensorTable | None) -> tuple[Form, ...]:
    """Return the forms to show. An array of plain bytes needs no .npy form."""
    if table:
        return (Form.RAW, Form.NPY, Form.SAFETENSORS) if can_hold(table) else (Form.RAW, Form.NPY)
    return (Form.RAW,) if dtype == np.uint8 and len(shape) == 1 else (Form.RAW, Form.NPY)


def view_of(
    form: Form, dtype: np.dtype[Any], shape: tuple[int, ...], table: TensorTable | None, metadata: Mapping[str, Any]
) -> FileView | None:
    """Return the view of such a buffer in that form; None if the buffer does not have that form."""
    nbytes = math.prod(shape) * dtype.itemsize
    if form is Form.RAW and may_be_empty(dtype, shape) and _of_file(metadata).items() >= EMPTY.items():
        return FileView((), 0)
    if form is Form.RAW:
        return _with_header(b"", [(0, nbytes)])
    if form is Form.NPY:
        return _with_header(npy_header(dtype, shape), [(0, nbytes)])
    if not table or not can_hold(table):
        return None
    own = metadata.get(METADATA_KEY)  # another program may have stored anything there
    header = safetensors_header(table, own if can_be_metadata(own) else None)
    return _with_header(header, [(info.offset, info.nbytes) for info in table.values()])


def path_in(metadata: Mapping[str, Any]) -> str | None:
    """Return the path that the metadata of a buffer has whose name is a digest; None if there is none."""
    name = _of_file(metadata).get("name")
    return path_of(name) if isinstance(name, str) else None


def named(spec: FileSpec) -> FileSpec:
    """Return the spec, with its path in the metadata if the name cannot express it."""
    if not is_long(name_of(spec.name)):
        return spec
    entry = {**_of_file(spec.metadata), "name": escaped(spec.name)}
    return replace(spec, metadata={**spec.metadata, FILES_KEY: entry})


def _of_file(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = metadata.get(FILES_KEY)
    return entry if isinstance(entry, Mapping) else {}


def may_be_empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return True if the metadata has to be checked: the buffer may stand for an empty file."""
    return shape == (1,) and dtype == np.uint8


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header that numpy.save writes for a C-contiguous array; bfloat16 is "<V2" there."""
    file = io.BytesIO()
    _npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return file.getvalue()


def spec_of(path: str, head: bytes, nbytes: int) -> FileSpec:
    """Return the buffer that a new file of `nbytes` bytes becomes; `head` is its beginning.

    That is a typed buffer if it shows the same bytes, else one of bytes under the file's whole name. `head` has at
    least header_bytes() bytes, or the whole file.
    """
    if nbytes == 0:
        return FileSpec(path, FileView((), 0), shape=(1,), metadata={FILES_KEY: EMPTY})
    spec = None
    if path.endswith(Form.NPY.value) and not path.endswith("/" + Form.NPY.value):
        spec = _npy_spec(path[: -len(Form.NPY.value)], head)
    elif path.endswith(Form.SAFETENSORS.value) and not path.endswith("/" + Form.SAFETENSORS.value):
        spec = _safetensors_spec(path[: -len(Form.SAFETENSORS.value)], head)
    if spec is not None and spec.view.nbytes == nbytes and head.startswith(spec.view.extents[0].header):
        return spec
    return plain_spec(path, nbytes)


def plain_spec(path: str, nbytes: int) -> FileSpec:
    """Return the buffer of bytes that a non-empty file becomes under its whole name."""
    return FileSpec(path, _with_header(b"", [(0, nbytes)]), shape=(nbytes,))


def header_bytes(head: bytes) -> int:
    """Return how many bytes of a file spec_of needs, given the first 16."""
    if head.startswith(b"\x93NUMPY"):
        return _NPY_HEADER_BYTES_MAX
    size = int.from_bytes(head[:8], "little")
    return 8 + size if 0 < size <= HEADER_BYTES_MAX and head[8:9] == b"{" else 16


def _npy_spec(name: str, head: bytes) -> FileSpec | None:
    size = int.from_bytes(head[8:10], "little")
    if not head.startswith(b"\x93NUMPY\1\0") or (found := _NPY_HEADER.fullmatch(head, 10, 10 + size)) is None:
        return None
    try:
        dtype = np.dtype(found["descr"].decode())
    except (TypeError, ValueError):
        return None
    shape = tuple(int(extent) for extent in re.findall(rb"\d+", found["shape"]))
    if dtype.name not in DTYPES or any(extent < 1 for extent in shape) or Form.NPY not in forms_of(dtype, shape, None):
        return None
    # In the buffer's byte order: with another one the header differs, and the file is kept as bytes.
    view = view_of(Form.NPY, DTYPES[dtype.name].numpy, shape, None, {})
    return FileSpec(name, view, dtype.name, shape) if view is not None else None


def _safetensors_spec(name: str, head: bytes) -> FileSpec | None:
    try:
        table, own, _ = parse_safetensors(head)
    except InvalidArgumentError:
        return None
    metadata: dict[str, Any] = {} if own is None else {METADATA_KEY: own}
    try:
        encode("", {**metadata, **table.to_metadata()})
    except InvalidArgumentError:  # more than a buffer can hold
        return None
    view = view_of(Form.SAFETENSORS, table.dtype, (table.size,), table, metadata)
    return FileSpec(name, view, tensors=table, metadata=metadata) if view is not None else None


def _with_header(header: bytes, ranges: list[tuple[int, int]]) -> FileView:
    """Return the view of a header followed by these (start, length) of the buffer, neighbours joined."""
    extents = [FileExtent(0, len(header), header=header)] if header else []
    end = len(header)
    for start, length in ranges:
        last = extents[-1] if extents and not extents[-1].header else None
        if last is not None and last.start + last.length == start:
            extents[-1] = FileExtent(last.at, last.length + length, last.start)
        elif length:
            extents.append(FileExtent(end, length, start))
        end += length
    return FileView(tuple(extents), end)
