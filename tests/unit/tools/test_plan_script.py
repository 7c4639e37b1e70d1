"""`smb plan script.py`: a model is measured by the clock that its layers move themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from smb.errors import Error, InvalidArgumentError
from smb.tools.plan import script
from smb.tools.plan.script import measure_script

pytest.importorskip("torch", reason="PyTorch")

SCRIPT = """
import torch

clock = None


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        clock.now += seconds
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        clock.now += 2 * ctx.seconds
        return gradient, None


class Layer(torch.nn.Module):
    def __init__(self, count, seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(count))
        self.bias = torch.nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x):
        clock.now += 0  # a layer's time begins with it
        return Takes.apply(x * self.weight.sum() * 0.001 + self.bias, self.seconds * len(x))


class Frozen(Layer):
    def __init__(self):
        super().__init__(7, 0.0)
        self.requires_grad_(False)


def model():
    return torch.nn.Sequential(Layer(100, 0.003), Frozen(), Layer(1000, 0.001), torch.nn.ReLU(), Layer(10, 0.002))


def batch(size):
    return torch.ones(size)


def loss(model, data):
    clock.now += 0.060  # what goes with no sample, before the first layer
    return model(data).sum()
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that only layers add to."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(script, "time", clock)
    run_path = script.runpy.run_path

    def with_clock(path: str, run_name: str) -> dict[str, object]:
        found = run_path(path, run_name=run_name)
        found["loss"].__globals__["clock"] = clock
        return found

    monkeypatch.setattr(script, "runpy", SimpleNamespace(run_path=with_clock))
    return clock


def test_layers_have_their_times(tmp_path: Path, clock: SimpleNamespace) -> None:
    """To the millisecond: 6 ms a sample over three layers forward, 12 backward, 60 ms that go with no sample."""
    file = tmp_path / "mine.py"
    file.write_text(SCRIPT)
    spec = measure_script(file, 10)
    assert (spec.name, spec.batch, spec.by_layer) == ("mine", 10, True)
    assert [layer.nbytes for layer in spec.layers] == [404, 4004, 44]  # frozen parameters travel never
    assert (spec.compute.fixed_s, spec.compute.sample_s) == pytest.approx((0.060, 0.018))
    assert [layer.forward_s for layer in spec.layers] == pytest.approx([0.060 + 0.030, 0.010, 0.020])
    # The gradient of a layer's bias is there only when its own function has gone back.
    assert [layer.backward_s for layer in spec.layers] == pytest.approx([0.060, 0.020, 0.040])


def test_an_optimizer_of_its_own(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Counts with the step."""
    file = tmp_path / "mine.py"
    file.write_text(
        SCRIPT
        + """
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        clock.now += 0.5

def optimizer(model):
    return Slow(model.parameters(), lr=0.1)
"""
    )
    assert measure_script(file, 10).compute.fixed_s == pytest.approx(0.560)


def test_a_scripts_own_errors_name_its_line(tmp_path: Path) -> None:
    """One that is no Python, one that raises, and a loss that is no scalar."""
    file = tmp_path / "mine.py"
    model = "import torch\ndef model(): return torch.nn.Linear(2, 2)\ndef batch(n): return torch.ones(n, 2)\n"
    for text, error in (
        ("def model(:\n", r"mine\.py: SyntaxError: .*line 1"),
        (model + "def loss(m, b):\n    return m(b[:, :1]).sum()\n", r"mine\.py, line 5: RuntimeError: mat1 and mat2"),
        (model + "def loss(m, b): return m(b)\n", r"loss\(\) must return a scalar, not torch\.Size\(\[8, 2\]\)"),
    ):
        file.write_text(text)
        with pytest.raises(Error, match=error):
            measure_script(file, 8)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\n", r"must define model\(\), batch\(\), loss\(\)"),
        ("def model(): return 7\ndef batch(n): pass\ndef loss(m, b): pass\n", "returned int, not a torch.nn.Module"),
        (
            "import torch\ndef model(): return torch.nn.ReLU()\ndef batch(n): pass\ndef loss(m, b): pass\n",
            "a module with parameters to train",
        ),
    ],
)
def test_what_is_no_such_script(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=error):
        measure_script(file, 8)
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        measure_script(tmp_path / "other.py", 8)
