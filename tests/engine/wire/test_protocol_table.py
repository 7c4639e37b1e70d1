"""csrc/protocol.toml is what the C headers, the Python enums, the page and the server say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from smb import engine
from smb._engine import ffi, lib
from smb.arrays.dtypes import ATOMIC, BITS, DTYPES, OPS, SPARSE_WIRE, WIRES
from tests.support import protocol_table
from tests.support.engine_server import EPOCH, FLOATS, SCRATCH, SEGMENT_BYTES, EngineServer, whole
from tests.support.protocol_table import PAGE, ROOT, TABLE, numbers
from tests.support.raw import HEADER, Dtype, Flag, Frame, Opcode, RawClient, scale_bits

FRAME_H = (ROOT / "csrc" / "base" / "frame.h").read_text()
MORE = 8  # bytes of payload, or of a range, that a frame may not have


def test_the_page_is_what_is_made() -> None:
    """A change of csrc/protocol.toml needs `make protocol-page`, too."""
    assert PAGE.read_text() == protocol_table.page(PAGE.read_text())


@pytest.mark.parametrize(
    ("enum", "kind", "prefix"),
    [
        ("smb_opcode", "opcode", "SMB_"),
        ("smb_status", "status", "SMB_"),
        ("smb_dtype", "dtype", "SMB_"),
        ("smb_op", "op", "SMB_"),
        ("smb_wire", "wire", "SMB_WIRE_"),
        ("smb_rule", "rule", "SMB_RULE_"),
        ("smb_copied", "copied", "SMB_COPIED_"),
    ],
)
def test_numbers_of_the_headers(enum: str, kind: str, prefix: str) -> None:
    """Each enum of csrc/smb/types.h has the same names and numbers; none twice."""
    assert ffi.typeof(f"enum {enum}").relements == {prefix + name.upper(): at for name, at in numbers(kind).items()}
    assert len(set(numbers(kind).values())) == len(TABLE[kind])


def test_what_the_library_says_of_them() -> None:
    """Names of statuses, bytes of elements, how many arrays a rule's state has, and room for every opcode."""
    for name, number in numbers("status").items():
        assert engine.status_name(number) == name.lower()
    named = [number for number in range(-1, lib.SMB_STATUS_COUNT + 1) if engine.status_name(number)]
    assert sorted(numbers("status").values()) == named
    for row in TABLE["dtype"]:
        assert lib.smb_dtype_bytes(row["number"]) == row["bytes"]
        assert lib.smb_dtype_is_atomic(row["number"]) == (row["name"] in ATOMIC)
    for row in TABLE["rule"]:
        assert lib.smb_rule_states(row["number"]) == len(row["state"].replace(",", "").split())
    assert max(numbers("opcode").values()) + 1 == lib.SMB_OPCODE_COUNT


def test_numbers_of_python() -> None:
    """Element types, operations and encodings by their public names, and the statuses that Python tells apart."""
    assert {name: (each.number, each.itemsize, each.storage) for name, each in DTYPES.items()} == {
        row["name"]: (row["number"], row["bytes"], row.get("storage", False)) for row in TABLE["dtype"]
    }
    for row in TABLE["opcode"]:
        assert not row.get("element") or sorted(row["dtypes"]) == sorted(ATOMIC)
    assert numbers("op") == OPS
    assert numbers("wire") == {**WIRES, "sparse": SPARSE_WIRE}
    assert {status.name: status for status in engine.Status}.items() <= numbers("status").items()


def test_the_header_has_no_gaps() -> None:
    """Fields follow each other over 64 bytes; csrc/base/frame.h has the same places, flags, magic and version."""
    at = 0
    for row in TABLE["field"]:
        assert row["offset"] == at
        at += row["bytes"]
    assert at == TABLE["frame"]["bytes"] == HEADER.size
    places = {name.lower(): int(place) for name, place in re.findall(r"SMB_AT_(\w+) = (\d+)", FRAME_H)}
    assert places == {**{row["name"]: row["offset"] for row in TABLE["field"]}, "end": at}
    bits = {name: int(bit) for name, bit in re.findall(r"SMB_FLAG_(\w+) = 1 << (\d+)", FRAME_H)}
    shift, wide = re.search(r"SMB_FLAG_WIRE_SHIFT = (\d+)", FRAME_H), re.search(r"SMB_FLAG_WIRE = (\d+) <<", FRAME_H)
    assert shift
    assert wide
    bits["WIRE"] = int(shift[1])
    assert bits == {row["name"]: row["bit"] for row in TABLE["flag"]}
    assert [(1 << row["bits"]) - 1 for row in TABLE["flag"] if "bits" in row] == [int(wide[1])]
    magic = re.search(r"SMB_FRAME_MAGIC = (\w+), SMB_FRAME_VERSION = (\d+)", FRAME_H)
    assert magic
    assert (int(magic[1], 16), int(magic[2])) == (TABLE["frame"]["magic"], TABLE["frame"]["version"])


def test_the_pages_example(server: EngineServer) -> None:
    """The bytes of docs/protocol.md, sent as they stand there, are answered with the bytes that stand there."""
    server.write_segment(SCRATCH, bytes(SEGMENT_BYTES))
    asked = []
    with server.connect() as client:
        for side, expected in example_of(PAGE.read_text()):
            if side == "C":
                client.socket.sendall(expected)
                asked.append(Opcode(expected[3]))
            else:
                assert client.receive_bytes(len(expected)).hex(" ") == expected.hex(" ")
    assert asked == [Opcode.HELLO, Opcode.WRITE, Opcode.ACCUMULATE, Opcode.READ]


