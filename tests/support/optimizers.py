"""The optimizers' rules of Buffer.apply, once more: in numpy, float32, in the stated order of operations."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
_f = np.float32


def step(
    rule: str,
    b: Array,
    g: Array,
    m: Array | None = None,
    v: Array | None = None,
    *,
    lr: float = 0.0,
    scale: float = 1.0,
    weight_decay: float = 0.0,
    mu: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    step: int = 1,
    alpha: float = 0.0,
) -> None:
    """Change weights b and state m, v in place, by gradient g; all float32 of one shape."""
    if rule == "elastic":
        b += _f(alpha) * (g - b)
        return
    x = _f(scale) * g
    if weight_decay != 0 and rule != "adamw":
        x = x + _f(weight_decay) * b
    if rule == "sgd":
        b -= _f(lr) * x
        return
    assert m is not None
    if rule in ("momentum", "nesterov"):
        m[:] = _f(mu) * m + x
        b -= _f(lr) * (m if rule == "momentum" else x + _f(mu) * m)
        return
    assert v is not None
    m[:] = _f(beta1) * m + _f(1 - beta1) * x
    v[:] = _f(beta2) * v + _f(1 - beta2) * (x * x)
    if rule == "adamw":
        b *= _f(1 - lr * weight_decay)
    root = _f(1 / (1 - beta2**step) ** 0.5)
    b -= _f(lr / (1 - beta1**step)) * (m / (np.sqrt(v) * root + _f(eps)))
