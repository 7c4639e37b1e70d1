"""Calls that all ranks of a mesh make together: the speaker sends the call, and each rank makes
it on its own object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smb.errors import Error, UnavailableError
from smb.torch.ranks import Ranks


@dataclass(frozen=True)
class _Done:
    """The speaker's last message. The other ranks go on, or raise the failure."""

    failure: BaseException | None


class RankCalls:
    """Calls on one object at each rank. In `together` the speaker runs its block, and the other
    ranks make its calls.
    """

    def __init__(self, ranks: Ranks, own: object) -> None:
        """`own` is this rank's object, of the same class at all ranks."""
        self._ranks = ranks
        self._own = own
        self._together = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """At the speaker: run the block, and then let the other ranks go on. At the others: make the speaker's calls
        until then, and raise its block's error.
        """
        if not self._ranks.speaks:
            self._serve()
            yield
            return
        self._together = True
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UnavailableError):
                self._end(error)
            raise
        finally:
            self._together = False
        self._end()

    def all(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Let every rank make a call on its object: a method of the object's class, as a plain function. Return the
        results by rank. Raises the error of a rank that failed; the speaker's first.
        """
        if not self._together:  # while another error is raised, or at the interpreter's exit
            raise UnavailableError("the other ranks of the mesh do not take part in this call")
        self._ranks.tell((call, arguments))
        return self._answer(call, arguments)

    def _serve(self) -> None:
        while True:
            said = self._ranks.tell()
            if isinstance(said, _Done):
                if said.failure is not None:
                    raise said.failure
                return
            call, arguments = said
            self._answer(call, arguments)

    def _end(self, failure: BaseException | None = None) -> None:
        if failure is not None:
            known = isinstance(failure, Error)
            failure = type(failure)(str(failure)) if known else Error(f"rank 0 of the mesh failed: {failure!r}")
        self._ranks.tell(_Done(failure))

    def _answer(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        failure: Error | None = None
        result = None
        try:
            result = call(self._own, *arguments)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            failure = error if isinstance(error, Error) else Error(f"rank {self._ranks.rank} of the mesh: {error!r}")
        said = self._ranks.gather((result, None if failure is None else (type(failure), str(failure))))
        failures = [failed for _, failed in said if failed is not None]
        if failures and self._ranks.speaks:
            if failure is not None:
                raise failure
            kind, text = failures[0]
            raise kind(text)
        return [each for each, _ in said]
