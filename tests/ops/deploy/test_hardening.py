"""The compiled engine has what makes a fault of it worth less to an attacker, as the files themselves say."""

from __future__ import annotations

import platform
import struct
from pathlib import Path

import pytest

import smb._direct
import smb._engine

PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_FLAGS, DT_FLAGS_1, DF_BIND_NOW, DF_1_NOW, PF_X = 30, 0x6FFFFFFB, 0x8, 0x1, 1
ENDBR64 = bytes.fromhex("f30f1efa")


def segments(elf: bytes) -> dict[int, tuple[int, bytes]]:
    """Return the flags and bytes of each kind of segment of a 64-bit ELF file."""
    assert elf[:6] == b"\x7fELF\x02\x01"
    (start,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    found = {}
    for at in range(start, start + size * count, size):
        kind, flags, offset, _, _, length = struct.unpack_from("<IIQQQQ", elf, at)
        found[kind] = flags, elf[offset : offset + length]
    return found


@pytest.mark.parametrize("module", [smb._engine, smb._direct], ids=["engine", "direct"])
def test_nothing_that_is_called_can_be_overwritten(module: object) -> None:
    """Addresses are resolved at the start and read-only from then on; the stack holds no code and is guarded."""
    elf = Path(str(module.__file__)).read_bytes()  # type: ignore[attr-defined]
    found = segments(elf)
    assert PT_GNU_RELRO in found
    assert not found[PT_GNU_STACK][0] & PF_X
    dynamic = dict(struct.iter_unpack("<QQ", found[PT_DYNAMIC][1]))
    assert dynamic.get(DT_FLAGS, 0) & DF_BIND_NOW
    assert dynamic.get(DT_FLAGS_1, 0) & DF_1_NOW
    assert b"\0__stack_chk_fail\0" in elf


def test_copies_of_the_engine_are_checked() -> None:
    """Where the compiler knows the room. And on x86 targets of jumps are marked: they are over a thousand."""
    elf = Path(str(smb._engine.__file__)).read_bytes()
    if b"__asan_init" in elf or b"__tsan_init" in elf:
        pytest.skip("a build for a sanitizer, which has checks of its own")
    # Which of them the compiler keeps changes with the code; reads from a socket it can never prove.
    assert b"\0__recv_chk\0" in elf
    if platform.machine() == "x86_64":
        assert elf.count(ENDBR64) > 500
