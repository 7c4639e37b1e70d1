"""Which buffers of a cluster belong to trainings: for a backup, which saves a training as a whole."""

from __future__ import annotations

from collections.abc import Collection

from smb.client import Client
from smb.errors import NotFoundError
from smb.train.group import METADATA, PARTS
from smb.train.work_units import METADATA as WORK_UNITS


def trainings_in(client: Client, names: Collection[str]) -> tuple[list[str], set[str]]:
    """Return the trainings among the buffers of these names, in order, and the buffers that are theirs: the model, what
    the scheme keeps, the models of hosts in HSGD, and work units below the training's name. Other buffers below that
    name are not the training's, nor are work units elsewhere. One call for each name that may be a training's.
    """
    there = set(names)
    found: list[str] = []
    owned: set[str] = set()
    for name in sorted(there):  # a training comes before what lies below it
        table = {f"{name}/members", f"{name}/tick"}
        if name in owned or not table <= there:
            continue
        try:
            metadata = client.open(name).metadata
        except NotFoundError:  # deleted meanwhile
            continue
        if METADATA in metadata:
            found.append(name)
            own = {f"{name}/{part}" for part in PARTS}
            folders = tuple(f"{part}/" for part in own)
            owned |= {name} | {each for each in there if each in own or each.startswith(folders)}
        elif WORK_UNITS in metadata and any(name.startswith(f"{each}/") for each in found):
            owned |= {name} | table
    return found, owned
