"""How a worker enters a group, which is made if there is none: checks of the arguments, making, and clearing a group
whose members are all dead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from smb.buffer_info import check_replicas
from smb.client import Client
from smb.config.parse import format_bytes
from smb.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
)
from smb.lock import Lock
from smb.train import member_table as t
from smb.train import members
from smb.train.group import METADATA, Group, copies_of, opened, scheme_in, settings_of, slots_of, undo_making
from smb.train.group_deletion import delete_group, remove_leftovers
from smb.train.guards import Guards
from smb.train.join_locks import keeping, setup_lock
from smb.train.parameters import Parameters
from smb.train.scheme import Json, Scheme

LEASE_S = 10.0
_PLACEMENT = {"servers", "stripe", "wire", "replicas"}

Made = TypeVar("Made")


def enter(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    run: Callable[[Group], Made],
    *,
    members: int | None = None,
    **placement: Any,
) -> Made:
    """Take a slot in the group of that name, which is made from the present values if it does not exist. Return what
    `run` returns for the group; run() is called under the setup lock and makes or opens all buffers that the member
    needs. `members` is the number of slots of a group that is made; None: as many as the scheme takes.

    scheme=None adopts the group's settings. The values stay as they are. Raises InvalidArgumentError, NotFoundError,
    OutOfMemoryError; after an error nothing of this join remains.
    """
    _check_scheme(name, scheme)
    replicas: int | None = placement.get("replicas")
    copies = copies_of(client, name, replicas)
    if scheme is None and copies is None:
        raise _nobody(name)
    with contextlib.ExitStack() as on_failure:
        with keeping(client, f"{name}/setup", copies) as setup:
            group = opened(client, name)
            if group is None:
                if scheme is None:
                    raise _nobody(name)
                scheme.check(name, parameters)
                check_lease(f"join of training {name!r}", lease)
                settings = settings_of(scheme, guards or Guards(), LEASE_S if lease is None else lease, members)
                group = _made(client, name, parameters, settings, placement, setup)
            else:
                _compare(group, scheme, guards, lease, replicas, placement.get("wire"))
            if group.weights.size != parameters.size:
                raise InvalidArgumentError(
                    f"join of training {name!r}: this worker has {parameters.size} values, and the shared model "
                    f"has {group.weights.size}; join with a model of that size, or take another name"
                )
            group.scheme.check(name, parameters)
            try:
                group.admit()
            except BaseException:
                group.undo(setup)
                raise
            # Called after the setup lock is released, because withdraw takes that lock.
            on_failure.callback(group.withdraw)
            made = run(group)
        on_failure.pop_all()
    return made


@contextlib.contextmanager
def room(name: str, scheme: Scheme, model_bytes: int) -> Iterator[None]:
    """If servers have no room for buffers that the block makes, the error says how much memory the scheme takes."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"join of training {name!r}: scheme {scheme.NAME!r} keeps copies of the model on the memory servers, "
            f"{scheme.footprint()}, of {format_bytes(model_bytes)} each; {error}"
        ) from error


def clear(
    client: Client,
    name: str,
    parameters: Parameters,
    scheme: Scheme | None,
    lease: float | None,
    replicas: int | None = None,
) -> None:
    """Delete a group whose members are all dead, if it exists. The arguments are those with which it will be made anew.

    Raises AlreadyExistsError if a member is alive, or died too recently to tell, and InvalidArgumentError if the group
    could not be made anew with these arguments. Then nothing was deleted.
    """
    if scheme is None:
        raise InvalidArgumentError(
            f"join of training {name!r} with fresh=True needs a scheme; pass one, such as smb.train.DiLoCo(every=500); "
            f"nothing was deleted"
        )
    _check_scheme(name, scheme)
    scheme.check(name, parameters)
    check_lease(f"join of training {name!r}", lease)
    with setup_lock(client, name, copies_of(client, name, replicas)) as setup:
        group = opened(client, name)
        if group is None:
            return
        rows = group.table.read().copy()
        slots = list(members.live(rows))
        dead = members.reap(client, name, group.table, group.lease, slots)
        if alive := [slot for slot in slots if slot not in dead]:
            row = rows[1 + alive[0]]
            raise AlreadyExistsError(
                f"join of training {name!r} with fresh=True: {len(alive)} of its workers are alive, or died less than "
                f"{group.lease:g} s ago, one on {members.host_of(row)} (pid {int(row[t.PID])}); leave fresh= out to "
                f"train with them, or take another name"
            )
        delete_group(client, group, setup.check)


