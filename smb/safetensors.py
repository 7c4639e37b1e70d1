"""The room of .safetensors files (github.com/huggingface/safetensors): writing their header, and parsing it within
limits. Pure. Files and the saved states of trainings import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smb.config.limits import BYTES_MAX, DIMENSIONS_MAX, HEADER_BYTES_MAX, HEADER_PARTS_MAX
from smb.config.untrusted import is_encodable, parse_json, quoted, shortened
from smb.errors import InvalidArgumentError
from smb.tensors import TensorInfo, TensorTable

# Names of element types, little-endian.
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_NUMPY = {name: dtype for dtype, name in _SAFETENSORS.items()}


def safetensors_header(table: TensorTable, metadata: object = None) -> bytes:
    """Return the header of a file in which the tensors follow each other without gaps, as the format requires."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, info in table.items():
        header[name] = {
            "dtype": _SAFETENSORS[info.dtype.name],
            "shape": list(info.shape),
            "data_offsets": [end, end + info.nbytes],
        }
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def can_hold(table: Mapping[str, TensorInfo]) -> bool:
    """Return True if the format has these tensors' dtypes, and their names can be written."""
    return all(info.dtype.name in _SAFETENSORS for info in table.values()) and is_encodable(*table)


def parse_safetensors(
    head: bytes, bytes_max: int = HEADER_BYTES_MAX, parts_max: int = HEADER_PARTS_MAX
) -> tuple[TensorTable, dict[str, str] | None, list[tuple[int, int]]]:
    """Parse the beginning of a file: (table, __metadata__ or None, (first, last) byte of each tensor's data after the
    header).

    The tensors lie one after the other from the first byte of the data on, as the format requires.

    Raises InvalidArgumentError for any other content, and for a header of more than `bytes_max` bytes or more than
    `parts_max` brackets and commas.
    """
    try:
        size = int.from_bytes(head[:8], "little")
        if size > bytes_max:
            raise ValueError(f"it has {size} bytes, but at most {bytes_max} are parsed")
        if len(head) < 8 + size:
            raise ValueError(f"it has {size} bytes, but the file is shorter")
        header = parse_json(head[8 : 8 + size], parts_max)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        metadata = header.pop("__metadata__", None)
        if metadata is not None and not can_be_metadata(metadata):
            raise ValueError("its __metadata__ must map strings to strings")
        if not is_encodable(*header):
            raise ValueError("the name of a tensor contains half of a surrogate pair")
        entries = {name: _entry(name, entry) for name, entry in header.items()}
        ordered = sorted(entries.items(), key=lambda item: item[1][2:])
        table = TensorTable.of({name: entry[:2] for name, entry in ordered}, "the tensors")
        end = 0
        for name, (_, _, first, last) in ordered:
            if first != end:
                raise ValueError(f"the bytes of tensor {quoted(name)} overlap other bytes, or leave a gap before them")
            if last - first != table[name].nbytes:
                raise ValueError(
                    f"tensor {quoted(name)} has {last - first} bytes, but its shape needs {table[name].nbytes}"
                )
            end = last
    except ValueError as error:  # InvalidArgumentError is one
        raise InvalidArgumentError(f"invalid safetensors header: {shortened(error)}") from None
    return table, metadata, [entry[2:] for _, entry in ordered]


def _entry(name: str, entry: object) -> tuple[tuple[int, ...], str, int, int]:
    """Return (shape, dtype, first, last) of a tensor in a header. Raises ValueError."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {quoted(name)} must have a dtype, a shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NUMPY:
        raise ValueError(f"tensor {quoted(name)} has the dtype {quoted(dtype)}, which buffers do not support")
    if not _are_sizes(shape) or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"tensor {quoted(name)} has the invalid shape {quoted(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {quoted(name)} has the invalid data_offsets {quoted(offsets)}")
    return tuple(shape), _NUMPY[dtype], offsets[0], offsets[1]


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= BYTES_MAX for each in value)


def can_be_metadata(metadata: object) -> bool:
    """Return True if it maps strings to strings, as __metadata__ does."""
    return isinstance(metadata, dict) and all(
        isinstance(each, str) and is_encodable(each) for pair in metadata.items() for each in pair
    )
