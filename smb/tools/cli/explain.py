"""`smb explain NAME`: what a training's exchanges, or a published state, cost each process, and what may help."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.config.printable import printable
from smb.errors import InvalidArgumentError, NotFoundError
from smb.published import MIRROR, state_of
from smb.tools.cli.connection import coordinator_at
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, counted, print_json, table

if TYPE_CHECKING:
    from smb.rpc.coordinator_client import Coordinator as CoordinatorClient

_CALL_S = 10.0
_LATER: dict[str, Any] = {"transports": [], "placed": False, "bytes": 0, "copied": 0}
_LATER_STATE: dict[str, Any] = {"times": 0, "bytes": 0, "copied": 0, "seconds": 0.0, "age_s": 0.0, "transports": []}


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A training or a published state.")],
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Explain what a training or a published state costs.

    Of a training: workers report every 2 s, by their own counters, the transport by which they reach the shared
    weights, whether their parameters lie in one array (smb.torch.place), bytes that a contribution sends and receives,
    bytes that it copies in the worker's process outside of calls ("-": none, or not counted), and the shares of the
    last half minute for which they computed, exchanged and waited for others.

    Of a published state: its publishers and readers report the transport, the mirror that they read from, and how many
    generations they have published or read; of each the bytes, the copies, and the seconds for which the process stood
    still, and the share of its time that this makes. "-" says that a client does not report or count it.

    Both say what may help. In a script, print(shared.explain()), print(publisher.explain()) and
    print(follower.explain()) tell more.

    Example: smb explain digits
    """
    if not name:
        raise InvalidArgumentError("smb explain: name a training or a published state; smb ls shows the buffers")
    with coordinator_at(coordinator) as cluster:
        try:
            found: dict[str, Any] = json.loads(cluster.overview(_CALL_S, training=name))
        except NotFoundError:
            found = _state(cluster, name)
            _show_state(found, as_json)
        else:
            _show_training(found, as_json)


def _show_training(found: dict[str, Any], as_json: bool) -> None:
    from smb.config.parse import format_bytes

    for worker in found["worker_list"]:  # an earlier release's coordinator does not say these
        worker |= {key: worker.get(key, least) for key, least in _LATER.items()}
    workers = [_costs(worker) for worker in found["worker_list"]]
    said = _advice(found["scheme"], found["worker_list"])
    if as_json:
        print_json({"training": found["name"], "scheme": found["scheme"], "workers": workers, "advice": said})
        return
    out = console()
    out.print(f"training {printable(found['name'])}: {found['scheme']}, {format_bytes(found['size'])}", soft_wrap=True)
    if not workers:
        out.print("No worker reports now.")
        return
    numbers = ("CONTRIBUTIONS", "BYTES OF EACH", "COPIES OF EACH", "COMPUTES", "EXCHANGES", "WAITS")
    rows = table("WORKER", "TRANSPORT", "PLACED", *numbers, right=numbers)
    for worker in workers:
        shares = worker["time"] or {}
        rows.add_row(
            printable(worker["worker"]),
            ", ".join(worker["transports"]) or "-",
            "yes" if worker["placed"] else "no",
            str(worker["contributions"]),
            format_bytes(worker["bytes"]),
            format_bytes(worker["copied"]) if worker["copied"] else "-",
            *(f"{shares[key]:.0%}" if shares else "-" for key in ("computing", "exchanging", "waiting")),
        )
    out.print(rows)
    if found["workers"] > len(workers):
        out.print(f"and {counted(found['workers'] - len(workers), 'worker')} more")
    for each in said:
        out.print(f"* {each}", soft_wrap=True)


def _costs(worker: dict[str, Any]) -> dict[str, Any]:
    times = max(1, worker["contributions"])
    return {
        "worker": worker["client"],
        "transports": worker["transports"],
        "placed": worker["placed"],
        "contributions": worker["contributions"],
        "bytes": worker["bytes"] // times,
        "copied": worker["copied"] // times,
        "time": worker["time"],
    }


def _advice(scheme: str, workers: list[dict[str, Any]]) -> list[str]:
    """Return what may help any of the workers, each sentence once."""
    from smb.train.advice import Costs, advice
    from smb.train.scheme import SCHEMES

    if scheme not in SCHEMES:
        return []
    said: dict[str, None] = {}
    for worker in workers:
        time = worker["time"] or {"computing": 1.0, "waiting": 0.0}
        costs = Costs(tuple(worker["transports"]), None, 1 - time["computing"], time["waiting"], None)
        said |= dict.fromkeys(advice(costs, SCHEMES[scheme].TRAITS))
    return list(said)


