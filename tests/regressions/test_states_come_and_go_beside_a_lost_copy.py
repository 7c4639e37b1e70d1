"""While states of weights came and went fast, a lost copy of them was not made anew: of a group that is copied no
member may be in the making, and there always was one.
"""

from __future__ import annotations

import threading

import smb
from tests.support.daemons import wait_for
from tests.support.second_copy import lose

COPIED_S = 20.0  # it took as long as states came
CLIENTS = 6


def test_the_copy_is_made_while_they_come_and_go() -> None:
    """Clients make a state, step with it and delete it, without a pause: the weights have two copies again soon after a
    server was lost, and the clients go on."""
    with smb.LocalCluster(servers=3, capacity="32MiB") as cluster, smb.connect(cluster.address, timeout=60) as client:
        weights = client.create("weights", 3000, replicas=2, servers=1)
        client.create("gradient", like=weights).fill(1)
        stop, rounds = threading.Event(), [0] * CLIENTS
        failed: list[smb.Error] = []

        def work(number: int) -> None:
            with smb.connect(cluster.address, timeout=60) as one:
                ours, gradient = one.open("weights"), one.open("gradient")
                while not stop.is_set():
                    try:
                        state = one.create(f"state-{number}", state_of=ours)
                        ours.apply("momentum", gradient, state, lr=1.0, mu=0.5)
                        one.delete(state)
                        rounds[number] += 1
                    except smb.UnavailableError:  # of the lost server
                        one.delete(f"state-{number}", missing_ok=True)
                    except smb.Error as error:
                        failed.append(error)
                        return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: all(rounds) or failed, "states")
            place = weights.layout.segments[0]
            (server,) = (each for each in cluster.servers if each.name == place.server)
            server.kill()
            lose(cluster.memory_directory, server.name)
            wait_for(lambda: client.open("weights").info.layout.segments[0].server != server.name, "fail-over", 20.0)
            wait_for(lambda: not client.open("weights").info.degraded or failed, "second copy", COPIED_S)
            before = list(rounds)
            wait_for(lambda: all(a > b for a, b in zip(rounds, before, strict=True)) or failed, "states after it")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed
