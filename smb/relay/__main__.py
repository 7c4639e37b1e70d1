"""`python -m smb.relay COORDINATOR SERVER`. memserver/relays.py describes its input and output."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from smb.client import Client, connect
from smb.relay.mirror import Relay
from smb.relay.plans import Plan
from smb.spi import session_of

_CALL_S = 20.0  # enough for one block over a slow link
_REPORT_S = 0.5
_SESSION_ENDED = 3  # exit status

Mirror = tuple[str, int]  # name and id: another mirror may get the same name later


def main(coordinator: str, server: str) -> None:
    """Fill the mirrors that the standard input names, until it ends."""
    relays: dict[Mirror, Relay] = {}
    hurry = threading.Event()
    with connect(coordinator, name=f"relay of {server}", timeout=_CALL_S) as client:
        threading.Thread(target=_report, args=(client, relays, hurry), daemon=True).start()
        for line in sys.stdin:
            tasks: dict[Mirror, Any] = {(task["name"], task["id"]): task for task in json.loads(line)}
            for mirror in [each for each in relays if each not in tasks]:
                relays.pop(mirror).stop()
            for mirror, task in tasks.items():
                if mirror not in relays:
                    relays[mirror] = Relay(client, server, task["name"], task["source"], hurry.set)
                relays[mirror].plans.take(
                    Plan(number, first, last, [(end, parent) for end, parent in parents])
                    for number, first, last, parents in task["plans"]
                )
        # threads may be in the middle of calls; the session ends with its lease, a publisher's turn with its ttl
        os._exit(0)


def _report(client: Client, relays: dict[Mirror, Relay], hurry: threading.Event) -> None:
    """Print a report every _REPORT_S, and at once when `hurry` is set."""
    while True:
        hurry.wait(_REPORT_S)
        hurry.clear()
        if session_of(client).session_ended:  # stopped for longer than the lease: the next process gets a new session
            os._exit(_SESSION_ENDED)
        report: list[dict[str, Any]] = [
            {
                "name": name,
                "id": id_,
                "version": relay.version,
                "arrived_bytes": relay.arrived_bytes(),
                "published": max(relay.version, relay.published),
                "plan_number": (latest := relay.plans.latest).number,
                "plan_last_version": latest.last_version,
                "waits": relay.plans.is_waiting,
                "feeds": {feeder: (rate.bytes_per_s, rate.limited) for feeder, rate in relay.rates().items()},
            }
            for (name, id_), relay in list(relays.items())
        ]
        try:
            print(json.dumps(report), flush=True)  # noqa: T201 - to the memory server
        except OSError:
            os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
