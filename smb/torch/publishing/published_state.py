"""What a Publisher and a Follower both know of a published state: how it is published, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from smb.config.parse import format_bytes
from smb.errors import Error, InvalidArgumentError
from smb.published import ABOUT, LOG_FORMAT

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.state_costs import StateCosts

State: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]


class Reached(Protocol):
    """A buffer, or what reads from one."""

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports in use. May block until each server has a path."""


def generations_text(last: int) -> str:
    """Return what a repr says of the last generation; 0: none."""
    return f"generation {last}" if last else "no generation yet"


def state_row(buffer: Buffer) -> dict[str, object]:
    """Return what a notebook's table says of a published state. Asks no server."""
    info = buffer.info
    size = format_bytes(sum(tensor.nbytes for tensor in buffer.table.values()))
    servers = dict.fromkeys(segment.server for segment in info.layout.segments)
    return {"tensors": len(buffer.table), "size": size, "versions": info.versions, "servers": ", ".join(servers)}


def about_of(asked: str, buffer: Buffer) -> dict[str, Any]:
    """Return how a state is published. For a state without this record, as before there was a choice. Raises
    InvalidArgumentError for deltas in another form than this release's.
    """
    stored = buffer.metadata.get(ABOUT, {})
    about = {"deltas": 0, "tied": {}, "part": False, **(stored if isinstance(stored, dict) else {})}
    if about["deltas"] and about.get("log") != LOG_FORMAT:
        raise InvalidArgumentError(
            f"{asked}: another release published it with deltas=, in a form that this one does not read: delete it "
            f"with the buffers beside it (smb ls --all), and publish anew"
        )
    return about


def check_same_tensors(asked: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError unless both have the same names, with the same shapes (or forms)."""
    differ = sorted(
        [f"{name} is missing" for name in wanted.keys() - given.keys()]
        + [f"{name} is not in it" for name in given.keys() - wanted.keys()]
        + [f"{name} is {given[name]}, not {wanted[name]}" for name in given.keys() & wanted.keys()
           if given[name] != wanted[name]]
    )  # fmt: skip
    if differ:
        raise InvalidArgumentError(
            f"{asked}: these are not the published tensors ({len(differ)} differ): {'; '.join(differ[:3])}"
        )


def note_transports(costs: StateCosts, used: Reached) -> None:
    """Note the transports of what was just used: its paths are known, unless a server has gone meanwhile."""
    with suppress(Error):
        costs.transports = used.transports
