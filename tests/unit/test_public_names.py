"""What users see of a client and a buffer is what docs promise, and no part of how a call is made."""

from __future__ import annotations

import subprocess
import sys

import pytest

import smb
from smb.engine import Direct, DirectTarget, direct

CLIENT = """
    address barrier close create delete displace empty list lock name open queue reconnect relay rename rename_folder
    serve_metrics servers stop_relays submit timeout
"""
BUFFER = """
    accumulate accumulate_async accumulate_from accumulate_sparse apply compare_swap dtype fetch_add fill info
    layout lock metadata name nbytes pin publish read read_async read_sparse read_version settle shape size submit table
    tensor tensors transports version versions view wait wire write write_async
"""


@pytest.mark.parametrize(("kind", "names"), [(smb.Client, CLIENT), (smb.Buffer, BUFFER)])
def test_only_these_are_public(kind: type, names: str) -> None:
    """A new public name is a promise: it is added here on purpose."""
    assert {name for name in dir(kind) if not name.startswith("_")} == set(names.split())


def test_direct_methods_need_their_base() -> None:
    """A class without the base that has the target is refused when it is made, not at its first call."""
    with pytest.raises((TypeError, RuntimeError)):
        type("WithoutBase", (), {"write": direct(smb.engine.Opcode.WRITE)(print)})
    made = type("WithBase", (Direct,), {"__slots__": (), "write": direct(smb.engine.Opcode.WRITE)(lambda self: 7)})
    one = made()
    assert one.write() == 7  # no target yet: the method behind it
    one._target = object()
    assert one.write() == 7  # no target
    one._target = DirectTarget(print)
    assert one.write() == 7  # a target that is not armed


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("smb", ("numpy", "grpc")),
        ("memserver.cli", ("smb.client", "rich")),
        ("memserver.daemon", ("smb.client", "numpy")),
        ("smb.tools.cli.main", ("smb.client", "smb.coordinator", "numpy")),
        ("smb.coordinator.process", ("smb.client", "smb.cluster", "numpy")),
    ],
)
def test_what_is_not_needed_is_not_imported(module: str, left_out: tuple[str, ...]) -> None:
    """Every command and daemon pays for its imports at its start."""
    code = f"import sys, {module}; print(*sorted(set({left_out}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_every_public_name_is_there() -> None:
    for name in smb.__all__:
        assert getattr(smb, name).__name__ == name
        assert name in dir(smb)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        getattr(smb, "conect")  # noqa: B009 - mypy knows that there is none


WITHOUT = """
import inspect, pydoc, sys
sys.modules["ray"] = sys.modules["torch"] = None
import smb
assert not hasattr(smb, "ray") and not hasattr(smb, "torch") and hasattr(smb, "metrics")
assert {"connect", "Buffer"} <= dict(inspect.getmembers(smb)).keys()
assert "connect" in pydoc.render_doc(smb)
for ask in (lambda: smb.ray, lambda: __import__("smb.ray"), lambda: exec("from smb import ray")):
    try:
        ask()
    except (AttributeError, ImportError, smb.Error) as error:
        print(type(error).__name__, error)
"""


def test_help_works_without_ray_and_pytorch() -> None:
    """A part whose packages are not installed is a missing attribute; its import says what to install."""
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    kinds, texts = zip(*(line.split(maxsplit=1) for line in found.stdout.splitlines()), strict=True)
    assert kinds == ("AttributeError", "Error", "Error")
    assert len(set(texts)) == 1
    assert "pip install" in texts[0]