def example_of(text: str) -> list[tuple[str, bytes]]:
    """Return what the page's worked example sends ("C") and receives ("S"), in order."""
    steps: list[tuple[str, bytes]] = []
    for block in re.findall(r"```hex\n(.*?)```", text, re.S):
        for line in block.splitlines():
            side, _, rest = line.partition(" ")
            digits = bytes.fromhex(rest.split("#")[0])
            if steps and steps[-1][0] == side:
                steps[-1] = (side, steps[-1][1] + digits)
            else:
                steps.append((side, digits))
    return steps


def sound(row: dict[str, Any]) -> Frame:
    """Return a request that has what the table demands, of two elements or one word, and nothing else."""
    dtype = Dtype[row.get("dtypes", ["float32"])[0].upper()]
    length = (8 if dtype == Dtype.INT64 or row["payload"] == "elements" else 16) if row["range"] else 0
    payload = length if row["payload"] == "elements" else row["payload"]
    frame = whole(row["number"], SCRATCH if dtype == Dtype.INT64 else FLOATS, 0, length)
    first = {"op": 1, "rule": 1, "copied": 0}.get(row.get("op", ""), 0)
    return replace(
        frame, dtype=dtype if row["range"] else 0, op=first, payload=payload, epoch=EPOCH, sequence=1,
        argument=scale_bits(1.0) if row.get("op") == "op" else 0,
    )  # fmt: skip


def variants(row: dict[str, Any]) -> Iterator[tuple[str, Frame, bool]]:
    """Yield frames of this opcode that differ from a sound one in one thing, and whether the table allows that."""
    frame, flags = sound(row), row.get("flags", [])
    yield "nothing", frame, True
    yield "payload", replace(frame, payload=frame.payload + MORE), False
    if frame.payload:
        yield "no payload", replace(frame, payload=0), False
    yield "fetch", replace(frame, flags=Flag.FETCH), "FETCH" in flags
    yield "fenced", replace(frame, flags=Flag.FENCED, payload=frame.payload + 8), "FENCED" in flags
    fences = {
        "no warden": (Flag.FENCED | Flag.WARDEN, 8, row["name"] == "APPLY"),
        "a warden": (Flag.FENCED | Flag.WARDEN, 16, row["name"] != "APPLY"),
        "a warden alone": (Flag.WARDEN, 16, False),
        "the flag of a warden alone": (Flag.WARDEN, 0, False),
    }
    for name, (flag, more, fits) in fences.items():
        yield name, replace(frame, flags=flag, payload=frame.payload + more), fits and "FENCED" in flags
    yield "reply", replace(frame, flags=Flag.REPLY), False
    yield "status", replace(frame, status=1), False
    yield "sequence 0", replace(frame, sequence=0), not row.get("numbered")
    yield "range", replace(frame, length=0 if row["range"] else MORE), False
    if row["range"]:
        yield "no dtype", replace(frame, dtype=0), False
        for other in TABLE["dtype"]:
            length = other["bytes"] if row.get("element") else frame.length
            payload = length if row["payload"] == "elements" else frame.payload
            changed = replace(
                frame, dtype=other["number"], segment=SCRATCH, length=length, payload=payload,
                op=OPS["replace"] if row.get("op") == "op" else frame.op,
            )  # fmt: skip
            yield other["name"], changed, other["name"] in row.get("dtypes", DTYPES)
        if row.get("element"):
            yield "two elements", replace(frame, length=2 * frame.length), False
    for name, number in numbers("wire").items():
        if number:
            encoded = {"sparse": 8, "int8": 6, "int4": 5}.get(name, frame.length // 2)
            payload = encoded if row["payload"] == "elements" else frame.payload
            yield name, replace(frame, flags=number << 4, payload=payload), name in row.get("wires", [])
    for op in TABLE["op"] if row.get("op") == "op" else ():
        for other in TABLE["dtype"]:
            payload = other["bytes"] if row["payload"] == "elements" else frame.payload
            changed = replace(
                frame, dtype=other["number"], segment=SCRATCH, length=other["bytes"], payload=payload, op=op["number"]
            )
            bits = other["name"].startswith(("int", "uint", "bool"))
            allowed = bits if op["name"] in BITS else op["name"] == "replace" or not other.get("storage")
            yield f"{op['name']} of {other['name']}", changed, allowed
    if row.get("op"):
        yield "an unknown op", replace(frame, op=len(TABLE[row["op"]]) + 1), False


# HELLO was said before.
@pytest.mark.parametrize("row", [row for row in TABLE["opcode"] if row["name"] != "HELLO"], ids=lambda row: row["name"])
def test_each_rule_of_each_opcode(server: EngineServer, row: dict[str, Any]) -> None:
    """The server answers a request that the table allows. It closes the connection at any other, and counts that."""
    tried = 0
    for what, frame, allowed in variants(row):
        if row["name"] == "REPLICATE" and allowed:
            continue  # refused on a client's connection, however sound
        before = server.counters()["errors"]["protocol"]
        with server.hello() as client:
            sent = replace(frame, session=client.session, sequence=frame.sequence and client.sequence + 1)
            client.socket.sendall(sent.pack() + bytes(frame.payload))
            assert answers(client) == allowed, what
        assert server.counters()["errors"]["protocol"] == before + (not allowed), what
        tried += 1
    assert tried > 1


def answers(client: RawClient) -> bool:
    """Whether the next thing that comes is a reply, and not the end of the stream."""
    try:
        return bool(client.receive()[0].flags & Flag.REPLY)
    except ConnectionError:
        return False
