"""Memory servers are killed at random under accumulating clients: an acknowledged addition counts once, none fails."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import smb
from tests.fault.long import LIMIT_S, LONG, seed, times
from tests.support.checkers import Run, check_at_rest, check_between
from tests.support.clients import Adders
from tests.support.daemons import running_daemons, wait_for
from tests.support.transports import EACH_WAY, FAR

pytestmark = pytest.mark.timeout(LIMIT_S)

COUNT = 100_003
ROUNDS = times(5, 200)


@pytest.mark.parametrize("ways", [*([(FAR, FAR)] if LONG else []), ("shm", "shm"), (FAR, "shm")], ids="+".join)
# More than 5 s: kills come at random: some tens are needed until one hits in the middle.
def test_kills_under_two_clients(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """Two clients add to lanes of their own and a common one; a server dies at a random moment and comes back, on the
    same port or another, again and again.
    """
    rng = random.Random(seed())
    with running_daemons(tmp_path) as daemons:
        address = daemons.coordinator().address
        servers = [daemons.memory_server(address, name) for name in ("a", "b")]
        assert all(server.address for server in servers)
        adders = Adders(address, ways, COUNT)
        try:
            began = time.monotonic()
            wait_for(lambda: min(adders.done()) >= 20, "additions", 60)
            before, warm_up_s = sum(adders.done()), time.monotonic() - began
            fired = 0
            for _ in range(ROUNDS):
                index = rng.randrange(2)
                moment = time.monotonic() + rng.uniform(0.0, 0.15)
                while time.monotonic() < moment:
                    pass
                port = servers[index].address.rpartition(":")[2] if rng.random() < 0.7 else "0"
                servers[index].kill()
                fired += 1
                servers[index] = daemons.memory_server(address, "ab"[index], "--listen", f"127.0.0.1:{port}")
                assert servers[index].address
                seen = adders.done()
                if FAR in ways:
                    wait_for(
                        lambda seen=seen: all(n > m for n, m in zip(adders.done(), seen, strict=True)), "additions", 60
                    )
            acknowledged = adders.finish()
        except BaseException:
            adders.kill()
            raise
        Run(before, warm_up_s, ROUNDS, fired, True).check(rate_min=1)
        with smb.connect(address, transport=FAR) as client:
            for number, done in enumerate(acknowledged):
                check_at_rest(client.open(f"lane-{number}").read(), done, f"lane {number}")
            check_at_rest(client.open("common").read(), sum(acknowledged), "common")
        print(f"{fired} kills, {sum(acknowledged)} additions of {COUNT} elements, 0 bad")


@pytest.mark.parametrize("way", EACH_WAY)
def test_clients_that_die(tmp_path: Path, way: str) -> None:
    """A client is killed between sending and its acknowledgement: what it was told counts, what it was not counts at
    most once in every element; the others go on.
    """
    rng = random.Random(seed())
    with running_daemons(tmp_path) as daemons:
        address = daemons.coordinator().address
        assert [daemons.memory_server(address, name).address for name in ("a", "b")]
        rounds, at_once = times(2, 125), 4
        for _ in range(rounds):
            adders = Adders(address, (way,) * at_once, COUNT)
            try:
                wait_for(lambda adders=adders: min(adders.done()) >= 1, "additions", 60)
                for process in adders.processes:
                    moment = time.monotonic() + rng.uniform(0.0, 0.02)
                    while time.monotonic() < moment:
                        pass
                    process.kill()
                for process in adders.processes:
                    process.join()
            except BaseException:
                adders.kill()
                raise
            acknowledged = adders.done()
            with smb.connect(address, transport=FAR, timeout=20) as client:
                # One addition to each lane may have been on its way; acknowledgements are noted after both of a round.
                for number, done in enumerate(acknowledged):
                    check_between(client.open(f"lane-{number}").read(), done, done + 1, f"lane {number}")
                check_between(client.open("common").read(), sum(acknowledged), sum(acknowledged) + at_once, "common")
            adders.drop()
        print(f"{rounds * at_once} clients killed, 0 bad")
