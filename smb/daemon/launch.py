"""Command lines for Python processes of our own: all of them begin here.

`python -m` and `python -c` look into the working directory first, where somebody else's smb/__init__.py may lie. Python
has an option against that from 3.11 on; to 3.10 it is told in code.
"""

from __future__ import annotations

import sys

_HAS_SAFE_PATH = sys.version_info >= (3, 11)
_RUN_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python_m(*words: str) -> list[str]:
    """Return the command that runs a module, as `python -m`, with its arguments: words[0] is the module."""
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-m", *words]
    return [*python_c(_RUN_MODULE), *words]


def python_c(code: str) -> list[str]:
    """Return the command that runs a line of code, as `python -c`. Arguments may follow."""
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-c", code]
    return [sys.executable, "-c", f"import sys; del sys.path[0]; {code}"]
