"""`smb explain TRAINING`: what the exchanges of each worker cost, and what may make them cheaper."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from smb.config.printable import printable
from smb.tools.cli.connection import coordinator_at
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, counted, print_json, table

_CALL_S = 10.0
_LATER: dict[str, Any] = {"transports": [], "placed": False, "bytes": 0, "copied": 0}


def explain(
    name: Annotated[str, typer.Argument(metavar="TRAINING", help="The training's name.")],
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Explain what a training's exchanges cost, and what may help.

    Workers report every 2 s, by their own counters: the transport by which they reach the shared weights, whether their
    parameters lie in one array (smb.torch.place), bytes that a contribution sends and receives, bytes that it copies in
    the worker's process outside of calls ("-": none, or not counted), and the shares of the last half minute for which
    they computed, exchanged and waited for others. In a script, print(shared.explain()) tells it by tensor.

    Example: smb explain digits
    """
    from smb.config.parse import format_bytes

    with coordinator_at(coordinator) as cluster:
        found: dict[str, Any] = json.loads(cluster.overview(_CALL_S, training=name))
    for worker in found["worker_list"]:  # an earlier release's coordinator does not say these
        worker |= {key: worker.get(key, least) for key, least in _LATER.items()}
    workers = [_costs(worker) for worker in found["worker_list"]]
    said = _advice(found["scheme"], found["worker_list"])
    if as_json:
        print_json({"training": name, "scheme": found["scheme"], "workers": workers, "advice": said})
        return
    out = console()
    out.print(f"training {printable(name)}: {found['scheme']}, {format_bytes(found['size'])}", soft_wrap=True)
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
