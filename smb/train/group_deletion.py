"""How a training is deleted, whole or what is left of one whose maker or deleter died."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np

from smb.client import Client
from smb.errors import (
    DeadlineError,
    Error,
    LockLostError,
    NotFoundError,
    UnavailableError,
)
from smb.train import member_table as t
from smb.train.group import METADATA, PARTS, Group, copies_of, found_of, missing, own_buffers, view
from smb.train.join_locks import giving_back, setup_lock

_NAMED = 4  # buffers that a line of the log names at most

_log = logging.getLogger("smb")


@contextlib.contextmanager
def deleting(client: Client, asked: str, name: str) -> Iterator[Callable[[], object]]:
    """Keep other processes from making or joining the training or work units `name` while the block deletes them.

    Yields a function to call right before each deletion by name: it raises LockLostError if another process may have
    made them anew. Raises TimeoutError, which names the holder of the lock, if the lock can't be acquired: nothing was
    deleted.
    """
    setup = setup_lock(client, name, copies_of(client, name, None))
    with contextlib.ExitStack() as last:
        check: Callable[[], object] = setup.check
        try:
            setup.acquire()
        except DeadlineError as error:
            raise DeadlineError(
                f"{asked}: nothing was deleted, because another process is making, joining or deleting it; try again: "
                f"{error}"
            ) from error
        except UnavailableError as error:
            # A training with a part on a server that is gone for good must still be deletable. Joiners need the same
            # lock, and can't get it either.
            _log.warning("%s: deleting without its lock, because the lock's server is away: %s", asked, error)
            check = _nothing_to_ask
        else:
            last.enter_context(giving_back(setup, asked))
        try:
            yield check
        except LockLostError as error:
            raise LockLostError(f"{asked} stopped half-way; call it again if it still exists: {error}") from error


def _nothing_to_ask() -> None:
    """The check of a deletion that has no lock."""


def delete(client: Client, name: str) -> None:
    """Delete a training: its group, all buffers under its name, and its work units.

    Also deletes what is left of a training whose creation, load or deletion was interrupted. The next step() of its
    workers raises NotFoundError ("training 'x' was deleted"), and their close() succeeds. Blocks for at most 30 s while
    a process is joining. Raises NotFoundError and TimeoutError. Raises LockLostError if this process was stopped for so
    long that another one may have made the training anew: call it again.

    ```python
    smb.train.delete(client, "run")
    ```
    """
    if not leftovers(client, name):  # nothing exists, so no lock is made
        view(client, name)
    with deleting(client, f"delete of training {name!r}", name) as check:
        group, ready = found_of(client, name)
        if group is not None and ready:
            delete_group(client, group, check)
        elif not remove_leftovers(client, name, check):
            raise missing(name)


def delete_group(client: Client, group: Group, check: Callable[[], object]) -> None:
    """Delete a group. The caller holds the setup lock; `check` raises if it was lost."""
    check()
    # So that later errors about a missing buffer say that the training was deleted.
    group.table.write(0, t.READY, np.array([t.DELETED]))
    for each in _all_of(client, group.name):
        check()
        client.delete(each, missing_ok=True)


def _all_of(client: Client, name: str) -> list[str]:
    """Return a group's buffers in the order in which they are deleted. The group's own buffers come last: if the
    deletion stops half-way, they show that there is something to delete.
    """
    own = own_buffers(name)
    return [info.name for info in client.list() if info.name.startswith(f"{name}/") and info.name not in own] + own


def leftovers(client: Client, name: str) -> list[str]:
    """Return the buffers that remain of a training whose maker, loader or deleter died, in the order of their deletion;
    [] if there are none. Call it only if no group of this name is ready.

    If the group's own buffers exist, at least in part, all buffers below its name are returned, as when a training is
    deleted, except those of other trainings below that name. If none of them exists, there may never have been a
    training: then only buffers with the names of a training's parts are returned.
    """
    names = {info.name for info in client.list()}
    own = [each for each in own_buffers(name) if each in names]
    under = [each for each in sorted(names) if each.startswith(f"{name}/") and each not in own]
    if not own:
        return [each for each in under if each.removeprefix(f"{name}/").split("/")[0] in PARTS]
    others = [
        each
        for each in under
        if {f"{each}/members", f"{each}/tick"} <= names
        and not each.startswith(f"{name}/host/")
        and _may_be_group(client, each)
    ]
    kept = tuple(f"{each}/" for each in others)
    return [each for each in under if each not in others and not each.startswith(kept)] + own


def _may_be_group(client: Client, name: str) -> bool:
    try:
        return METADATA in client.open(name).metadata
    except NotFoundError:
        return False
    except Error:  # unknown, so the buffer is kept
        return True


def remove_leftovers(client: Client, name: str, check: Callable[[], object]) -> int:
    """Delete what remains of a training of which no group is ready. Return the number of buffers. The caller holds the
    setup lock. `check` raises if it was lost, because a process that was stopped meanwhile must not delete another's
    new buffers.
    """
    left = leftovers(client, name)
    for each in left:
        check()
        client.delete(each, missing_ok=True)
    if left:
        _log.warning(
            "training %r: deleted %d buffers of a training whose creation, load or deletion was interrupted: %s",
            name,
            len(left),
            ", ".join(left[:_NAMED]) + (", ..." if len(left) > _NAMED else ""),
        )
    return len(left)