def check_placement(asked: str, placement: dict[str, Any]) -> None:
    """Raise InvalidArgumentError for an option that does not say where a training's buffers lie."""
    if foreign := placement.keys() - _PLACEMENT:
        hint = "; overlap= is an option of smb.torch.join" if "overlap" in foreign else ""
        raise InvalidArgumentError(
            f"{asked}: unknown option {', '.join(sorted(foreign))}=; the options are "
            f"{', '.join(sorted(_PLACEMENT))}{hint}"
        )
    check_replicas(asked, placement.get("replicas"))


def check_lease(asked: str, lease: float | None) -> None:
    """Raise InvalidArgumentError for a lease that is too short to be renewed, or too long to wait for."""
    if lease is not None and not (math.isfinite(lease) and 0.05 <= lease <= 3600):
        raise InvalidArgumentError(f"{asked}: lease must be from 0.05 to 3600 seconds, not {lease!r}")


def _check_scheme(name: str, scheme: object) -> None:
    if scheme is not None and not isinstance(scheme, Scheme):
        raise InvalidArgumentError(
            f"join of training {name!r}: scheme must be an object with its settings, such as "
            f"smb.train.DiLoCo(every=500), not {scheme!r}; only smb.torch.join also takes a name"
        )


def _made(
    client: Client, name: str, parameters: Parameters, settings: dict[str, Json], placement: dict[str, Any], setup: Lock
) -> Group:
    """Make the group. The caller holds the setup lock, so existing parts of the group were left
    by a process that died.
    """
    remove_leftovers(client, name, setup.check)
    metadata = {**placement.pop("metadata", {}), METADATA: settings}
    scheme = scheme_in(settings)
    with room(name, scheme, 4 * parameters.size), contextlib.ExitStack() as on_failure:
        on_failure.callback(undo_making, client, name, setup)
        weights = client.create(name, parameters.size, "float32", metadata=metadata, **placement)
        copies = weights.info.replicas
        client.create(f"{name}/tick", 1, "int64", servers=1, replicas=copies)
        shape = (1 + slots_of(settings, scheme), t.FIELDS)
        rows = client.create(f"{name}/members", shape, "int64", servers=1, stripe=t.STRIPE, replicas=copies)
        table = t.Table(rows)
        parameters.store(weights)
        table.add(0, t.READY, 1)
        group = Group(client, name, weights, settings)
        on_failure.pop_all()
    group.made = True
    return group


def _nobody(name: str) -> NotFoundError:
    return NotFoundError(
        f"join of training {name!r}: there is no such training; the first worker must pass a scheme, as "
        f'smb.train.DiLoCo(every=500), or scheme="diloco", every=500 for smb.torch.join; list the trainings with: '
        f"smb train ls"
    )


def _compare(
    group: Group,
    scheme: Scheme | None,
    guards: Guards | None,
    lease: float | None,
    replicas: int | None,
    wire: str | None,
) -> None:
    """Raise InvalidArgumentError if a joiner asks for other settings than the group has."""
    wanted: dict[str, Json] = {}
    if scheme is not None:
        wanted |= {"scheme": scheme.NAME} | {f"{scheme.NAME}.{key}": value for key, value in scheme.settings().items()}
    if guards is not None:
        wanted |= {f"guards.{key}": value for key, value in guards.settings().items()}
    if lease is not None:
        wanted["lease"] = float(lease)
    if replicas is not None:
        wanted["replicas"] = replicas
    if wire is not None:
        wanted["wire"] = wire
    has: dict[str, Json] = {"scheme": group.scheme.NAME, "lease": group.lease}
    has |= {"replicas": group.weights.info.replicas, "wire": group.weights.wire}
    has |= {f"{group.scheme.NAME}.{key}": value for key, value in group.scheme.settings().items()}
    has |= {f"guards.{key}": value for key, value in group.guards.settings().items()}
    if wanted.get("scheme", has["scheme"]) != has["scheme"]:
        wanted = {"scheme": wanted["scheme"]}
    differing = [f"{key} is {has.get(key)!r}, not {value!r}" for key, value in wanted.items() if has.get(key) != value]
    if differing:
        raise InvalidArgumentError(
            f"join of training {group.name!r}: it runs with other settings: {'; '.join(differing)}; "
            f"leave these settings out to adopt the group's, or take another name"
        )
