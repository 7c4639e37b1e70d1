"""The finding of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Severity(Enum):
    """Whether something must be changed: a problem stops the box from doing what is asked, advice makes it faster."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what is there, and what to change (empty if nothing). `figures` are for
    programs, with their units in their names.
    """

    check: str
    state: Severity
    found: str
    change: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what json.dumps takes."""
        return asdict(self) | {"state": self.state.value}


def fine(check: str, found: str, **figures: float) -> Finding:
    """Return a finding of which nothing follows."""
    return Finding(check, Severity.OK, found, figures=figures)


def advice(check: str, found: str, change: str, **figures: float) -> Finding:
    """Return a finding that something could be better."""
    return Finding(check, Severity.ADVICE, found, change, figures)


def problem(check: str, found: str, change: str, **figures: float) -> Finding:
    """Return a finding that something is in the way."""
    return Finding(check, Severity.PROBLEM, found, change, figures)