def _state(cluster: CoordinatorClient, name: str) -> dict[str, Any]:
    """Return what is known of a published state. Raises NotFoundError."""
    found: dict[str, Any] = {}
    with contextlib.suppress(NotFoundError):
        found = json.loads(cluster.overview(_CALL_S, buffer=name))
    # An earlier release's coordinator does not say what is a published state.
    if not found or found.get("published", found["versions"] > 1 and found["tensors"]) in (None, False, []):
        source = state_of(name) or name.partition(MIRROR)[0]
        also = f"; it belongs to {source}: smb explain {source}" if found and source != name else ""
        raise NotFoundError(f'no training and no published state is named "{name}"{also}')
    for client in (*found["publishers"], *found["readers"]):
        client |= {key: client.get(key, least) for key, least in _LATER_STATE.items()}
    return found


def _show_state(found: dict[str, Any], as_json: bool) -> None:
    from smb.config.parse import format_bytes

    clients = [_use(client, "publishes") for client in found["publishers"]]
    clients += [_use(client, "reads") for client in found["readers"]]
    said = _state_advice(found)
    if as_json:
        print_json({"state": found["name"], "generation": found["generation"], "clients": clients, "advice": said})
        return
    out = console()
    tensors = counted(len(found["tensors"]) + found["tensors_left_out"], "tensor")
    kept = f"{tensors}, {format_bytes(found['size'])}, {found['versions']} generations kept"
    out.print(f"published state {printable(found['name'])}: {kept}", soft_wrap=True)
    if not clients:
        out.print("No publisher and no reader reports now.")
        return
    numbers = ("GENERATION", "TIMES", "BYTES OF EACH", "COPIES OF EACH", "SECONDS OF EACH", "STOOD STILL")
    rows = table("CLIENT", "DOES", "TRANSPORT", "FROM", *numbers, right=numbers)
    for client in clients:
        costs = ["-"] * 5
        if client["times"]:
            copied = format_bytes(client["copied"]) if client["copied"] else "-"
            each = f"{client['seconds']:.3g}"
            costs = [str(client["times"]), format_bytes(client["bytes"]), copied, each, f"{client['share']:.0%}"]
        rows.add_row(
            printable(client["client"]),
            client["does"],
            ", ".join(client["transports"]) or "-",
            printable(client["from"]) or "-",
            str(client["generation"]),
            *costs,
        )
    out.print(rows)
    if found["readers_left_out"]:
        out.print(f"and {counted(found['readers_left_out'], 'reader')} more")
    for each in said:
        out.print(f"* {each}", soft_wrap=True)


def _use(client: dict[str, Any], does: str) -> dict[str, Any]:
    """Return a row. A client that reports no costs (of an earlier release, or without a read of its own) has None."""
    times = client["times"]
    return {
        "client": client["client"],
        "does": does,
        "transports": client["transports"],
        "from": client["from"],
        "generation": client["generation"],
        "times": times or None,
        "bytes": client["bytes"] // times if times else None,
        "copied": client["copied"] // times if times else None,
        "seconds": client["seconds"] / times if times else None,
        "share": client["seconds"] / max(1e-9, client["age_s"]) if times else None,
    }


def _state_advice(found: dict[str, Any]) -> list[str]:
    """Return what may help any of the publishers and readers, each sentence once."""
    from smb.state_costs import StateUse, advice

    published = found.get("published")
    if published is None:  # an earlier release's coordinator: it is not known how generations travel
        return []
    said: dict[str, None] = {}
    for role in ("publishers", "readers"):
        for client in found[role]:
            use = StateUse(
                found["name"],
                publishes=role == "publishers",
                transports=tuple(client["transports"]),
                times=client["times"],
                seconds=client["seconds"],
                age=client["age_s"],
                deltas=published["deltas"],
                direct_readers=found["readers_left_out"] + sum(not reader["from"] for reader in found["readers"]),
                mirrored=bool(found["mirrors"]),
            )
            said |= dict.fromkeys(advice(use))
    return list(said)
