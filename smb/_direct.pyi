from collections.abc import Callable
from typing import Any

def set_up(transfer: int, transfer_at_once: int, array_type: type, /) -> None: ...
def look_address() -> int: ...
def take_interrupt() -> BaseException | None: ...
def forked() -> None: ...

class Switch:
    open: bool

class DirectTarget:
    def __init__(self, go_on: Callable[[float, int, int], int]) -> None: ...
    def arm(
        self,
        handle: object,
        client: Switch,
        quiet: Switch,
        buffer: int,
        shape: tuple[int, ...],
        size: int,
        itemsize: int,
        code: str,
        timeout_ms: int,
        /,
    ) -> None: ...
    def disarm(self) -> None: ...

class Direct:
    _target: DirectTarget

class Method:
    def __init__(self, opcode: int, function: Any) -> None: ...
