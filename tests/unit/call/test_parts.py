"""Parts of a call: of a source that is brought, and of a change that servers have sent away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import smb
from smb import engine
from smb.call.accounts import account_part
from smb.call.outcomes import Failed
from smb.call.unfinished_calls import cut, part_of
from smb.engine import NOWHERE, Opcode, Request
from smb.errors import NOT_APPLIED, UNKNOWN, CallOutcome


def test_no_chunk_iscut() -> None:
    """Every part but the last ends where a chunk does, wherever the first begins: a chunk changes as a whole."""
    assert list(cut(range(5, 30), 8)) == [range(5, 8), range(8, 16), range(16, 24), range(24, 30)]
    assert list(cut(range(16, 24), 8)) == [range(16, 24)]
    assert list(cut(range(3, 3), 8)) == []


def test_a_part_of_a_change() -> None:
    """Its elements of the source and of the sink; of some elements those that lie in it, if there are any."""
    values, found = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    whole = Request(
        Opcode.ACCUMULATE, 400, 40, source=engine.memory_of(values), sink=engine.memory_of(found.view(np.uint8)), wire=2
    )
    part = part_of(whole, range(104, 107), 4)
    assert part is not None
    assert (part.offset, part.nbytes, part.wire, part.opcode) == (416, 12, 2, Opcode.ACCUMULATE)
    for memory, array in ((part.source, values), (part.sink, found)):
        assert engine.address_of(memory) == array.ctypes.data + 16
    filled = part_of(Request(Opcode.FILL, 0, 40, argument=7), range(2, 5), 4)
    assert filled is not None
    assert (filled.offset, filled.nbytes, filled.argument, filled.source is NOWHERE) == (8, 12, 7, True)
    where = np.array([3, 8, 20, 21], np.int64)
    sparse = Request(Opcode.ACCUMULATE, 12, 76, source=engine.memory_of(values), indices=where)
    part = part_of(sparse, range(5, 21), 4)
    assert part is not None
    assert (part.offset, part.nbytes, part.indices.tolist()) == (32, 52, [8, 20])
    assert engine.address_of(part.source) == values.ctypes.data + 4
    assert part_of(sparse, range(9, 20), 4) is None


@pytest.mark.parametrize(
    ("inner", "outcome", "said"),
    [
        ([], NOT_APPLIED, [range(4), range(8, 12)]),
        ([range(2, 4)], UNKNOWN, [range(2, 4), range(8, 12)]),
        ([], UNKNOWN, []),
    ],
)
def test_what_a_failed_part_means_for_the_call(inner: list[range], outcome: CallOutcome, said: list[range]) -> None:
    """What is known not to be applied of a part that was cut again is missing, and so are the parts after it."""
    error: Any = smb.UnavailableError("away")
    error.outcome, error.smb_account = outcome, Failed(SimpleNamespace(), range(4), None, missing=tuple(inner))
    arguments = SimpleNamespace(elements=lambda asked: range(asked.nbytes // 8), asked_by=lambda _: "accumulate")
    asking: Any = SimpleNamespace(arguments=arguments)
    request = Request(Opcode.ACCUMULATE, 0, 96)
    part = request._replace(nbytes=32)
    account_part(asking, error, request, [range(4), range(8, 12)], part, "in parts")
    assert list(error.smb_account.missing) == said
    assert error.outcome == UNKNOWN
