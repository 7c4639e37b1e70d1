"""The room of `smb demo`: processes that have digits of their own learn together; one joins late and one is killed.
Then a reader follows a model that a trainer publishes.

It uses only what users import, smb and smb.train; the command smb/tools/cli/demo.py imports it. Its extra is `demo`.
"""

from typing import TYPE_CHECKING

from smb.tools.demo.config import DemoConfig
from smb.tools.demo.result import AccuracyPoint, DemoEvent, DemoResult, WorkerResult

if TYPE_CHECKING:
    from smb.tools.demo.run import run_demo

__all__ = ["AccuracyPoint", "DemoConfig", "DemoEvent", "DemoResult", "WorkerResult", "run_demo"]


def __getattr__(name: str) -> object:
    # PyTorch takes a second to import, so it is imported only for a training.
    if name == "run_demo":
        from smb.tools.demo.run import run_demo

        return run_demo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
