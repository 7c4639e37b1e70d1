"""Replies that clients got about names of buffers, and a check that one coordinator could have given them.

A model: names, each with the mark of the buffer that has it. Every call has its effect at one moment between its
beginning and its end; one of unknown outcome at any later moment, or never.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

OK, MISSING, EXISTS, UNKNOWN = "ok", "missing", "exists", "unknown"
Kind = Literal["create", "delete", "rename", "replace", "read"]
NEVER = float("inf")
Names = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `mark`: of what is created, or was read. `end` is NEVER for an unknown outcome."""

    kind: Kind
    name: str
    answer: str
    begin: float
    end: float
    mark: int = 0
    new_name: str = ""

    def step(self, names: Mapping[str, int]) -> dict[str, int] | None:
        """Return the names after it, None where it cannot have been answered so."""
        there = names.get(self.name)
        after = dict(names)
        expected = OK
        match self.kind:
            case "read":
                fits = (there == self.mark) if self.answer == OK else there is None
                return after if fits else None
            case "create":
                expected = EXISTS if there is not None else OK
                after.setdefault(self.name, self.mark)
            case "delete":
                expected = MISSING if there is None else OK
                after.pop(self.name, None)
            case "rename" | "replace":
                taken = self.kind == "rename" and self.new_name in names
                expected = MISSING if there is None else EXISTS if taken else OK
                if expected == OK:
                    after[self.new_name] = after.pop(self.name)
        if self.answer not in (expected, UNKNOWN):
            return None
        return after if expected == OK else dict(names)


def find_order(calls: Sequence[Call], start: Mapping[str, int], final: Mapping[str, int]) -> bool:
    """Whether there is an order of the calls, each within its time, that leads from `start` to `final`."""
    todo = sorted(calls, key=lambda call: call.begin)
    seen: set[tuple[int, Names]] = set()
    stack: list[tuple[int, dict[str, int]]] = [(0, dict(start))]  # a bit for each call that was done
    needed = sum(1 << index for index, call in enumerate(todo) if call.end != NEVER)
    while stack:
        done, names = stack.pop()
        if done & needed == needed and names == dict(final):
            return True
        key = (done, tuple(sorted(names.items())))
        if key in seen:
            continue
        seen.add(key)
        first_end = min((call.end for index, call in enumerate(todo) if not done >> index & 1), default=NEVER)
        for index, call in enumerate(todo):
            if call.begin > first_end:
                break  # somebody had his answer before this one began
            if not done >> index & 1:
                after = call.step(names)
                if after is not None:
                    stack.append((done | 1 << index, after))
    return False


def now() -> float:
    """On the clock of all threads."""
    return time.monotonic()
