"""The finding of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Severity(Enum):
    """How serious a finding is: a problem prevents what is asked, advice improves speed."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, what was found, and what to change (empty if nothing). `figures` are for programs,
    with units in their names.
    """

    check: str
    state: Severity
    found: str
    change: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the finding for json.dumps."""
        return asdict(self) | {"state": self.state.value}


def fine(check: str, found: str, **figures: float) -> Finding:
    """Return a finding that needs no change."""
    return Finding(check, Severity.OK, found, figures=figures)


def advice(check: str, found: str, change: str, **figures: float) -> Finding:
    """Return a finding that could be improved."""
    return Finding(check, Severity.ADVICE, found, change, figures)


def problem(check: str, found: str, change: str, **figures: float) -> Finding:
    """Return a finding that is a problem."""
    return Finding(check, Severity.PROBLEM, found, change, figures)
