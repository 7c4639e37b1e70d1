"""The state of a training, read from its table by any process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.config.parse import format_bytes
from smb.errors import Error
from smb.html_tables import described, listed
from smb.train import group as groups
from smb.train import member_table as t
from smb.train import members
from smb.train.exchange.round_closing import INBOX
from smb.train.progress import progress_of
from smb.train.scheme import Json
from smb.train.work_units import epochs_of
from smb.train.worker_status import WorkerStatus, worker_status


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A training: its scheme and settings, the open round (0 without rounds), and every worker that is or was in a
    slot.

    - `samples`: the samples of all workers that ever took part, including those whose slots are now used by others.
    - `epochs`: how many epochs of Shared.batches are done; None without batches().
    - `done`: no worker has a batch of a further epoch, and a worker that asked for one got none.
    - `wire`: how contributions travel.
    - `gone_bytes`: servers' memory, second copies included, for workers that are gone: inboxes, and in HSGD the models
      of hosts without workers. It is used again, or freed, as others join and train.
    """

    name: str
    size: int
    scheme: str
    settings: dict[str, Json]
    guards: dict[str, Json]
    lease: float
    round: int
    workers: tuple[WorkerStatus, ...]
    samples: int
    epochs: int | None
    done: bool
    wire: str
    gone_bytes: int

    def _repr_html_(self) -> str:
        about = {
            "values": f"{self.size:,}",
            "scheme": ", ".join([self.scheme, *(f"{key}={value}" for key, value in self.settings.items())]),
            "round": self.round,
            "samples": f"{self.samples:,}",
            "epochs": "" if self.epochs is None else self.epochs,
        }
        workers = [
            {
                "worker": f"{worker.host}:{worker.pid}",
                "state": "trains" if worker.alive else "finished" if worker.finished else "lost",
                "contributions": worker.contributions,
                "staleness": worker.staleness,
                "samples": f"{worker.samples:,}",
                "sent and received": format_bytes(worker.bytes),
            }
            for worker in self.workers
        ]
        return described(f"training {self.name}", about) + listed(workers, "no workers")


def _taken(rows: t.Rows) -> list[int]:
    """Return the slots that have or had a holder, except slots whose holder goes on in another one."""
    return [slot for slot in range(len(rows) - 1) if rows[1 + slot, t.MARK] and rows[1 + slot, t.PID]]


def status(client: Client, name: str) -> GroupStatus:
    """Return what is known of a training, without changing it. Raises NotFoundError, InvalidArgumentError
    (no group).

    ```python
    status = smb.train.status(client, "run")
    status.scheme, status.size  # ('localsgd', 1000)
    ```
    """
    # `smb train rm` asks before it deletes the rest of a deleted training.
    group = groups.view(client, name, deleted=True)
    before = group.table.read()[:, t.INCARNATION].copy()
    slots = (int(slot) for slot in np.flatnonzero(before[1:]))
    lapsed = members.lapsed(client, name, group.lease, slots, group.weights.info.replicas)
    rows = group.table.read()
    epochs, done = epochs_of(client, f"{name}/units")
    # Other members have left in the meantime.
    dead = {slot for slot in lapsed if rows[1 + slot, t.INCARNATION] == before[1 + slot]}
    return GroupStatus(
        name=name,
        size=group.weights.size,
        scheme=group.scheme.NAME,
        settings=group.scheme.settings(),
        guards=group.guards.settings(),
        lease=group.lease,
        round=int(rows[0, t.ROUND]) >> t.ROUND_SHIFT,
        workers=tuple(
            replace(seen, alive=seen.alive and seen.slot not in dead)
            for seen in (worker_status(rows, slot) for slot in _taken(rows))
        ),
        samples=progress_of(rows).samples,
        epochs=epochs,
        done=done,
        wire=group.weights.wire,
        gone_bytes=_gone_bytes(client, name, rows, dead),
    )


def _gone_bytes(client: Client, name: str, rows: t.Rows, dead: set[int]) -> int:
    infos = client.list()
    held = _inboxes(infos, name, rows, dead)
    prefix = f"{name}/host/"
    for host in {info.name.removeprefix(prefix).split("/")[0] for info in infos if info.name.startswith(prefix)}:
        nested = f"{prefix}{host}"
        try:
            group = groups.view(client, nested)
            found = group.table.read()
            live = members.live(found)
            lost = members.lapsed(client, nested, group.lease, live, group.weights.info.replicas)
        except Error:  # it is being made or deleted, or its server is away
            continue
        if {*members.live(found)} - lost:
            held += _inboxes(infos, nested, found, lost)
        else:
            held += sum(_bytes(info) for info in infos if info.name == nested or info.name.startswith(f"{nested}/"))
    return held


def _inboxes(infos: list[BufferInfo], name: str, rows: t.Rows, dead: set[int]) -> int:
    """Return the memory of inboxes whose owners are not alive."""
    alive = {f"{name}/{INBOX}/{int(rows[1 + slot, t.INCARNATION])}" for slot in members.live(rows) if slot not in dead}
    prefix = f"{name}/{INBOX}/"
    return sum(_bytes(info) for info in infos if info.name.startswith(prefix) and info.name not in alive)


def _bytes(info: BufferInfo) -> int:
    return info.nbytes * info.versions * info.replicas
