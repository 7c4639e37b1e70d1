"""A model as the plan sees it: bytes of its layers, seconds of its passes. Read from a small TOML or JSON file.

    name = "mine"
    batch = 32                  # samples of a worker's step
    [[layers]]                  # in the order of the forward pass
    parameters = 1728           # or bytes = 6912, "6.75 KiB"
    forward_ms = 3.1            # for that batch
    backward_ms = 6.2
    kind = "fc"                 # optional: fully connected, so that a mesh can divide it by its outputs
    inputs = 27                 # with kind: values of one sample that the layer takes
    [compute_ms]                # both passes and the optimizer, at two batches
    16 = 110.0
    32 = 200.0

Either layers or compute_ms may be left out; without layers `parameters` (or `bytes`) says how large the model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smb.config.limits import BYTES_MAX, SETTINGS_BYTES_MAX
from smb.config.parse import parse_bytes
from smb.config.untrusted import parse_json, parse_toml, quoted, read_text, shortened
from smb.errors import InvalidArgumentError
from smb.train.partition import Layer

_FLOAT_BYTES = 4  # parameters are exchanged as float32
# fraction of both passes, if layers are not given: backward computes two products for each of forward's
_FORWARD_SHARE = 1 / 3
_LAYERS_MAX = 1000  # a plan for this many takes seconds
_PARTS_MAX = 16 * _LAYERS_MAX  # limit of brackets and commas in JSON: a layer has 6
_MILLISECONDS_MAX = 1e15  # for one layer or step; thousands of years, so sums and products stay finite floats
_BATCH_MAX = 1 << 40  # samples; the square is still a float
_TOP = {"name", "batch", "parameters", "bytes", "compute_ms", "layers"}
_LAYER = {"name", "parameters", "bytes", "forward_ms", "backward_ms", "kind", "inputs"}
_FULLY_CONNECTED = "fc"


@dataclass(frozen=True)
class Compute:
    """A step of b samples takes fixed_s + sample_s * b seconds: both passes and the optimizer."""

    fixed_s: float
    sample_s: float

    def seconds(self, batch: float) -> float:
        """Return the time of one step."""
        return self.fixed_s + self.sample_s * batch

    @classmethod
    def through(cls, times_s: Mapping[int, float]) -> Compute:
        """Return the line through the times at two or more batches (least squares); neither part is below 0.

        Raises InvalidArgumentError.
        """
        if len(times_s) < 2:
            raise InvalidArgumentError("compute_ms needs times for at least two batches")
        batches, times = list(times_s), list(times_s.values())
        middle, mean = sum(batches) / len(batches), sum(times) / len(times)
        slope = sum((b - middle) * (t - mean) for b, t in times_s.items()) / sum((b - middle) ** 2 for b in batches)
        if slope <= 0 or slope * middle > mean:
            # Noise: the time is all fixed, or all proportional to the batch.
            return cls(mean, 0.0) if slope <= 0 else cls(0.0, mean / middle)
        return cls(mean - slope * middle, slope)


@dataclass(frozen=True)
class Spec:
    """The model. The layers' times are those of a step of `batch` samples, and add up to compute.seconds(batch).

    by_layer is False if no layers were given; one layer stands for all of the model then. inputs: for each layer, the
    values of one sample that it takes if it is fully connected, and 0 if it is not; empty: no layer is.
    """

    name: str
    batch: int
    layers: tuple[Layer, ...]
    compute: Compute
    by_layer: bool
    inputs: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parameters, float32."""
        return sum(layer.nbytes for layer in self.layers)

    def layers_at(self, batch: float) -> tuple[Layer, ...]:
        """Return the layers with the times of a step of `batch` samples, all scaled by the same factor."""
        return scaled(self.layers, self.compute.seconds(batch))

    def to_json(self) -> dict[str, Any]:
        batches = (self.batch, 2 * self.batch)
        made: dict[str, Any] = {"name": self.name, "batch": self.batch}
        made["compute_ms"] = {str(batch): 1e3 * self.compute.seconds(batch) for batch in batches}
        if not self.by_layer:
            return made | {"bytes": self.nbytes}
        made["layers"] = [
            {"bytes": layer.nbytes, "forward_ms": 1e3 * layer.forward_s, "backward_ms": 1e3 * layer.backward_s}
            | ({"kind": _FULLY_CONNECTED, "inputs": inputs} if inputs else {})
            for layer, inputs in zip(self.layers, self.inputs or [0] * len(self.layers), strict=True)
        ]
        return made


def read_spec(path: Path) -> Spec:
    """Read a file. Raises InvalidArgumentError, with the file and the position in it, for an invalid spec."""
    try:
        text = read_text(path, SETTINGS_BYTES_MAX)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path}: {error}") from error
    try:
        made = parse_json(text, _PARTS_MAX) if path.suffix == ".json" else parse_toml(text)
        return make_spec(made, path.stem)
    except ValueError as error:  # raised by both formats; InvalidArgumentError is a subclass
        raise InvalidArgumentError(f"{path}: {shortened(error)}") from error


