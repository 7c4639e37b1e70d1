"""Checks whether the packages that only the demo needs are installed."""

from __future__ import annotations

from importlib.util import find_spec

from smb.errors import Error

_TRAINING = {"torch": "torch>=2.2", "sklearn": "scikit-learn>=1.4,<2"}
_PLOTTING = {"matplotlib": "matplotlib>=3.8,<4"}


def check_extras(*, plot: bool) -> None:
    """Raise Error, with the command to run, if PyTorch, scikit-learn or (for a plot) matplotlib is missing."""
    needed = _TRAINING | (_PLOTTING if plot else {})
    missing = [requirement for module, requirement in needed.items() if find_spec(module) is None]
    if missing:
        packages = " ".join(f"'{requirement}'" for requirement in missing)
        raise Error(
            f"the demo needs packages that are not installed; install them with: python -m pip install {packages}"
        )
