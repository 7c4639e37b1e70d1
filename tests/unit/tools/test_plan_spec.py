"""Specs: what they say, and what is said of those that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smb.errors import InvalidArgumentError
from smb.tools.plan.spec import Compute, make_spec, read_spec

LAYERS = [{"parameters": 10, "forward_ms": 1, "backward_ms": 2}, {"bytes": "1KiB", "forward_ms": 3, "backward_ms": 6}]


def test_layers_and_two_batches(tmp_path: Path) -> None:
    """compute_ms decides how long a step takes, layers how that is divided."""
    file = tmp_path / "mine.toml"
    file.write_text(
        "batch = 32\n[compute_ms]\n16 = 14\n32 = 24.0\n"
        "[[layers]]\nparameters = 10\nforward_ms = 1\nbackward_ms = 2\n"
        '[[layers]]\nname = "last"\nbytes = "1KiB"\nforward_ms = 3\nbackward_ms = 6\n'
    )
    spec = read_spec(file)
    assert (spec.name, spec.batch, spec.nbytes, spec.by_layer) == ("mine", 32, 40 + 1024, True)
    assert spec.compute.seconds(64) == pytest.approx(0.044)
    assert [layer.forward_s for layer in spec.layers] == pytest.approx([0.002, 0.006])
    assert [layer.backward_s for layer in spec.layers_at(64)] == pytest.approx([0.044 / 6, 0.022])


def test_without_layers() -> None:
    """One layer stands for all, with a third of the time forward."""
    spec = make_spec({"parameters": 5e6, "batch": 8, "compute_ms": {"8": 30, "16": 60}}, "whole")
    assert (spec.nbytes, len(spec.layers), spec.by_layer) == (20_000_000, 1, False)
    assert spec.layers[0].forward_s == pytest.approx(0.010)
    assert (spec.compute.fixed_s, spec.compute.sample_s) == pytest.approx((0.0, 0.00375))


def test_without_two_batches() -> None:
    """Computing is in proportion to the batch."""
    spec = make_spec({"layers": LAYERS, "batch": 4}, "by layers")
    assert spec.compute == Compute(0.0, 0.003)


CONNECTED = {"parameters": 12, "forward_ms": 1, "kind": "fc", "inputs": 4}


@pytest.mark.parametrize(
    "told",
    [
        {"layers": LAYERS, "batch": 4},
        {"layers": [*LAYERS, CONNECTED], "batch": 4},
        {"bytes": 8, "compute_ms": {"1": 2, "4": 3}},
    ],
)
def test_json_is_read_again(told: dict[str, Any], tmp_path: Path) -> None:
    """What `smb plan --json` has under "spec" is a spec."""
    spec = make_spec(told, "again")
    file = tmp_path / "again.json"
    file.write_text(json.dumps(spec.to_json()))
    again = read_spec(file)
    assert (again.name, again.batch, again.nbytes, again.by_layer, again.inputs) == (
        spec.name,
        spec.batch,
        spec.nbytes,
        spec.by_layer,
        spec.inputs,
    )
    assert spec.inputs == ((0, 0, 4) if CONNECTED in told.get("layers", ()) else ())
    for batch in (1, 64):
        assert again.compute.seconds(batch) == pytest.approx(spec.compute.seconds(batch))
        assert [x.backward_s for x in again.layers_at(batch)] == pytest.approx(
            [x.backward_s for x in spec.layers_at(batch)]
        )


def test_noise_makes_no_negative_part() -> None:
    """A larger batch that was faster, or so much slower that a step of none would take less than nothing."""
    assert Compute.through({8: 0.030, 16: 0.028}) == Compute(pytest.approx(0.029), 0.0)
    assert Compute.through({8: 0.010, 16: 0.030}) == Compute(0.0, pytest.approx(0.020 / 12))
    assert Compute.through({8: 0.010, 16: 0.015, 24: 0.020}).seconds(40) == pytest.approx(0.030)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ([], "a spec must be a table"),
        ({}, "needs layers or compute_ms"),
        (
            {"bytes": 4, "compute_ms": {"1": 1, "2": 2}, "layer": []},
            "a spec must not have 'layer'; it takes batch, bytes",
        ),
        ({"compute_ms": {"1": 1, "2": 2}}, "the spec needs exactly one of parameters and bytes"),
        ({"bytes": 4, "parameters": 1, "compute_ms": {"1": 1, "2": 2}}, "the spec needs exactly one of"),
        ({"bytes": 0, "compute_ms": {"1": 1, "2": 2}}, "nothing to exchange"),
        ({"bytes": "4 potatoes", "compute_ms": {"1": 1, "2": 2}}, "a size must be"),
        ({"parameters": 1.5, "compute_ms": {"1": 1, "2": 2}}, "parameters of the spec must be an integer"),
        ({"parameters": float("inf"), "compute_ms": {"1": 1, "2": 2}}, "parameters of the spec must be an integer"),
        ({"bytes": 4, "compute_ms": {"1": 1}}, "at least two batches"),
        ({"bytes": 4, "compute_ms": {"one": 1, "2": 2}}, "a batch must be a positive integer, not 'one'"),
        ({"bytes": 4, "compute_ms": {"1": 0, "2": 2}}, "the time of a step must be more than 0"),
        ({"bytes": 4, "compute_ms": {"1": True, "2": 2}}, "compute_ms of 1 must be a number of milliseconds, not True"),
        ({"bytes": 4, "compute_ms": 7}, "compute_ms must be a table"),
        (
            {"bytes": 4, "batch": 0, "compute_ms": {"1": 1, "2": 2}},
            "batch must be a number of samples, at least 1, not 0",
        ),
        ({"layers": []}, "1 to 1000 tables"),
        ({"layers": [7]}, "layer 1 must be a table"),
        ({"layers": LAYERS, "bytes": 4}, "leave out the spec's"),
        ({"layers": [{"bytes": 4, "forwards_ms": 1}]}, "layer 1 must not have 'forwards_ms'"),
        (
            {"layers": [{"bytes": 4, "forward_ms": -1}]},
            "forward_ms of layer 1 must be a number of milliseconds, not -1",
        ),
        ({"layers": [{"bytes": 4}]}, "at least one layer must take time"),
        ({"layers": [CONNECTED | {"kind": "conv"}]}, "kind of layer 1 must be \"fc\".* not 'conv'"),
        ({"layers": [CONNECTED | {"inputs": 0}]}, "inputs of layer 1 must be the number of values"),
        ({"layers": [{"bytes": 4, "forward_ms": 1, "kind": "fc"}]}, "inputs of layer 1 must be .* not None"),
        ({"layers": [{"bytes": 4, "forward_ms": 1, "inputs": 4}]}, 'inputs of layer 1 needs kind = "fc"'),
        ({"layers": [{"bytes": 0, "forward_ms": 1}]}, "at least one layer must have parameters"),
    ],
)
def test_what_is_no_spec(told: Any, error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        make_spec(told, "bad")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.toml", "batch = ", "a.toml: Invalid value"),
        ("a.json", "{", "a.json: it is not JSON: Expecting"),
        ("a.json", "{}", "a.json: a spec needs layers"),
        ("a.toml", None, "a.toml: No such file"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, name: str, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgumentError, match=error):
        read_spec(tmp_path / name)
