"""Requests by reference as numpy arrays. csrc/base/frame.h describes the frame and the record. Pure code."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from smb.engine import RECORD_BYTES as RECORD_BYTES
from smb.engine import Opcode
from smb.transport.verbs.queue_pair import FRAME_BYTES

NO_SLOT = 2**64 - 1
REPLY, RETRY = 1 << 0, 1 << 2  # flags

_HEADER = [
    ("magic", "<u2"), ("version", "u1"), ("opcode", "u1"), ("dtype", "u1"), ("op", "u1"), ("flags", "<u2"),
    ("status", "<u2"), ("lane", "<u2"), ("epoch", "<u4"), ("session", "<u8"), ("sequence", "<u8"), ("segment", "<u8"),
    ("offset", "<u8"), ("length", "<u4"), ("payload", "<u4"), ("argument", "<u8"),
]  # fmt: skip
HEADER = np.dtype(_HEADER)
RECORD = np.dtype(
    [*_HEADER, ("small", "V104"), ("source", "<u8"), ("sink", "<u8"), ("source_bytes", "<u4"), ("sink_bytes", "<u4")]
)
assert (HEADER.itemsize, RECORD.itemsize) == (FRAME_BYTES, RECORD_BYTES)

Records = np.ndarray[Any, Any]


def answers(records: Records) -> bytes:
    """Return the reply frames of requests that were done, with the data of reads."""
    replies = np.zeros(len(records), HEADER)
    for name in ("magic", "version", "opcode", "dtype", "op", "lane", "epoch", "session", "sequence", "segment"):
        replies[name] = records[name]
    replies["flags"] = records["flags"] | REPLY
    replies["length"] = replies["payload"] = np.where(records["opcode"] == Opcode.READ, records["length"], 0)
    return replies.tobytes()


def runs(records: Records, most_bytes: int, kinds: Records) -> list[tuple[int, int]]:
    """Cut records into ranges [first, end) of one kind that are adjacent in the segment and in the caller's memory."""
    if len(records) == 0:
        return []
    here = np.where(records["opcode"] == Opcode.READ, records["sink"], records["source"])
    length = records["length"].astype(np.uint64)
    breaks = (
        (kinds[1:] != kinds[:-1])
        | (records["segment"][1:] != records["segment"][:-1])
        | (records["offset"][1:] != records["offset"][:-1] + length[:-1])
        | (here[1:] != here[:-1] + length[:-1])
    )
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(records)]
    cut = []
    for first, end in itertools.pairwise(starts):
        each = max(1, most_bytes // max(1, int(np.max(length[first:end]))))  # a token and a question have no range
        cut += [(at, min(at + each, end)) for at in range(first, end, each)]
    return cut
