"""Planned work on servers: lost copies are not made anew meanwhile."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from smb.coordinator.events import Effect, Instant, MaintenanceEnded, MaintenancePlanned, Report, SaveMaintenance
from smb.coordinator.state import ALL_SERVERS, Maintenance, State, Step, without
from smb.errors import InvalidArgumentError, NotFoundError

LASTS_S_MIN, LASTS_S_MAX = 1.0, 7 * 86_400.0  # longer, nobody remembers it, and data stays in one copy


def maintenance_planned(state: State, event: MaintenancePlanned, now: Instant) -> Step:
    """Hold re-copying for a server, or for all. A second call sets a new end."""
    title = _title(event.name)
    if event.name != ALL_SERVERS and event.name not in state.servers:
        known = ", ".join(sorted(state.servers)) or "none"
        raise NotFoundError(f"maintenance of {title}: no memory server has that name; there are: {known}")
    if not LASTS_S_MIN <= event.seconds <= LASTS_S_MAX:
        raise InvalidArgumentError(
            f"maintenance of {title} must last from {LASTS_S_MIN:g} to {LASTS_S_MAX:g} seconds, not {event.seconds:g}"
        )
    planned = Maintenance(now.monotonic + event.seconds, now.wall + event.seconds)
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(planned.until_wall))
    text = f"maintenance of {title} until {until}: lost copies are not made anew"
    return _changed(replace(state, maintenance={**state.maintenance, event.name: planned}), text)


def maintenance_ended(state: State, event: MaintenanceEnded, _: Instant) -> Step:
    """End it. One that does not exist, or is over by itself, is no error: the store may still have it, and the next
    leader, whose wall clock may be behind, would go on with it.
    """
    if event.name not in state.maintenance:
        return state, (_save(state),)
    state = replace(state, maintenance=without(state.maintenance, event.name))
    return _changed(state, f"maintenance of {_title(event.name)} was ended: lost copies are made anew")


def _changed(state: State, text: str) -> Step:
    return state, (_save(state), Report(logging.INFO, text))


def _save(state: State) -> SaveMaintenance:
    return SaveMaintenance({name: planned.until_wall for name, planned in state.maintenance.items()})


def over(state: State, now: Instant) -> tuple[State, list[Effect]]:
    """Return the state without the maintenance that is over by itself. The store keeps it until its next change, so
    that no tick depends on a store that takes nothing.
    """
    gone = [name for name, planned in state.maintenance.items() if planned.until <= now.monotonic]
    if not gone:
        return state, []
    text = "is over: lost copies are made anew"
    reports: list[Effect] = [Report(logging.INFO, f"maintenance of {_title(name)} {text}") for name in gone]
    return replace(state, maintenance=without(state.maintenance, *gone)), reports


def _title(name: str) -> str:
    return "all memory servers" if name == ALL_SERVERS else f'memory server "{name}"'
