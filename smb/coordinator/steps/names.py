"""Deletion and renaming of buffers, and freeing of idle locks' and barriers' names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from smb.coordinator import limits
from smb.coordinator.drop_rules import dropped
from smb.coordinator.events import (
    BufferDeleted,
    BufferRenamed,
    Effect,
    EraseBuffer,
    Instant,
    NamesFreed,
    Report,
    SaveBuffer,
    SaveTokenFloor,
    WakeOpeners,
)
from smb.coordinator.published import published_as
from smb.coordinator.quotas import check_quota
from smb.coordinator.records import BufferRecord, Kind
from smb.coordinator.state import ARRIVED, State, Step, allocate, delete, end_copies_beside, find_ready, put
from smb.coordinator.steps.creation import check_room_for_metadata
from smb.coordinator.validate import check_name
from smb.drop_reasons import Ground
from smb.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from smb.published import LOG
from smb.security.roles import namespace_of


def buffer_deleted(state: State, event: BufferDeleted, _: Instant) -> Step:
    """Drop a buffer with its mirrors."""
    effects: list[Effect] = []
    there = state.in_question(Kind.BUFFER, event.name, event.id)
    if there is not None:
        record = there  # its deletion does not depend on whether it was made
        effects.append(WakeOpeners(record.key))
    else:
        try:
            record = find_ready(state, event.name, event.id)
        except NotFoundError as error:
            if event.missing_ok:
                return state, ()
            raise NotFoundError(f"delete: {error}") from None
    for each in (record, *state.mirrors(record)):
        beside = state.buffers.get(each.name + ARRIVED) if each.mirror_of else None
        for gone in (each, *([beside] if beside is not None and beside.ready else [])):
            effects += [EraseBuffer(gone.key), dropped(gone.copies, Ground.DELETED, state.unexplained)]
            state = delete(state, gone)
            effects.append(Report(logging.INFO, f"deleted {gone.title}"))
    return state, tuple(effects)


def buffer_renamed(state: State, event: BufferRenamed, _: Instant) -> Step:
    """Rename a buffer or folder. An existing buffer of the new name is replaced or put aside, if the event says so."""
    asked = f'rename of "{event.name}" to "{event.new_name}"'
    check_name(Kind.BUFFER, event.new_name)
    if event.folder and (event.id or event.file_attributes is not None):
        raise InvalidArgumentError(f"{asked}: a folder has no id and no attributes, so the request must not give any")
    if event.folder:
        return _folder_renamed(state, event, asked)
    try:
        record = find_ready(state, event.name, event.id)
    except NotFoundError as error:
        raise NotFoundError(f"{asked}: {error}") from None
    if event.file_attributes is not None:
        if event.attributes_before is not None and record.file_attributes not in (
            event.attributes_before,
            event.file_attributes,  # the request is a repetition
        ):
            raise AlreadyExistsError(f"{asked}: another client has changed the attributes of its file meanwhile")
        state, record = _described(state, record, event.file_attributes, asked)
    if event.new_name == event.name:
        return state, (() if event.file_attributes is None else (SaveBuffer(record),))
    effects: tuple[Effect, ...] = ()
    there = state.buffers.get(event.new_name)
    for each in (record, *([there] if there is not None else [])):
        _check_without_mirrors(state, each, asked)
        # Without a log, as of a restored backup, nothing is stored beside it: its next publisher makes one.
        logs = (each.name + LOG, event.new_name + LOG)
        if any(log in state.buffers for log in logs) and (published_as(each.metadata) or {}).get("deltas"):
            raise InvalidArgumentError(
                f'{asked}: "{each.name}" is published with deltas=, which are stored beside it under its name; publish '
                f"under another name, or rename its folder"
            )
    if there is not None and event.displaced_name and event.replace and there.ready:
        check_name(Kind.BUFFER, event.displaced_name)
        if event.displaced_name in state.buffers:
            raise AlreadyExistsError(
                f'{asked}: a buffer "{event.displaced_name}" exists, so the replaced buffer cannot get that name'
            )
        state, effects = _called(state, [there], [event.displaced_name], asked)
    elif there is not None:
        if not event.replace or not there.ready:
            raise AlreadyExistsError(f'{asked}: a buffer "{event.new_name}" exists; delete it, or have it replaced')
        effects = (dropped(there.copies, Ground.DELETED, state.unexplained),)
        state = delete(state, there)
    state, renamed = _called(state, [record], [event.new_name], asked)
    return state, (*effects, *renamed, Report(logging.INFO, f'renamed {record.title} to "{event.new_name}"'))


def _folder_renamed(state: State, event: BufferRenamed, asked: str) -> Step:
    folder, new_folder = event.name + "/", event.new_name + "/"
    records = [record for record in state.listed() if record.name.startswith(folder)]
    if not records:
        raise NotFoundError(f'{asked}: no buffer has a name that begins with "{folder}"')
    if new_folder.startswith(folder):
        raise InvalidArgumentError(f"{asked}: a folder cannot be moved into itself")
    for record in state.buffers.values():
        if record.kind is Kind.BUFFER and (record.name == event.new_name or record.name.startswith(new_folder)):
            raise AlreadyExistsError(f'{asked}: a buffer "{record.name}" exists; delete it, or choose another name')
    for record in records:
        _check_without_mirrors(state, record, asked)
    names = [new_folder + record.name[len(folder) :] for record in records]
    for name in names:
        check_name(Kind.BUFFER, name)
    state, renamed = _called(state, records, names, asked)
    report = Report(logging.INFO, f'renamed {len(records)} buffers "{folder}..." to "{new_folder}..."')
    return state, (*renamed, report)


def _called(state: State, records: Sequence[BufferRecord], names: Sequence[str], asked: str) -> Step:
    """Give records, all of one namespace, other names, all of one namespace. Their segments stay as they are. In
    another namespace they must fit that quota.
    """
    named = [replace(record, name=name) for record, name in zip(records, names, strict=True)]
    if namespace_of(names[0]) != namespace_of(records[0].name):
        check_quota(state.quotas, state.buffers.values(), named, asked)
    state = replace(state, buffers=state.buffers.changed(named, gone=[record.key for record in records]))
    effects: list[Effect] = []
    for record, other in zip(records, named, strict=True):
        # In this order: if a record takes the name that another one leaves, its save must be the key's later change.
        effects += [EraseBuffer(record.key), SaveBuffer(other), WakeOpeners(other.key)]
    return state, tuple(effects)


def _described(state: State, record: BufferRecord, attributes: bytes, asked: str) -> tuple[State, BufferRecord]:
    """Give a record other attributes of its file. Few bytes always have room: BUFFERS_MAX bounds them, too."""
    grown = len(attributes) - len(record.file_attributes)
    if grown > 0 and len(attributes) > limits.FILE_ATTRIBUTES_USUAL_BYTES:
        check_room_for_metadata(state, asked, grown)
    record = replace(record, file_attributes=attributes)
    return put(state, record), record


def _check_without_mirrors(state: State, record: BufferRecord, asked: str) -> None:
    if record.mirror_of or state.mirrors(record):
        what = "is a mirror" if record.mirror_of else "has mirrors"
        raise InvalidArgumentError(f'{asked}: "{record.name}" {what}; stop its relays first: smb relay NAME --stop')


def names_freed(state: State, event: NamesFreed, _: Instant) -> Step:
    """Drop idle locks and barriers. New ones of the same names continue from a token at least as high."""
    freed = [
        record
        for record in state.buffers.values()
        if record.kind is not Kind.BUFFER
        and record.ready
        and record.segments[0].id in event.tokens
        and record.segments[0].server == event.server
    ]
    if not freed:
        return state, ()
    allocated = state.allocated
    for record in freed:
        allocated = allocate(allocated, record, -1)
    floor = max(state.token_floor, *(event.tokens[record.segments[0].id] for record in freed))
    state = replace(
        state,
        buffers=state.buffers.changed(gone=[record.key for record in freed]),
        allocated=allocated,
        token_floor=floor,
    )
    before, state = state, end_copies_beside(state, *freed)
    report = Report(logging.INFO, f"freed {len(freed)} idle locks and barriers")
    erased = (EraseBuffer(record.key) for record in freed)
    copies = tuple(copy for record in freed for copy in record.copies)
    return state, (*erased, SaveTokenFloor(floor), dropped(copies, Ground.DELETED, before.unexplained), report)
