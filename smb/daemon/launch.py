"""Command lines for our own Python processes. All such processes are started with them.

`python -m` and `python -c` search the working directory first, where another user may have put a file
smb/__init__.py. Python 3.11 and later have an option against that; for 3.10 the command does it in code.
"""

from __future__ import annotations

import sys

THIS_PYTHON = sys.executable  # for users' own programs, which may lie in the working directory
_HAS_SAFE_PATH = sys.version_info >= (3, 11)
_RUN_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python_m(*words: str) -> list[str]:
    """Return a command that runs a module as `python -m` does: words[0] is the module, the others its arguments."""
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-m", *words]
    return [*python_c(_RUN_MODULE), *words]


def python_c(code: str) -> list[str]:
    """Return a command that runs a line of code as `python -c` does. Arguments may follow."""
    if _HAS_SAFE_PATH:
        return [sys.executable, "-P", "-c", code]
    return [sys.executable, "-c", f"import sys; del sys.path[0]; {code}"]
