"""Others ask a scheme's traits: one that is made in this file alone is planned, listed and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import pytest

from smb.errors import InvalidArgumentError
from smb.overlap.hooks import check_overlap
from smb.tools.demo.recipes import recipe
from smb.tools.plan.model import CALLING, Question, parts_s, rows
from smb.tools.plan.network import Network
from smb.tools.plan.spec import make_spec
from smb.train import BSP, DiLoCo, LocalSGD, Scheme, scheme_of
from smb.train.scheme import SCHEMES, by_traits
from smb.train.traits import Traits

QUESTION = Question(
    make_spec(
        {"layers": [{"bytes": 1000, "forward_ms": 1, "backward_ms": 2}] * 2, "batch": 1}, "two layers"
    ),
    Network(1e6, 1e6, 0.1, 0.1, "by hand"),
    every=10,
)  # fmt: skip


@pytest.fixture
def own() -> Iterator[type[Scheme]]:
    """A scheme that nothing else in the project names."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(BSP):
        NAME: ClassVar[str] = "own"
        TRAITS: ClassVar[Traits] = dataclasses.replace(BSP.TRAITS, calls=99)

    yield Own
    del SCHEMES["own"]


def test_a_scheme_is_one_file(own: type[Scheme]) -> None:
    """Nothing but its class says what it costs, that overlap= is for it, and where it stands in lists."""
    assert scheme_of("own", {}) == own()
    check_overlap("both", own())
    assert {row.overlap for row in rows(QUESTION, 2, ("own",))} == {"none", "forward", "both"}
    assert parts_s(QUESTION, "own", 1)[CALLING] == pytest.approx(9.9)
    assert recipe("own").settings == {}
    names = [name for name, _ in by_traits()]
    assert names.index("bsp") < names.index("own") < names.index("asp") < names.index("localsgd")
    with pytest.raises(InvalidArgumentError, match="for bsp, own, asp, ssp, r2sp, not for 'localsgd'"):
        check_overlap("both", LocalSGD(every=5))


def test_traits_follow_settings() -> None:
    """What settings change of a scheme its traits tell."""
    plain, streaming = DiLoCo().traits, DiLoCo(fragments=2, delay=3, step_wire="int8").traits
    assert (plain.fragments, plain.delay, plain.step_wire) == (1, 0, "exact")
    assert (streaming.fragments, streaming.delay, streaming.step_wire) == (2, 3, "int8")
    assert streaming.calls > plain.calls
    with pytest.raises(InvalidArgumentError, match="in the background already"):
        check_overlap("both", DiLoCo(fragments=2))
    with pytest.raises(InvalidArgumentError, match="not with these settings of 'r2sp': with batch_size="):
        check_overlap("both", scheme_of("r2sp", {"batch_size": 8}))
    check_overlap("both", scheme_of("r2sp", {}))
