"""smb.coordinator.validate: what can be asked of a create at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.records import Kind
from smb.coordinator.validate import Creation, check_creation, check_server_name, first_use

GOOD = Creation("model/layer-1", (10, 10), "float32")


def test_a_sound_creation_passes_unchanged() -> None:
    """Names with parts, scalars, and every wish at once are fine."""
    assert check_creation(GOOD, replicas=1) == GOOD
    for good in (replace(GOOD, shape=()), replace(GOOD, server_names=("a", "b"), server_count=2, stripe_bytes=8192)):
        assert check_creation(good, replicas=0) == good
    assert GOOD.nbytes == 400
    assert replace(GOOD, shape=(), dtype="bfloat16").nbytes == 2


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a/../b", ".", "a b", "ü", "a\n", "x" * 256])
def test_bad_names_are_refused(name: str) -> None:
    """Anything that is no path of plain parts; the length's limit is named."""
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot name a buffer|at most 255"):
        check_creation(replace(GOOD, name=name), replicas=1)
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot name a barrier|at most 255"):
        first_use(Kind.BARRIER, name)


def test_locks_and_barriers_have_their_form_and_one_server() -> None:
    """Nothing about them is the client's but the name, and a buffer of that name is another thing."""
    lock, barrier = first_use(Kind.LOCK, "a/b"), first_use(Kind.BARRIER, "a/b")
    assert (lock.shape, lock.dtype, lock.server_count, lock.exist_ok) == ((1,), "int64", 1, True)
    assert (barrier.shape, barrier.dtype, barrier.server_count) == ((8192,), "int64", 1)
    assert len({lock.key, barrier.key, replace(GOOD, name="a/b").key}) == 3
    assert check_creation(lock, replicas=1) == lock
    assert (first_use(Kind.LOCK, "a/b", 2).replicas, first_use(Kind.LOCK, "a/b", 0).replicas) == (2, 1)
    for kind, replicas in ((Kind.LOCK, 3), (Kind.BARRIER, 2)):
        with pytest.raises(errors.InvalidArgumentError, match=f"{kind.value} 'a/b': .*not {replicas}"):
            first_use(kind, "a/b", replicas)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shape": (3, -1)}, "negative extent"),
        ({"shape": (1,) * 33}, "at most 32"),
        ({"dtype": "complex128"}, 'dtype must be one of float16, .*not "complex128"'),
        ({"dtype": ""}, "dtype must be one of"),
        ({"stripe_bytes": 5000}, "multiple of 4096"),
        ({"server_names": ("a", "a")}, "each server may be named once, not a, a"),
        ({"server_names": ("a", "b"), "server_count": 3}, "asks for 3 servers, but names 2"),
        ({"like": "w", "server_count": 2}, "the other buffer decides servers and stripe"),
        ({"like": "w", "stripe_bytes": 4096}, "the other buffer decides servers and stripe"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(change: dict[str, object], told: str) -> None:
    """Each refusal names the buffer and what is wrong."""
    with pytest.raises(errors.InvalidArgumentError, match=told) as refused:
        check_creation(replace(GOOD, **change), replicas=1)  # type: ignore[arg-type]
    assert "model/layer-1" in str(refused.value)


def test_what_is_not_there_is_said_to_be_so() -> None:
    """Numbers of copies and of versions that there are not are refused, not ignored. Both at once may be."""
    with pytest.raises(errors.InvalidArgumentError, match="replicas must be 1 or 2, not 3"):
        check_creation(GOOD, replicas=3)
    assert check_creation(GOOD, replicas=2).replicas == 2
    for versions in (2, 3, 16):
        for replicas in (1, 2):
            check_creation(replace(GOOD, versions=versions), replicas=replicas)
    for versions in (0, 17):
        with pytest.raises(errors.InvalidArgumentError, match=f"versions must be from 1 to 16, not {versions}"):
            check_creation(replace(GOOD, versions=versions), replicas=1)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "../x"])
def test_a_server_name_must_do_as_part_of_a_file_name(name: str) -> None:
    """A slash or a space is refused; the host names that people have are fine."""
    check_server_name("node-01.rack_2")
    with pytest.raises(errors.InvalidArgumentError, match="cannot name a memory server"):
        check_server_name(name)