def make_spec(given: Any, name: str) -> Spec:
    """Return the spec that a file describes. Raises InvalidArgumentError."""
    if not isinstance(given, dict):
        raise InvalidArgumentError("a spec must be a table of names and values")
    _check_names(given, _TOP, "a spec")
    batch = given.get("batch", 1)
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= _BATCH_MAX:
        raise InvalidArgumentError(f"batch must be a number of samples, at least 1, not {quoted(batch)}")
    name = str(given.get("name", name))
    compute = _compute(given["compute_ms"]) if "compute_ms" in given else None
    if "layers" in given:
        return _of_layers(given, name, batch, compute)
    if compute is None:
        raise InvalidArgumentError("a spec needs layers or compute_ms, for the time of a step")
    whole = Layer(_nbytes(given, "the spec"), _FORWARD_SHARE, 1 - _FORWARD_SHARE)
    return Spec(name, batch, scaled((whole,), compute.seconds(batch)), compute, by_layer=False)


def _of_layers(given: dict[str, Any], name: str, batch: int, compute: Compute | None) -> Spec:
    if "parameters" in given or "bytes" in given:
        raise InvalidArgumentError("layers give their own bytes: leave out the spec's parameters and bytes")
    tables = given["layers"]
    if not isinstance(tables, list) or not 1 <= len(tables) <= _LAYERS_MAX:
        raise InvalidArgumentError(f"layers must be 1 to {_LAYERS_MAX} tables, [[layers]] in TOML")
    layers = tuple(_layer(table, f"layer {number}") for number, table in enumerate(tables, 1))
    inputs = tuple(_inputs(table, f"layer {number}") for number, table in enumerate(tables, 1))
    total = sum(layer.forward_s + layer.backward_s for layer in layers)
    if not total:
        raise InvalidArgumentError("at least one layer must take time")
    if not any(layer.nbytes for layer in layers):
        raise InvalidArgumentError("at least one layer must have parameters")
    if compute is None:
        compute = Compute(0.0, total / batch)
    made = scaled(layers, compute.seconds(batch))
    return Spec(name, batch, made, compute, by_layer=True, inputs=inputs if any(inputs) else ())


def scaled(layers: tuple[Layer, ...], total_s: float) -> tuple[Layer, ...]:
    """Return layers whose times add up to total_s, all scaled by the same factor."""
    by = total_s / sum(layer.forward_s + layer.backward_s for layer in layers)
    return tuple(replace(layer, forward_s=by * layer.forward_s, backward_s=by * layer.backward_s) for layer in layers)


def _layer(given: Any, where: str) -> Layer:
    if not isinstance(given, dict):
        raise InvalidArgumentError(f"{where} must be a table")
    _check_names(given, _LAYER, where)
    forward, backward = (
        _milliseconds(given.get(name, 0), f"{name} of {where}") for name in ("forward_ms", "backward_ms")
    )
    return Layer(_nbytes(given, where), forward, backward)


def _inputs(given: dict[str, Any], where: str) -> int:
    """Return the values that a fully connected layer takes, and 0 for another layer."""
    if "kind" not in given:
        if "inputs" in given:
            raise InvalidArgumentError(f'inputs of {where} needs kind = "{_FULLY_CONNECTED}"')
        return 0
    if given["kind"] != _FULLY_CONNECTED:
        raise InvalidArgumentError(
            f'kind of {where} must be "{_FULLY_CONNECTED}" (fully connected) or left out, not {quoted(given["kind"])}'
        )
    count = given.get("inputs")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= BYTES_MAX:
        raise InvalidArgumentError(
            f"inputs of {where} must be the number of values that it takes of one sample, from 1 to {BYTES_MAX}, "
            f"not {quoted(count)}"
        )
    return count


def _nbytes(given: dict[str, Any], where: str) -> int:
    if ("bytes" in given) == ("parameters" in given):
        raise InvalidArgumentError(f"{where} needs exactly one of parameters and bytes")
    if "bytes" in given:
        nbytes = parse_bytes(given["bytes"])
    else:
        count = given["parameters"]
        number = isinstance(count, int | float) and not isinstance(count, bool)
        if not number or not 0 <= count <= BYTES_MAX or count != int(count):
            raise InvalidArgumentError(
                f"parameters of {where} must be an integer from 0 to {BYTES_MAX}, not {quoted(count)}"
            )
        nbytes = parse_bytes(_FLOAT_BYTES * int(count))
    if where == "the spec" and not nbytes:
        raise InvalidArgumentError("a model without parameters has nothing to exchange")
    return nbytes


def _compute(given: Any) -> Compute:
    if not isinstance(given, dict):
        raise InvalidArgumentError("compute_ms must be a table: batch = milliseconds")
    times = {}
    for batch, value in given.items():
        if not (batch.isascii() and batch.isdigit() and len(batch) <= 13 and 1 <= int(batch) <= _BATCH_MAX):
            raise InvalidArgumentError(f"compute_ms: a batch must be a positive integer, not {quoted(batch)}")
        times[int(batch)] = _milliseconds(value, f"compute_ms of {batch}")
    if not all(times.values()):
        raise InvalidArgumentError("compute_ms: the time of a step must be more than 0")
    return Compute.through(times)


def _milliseconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MILLISECONDS_MAX:
        raise InvalidArgumentError(f"{what} must be a number of milliseconds, not {quoted(value)}")
    return value / 1e3


def _check_names(given: dict[str, Any], known: set[str], where: str) -> None:
    if foreign := given.keys() - known:
        names = shortened(", ".join(map(repr, sorted(foreign))))
        raise InvalidArgumentError(f"{where} must not have {names}; it takes {', '.join(sorted(known))}")
