"""What workers report of their time: computing, exchanging, waiting for others."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train.time_spent import Stopwatch, TimeSpent
from tests.support.daemons import wait_for

SLOW_S, FAST_S = 0.4, 0.01  # what a step of each worker takes
MOST = 0.6  # of the time


def test_a_stopwatch_counts_its_blocks_and_the_open_one() -> None:
    """Also where a block ends by an error; the time outside of blocks does not count."""
    seconds = [100.0]
    spent = TimeSpent(lambda: seconds[0])
    watch: Stopwatch = spent.waiting
    assert (watch.seconds, watch.runs) == (0.0, False)
    with watch:
        seconds[0] += 2
        assert (watch.seconds, watch.runs) == (2.0, True)
    seconds[0] += 5

    def fail() -> None:
        with watch:
            seconds[0] += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (watch.seconds, watch.runs, spent.seconds) == (3.0, False, 8.0)


def test_a_slow_worker_is_named_as_the_one_that_is_waited_for() -> None:
    """Of two workers of localsgd one takes 40 times as long for a step. The page says of the quick one that it waits
    and of the slow one that it computes, most of their time, and that the training waits for the slow one. Takes some
    seconds: workers report every 2 s.
    """
    leaving = threading.Event()
    with smb.LocalCluster(servers=1, capacity="32MiB") as cluster:

        def work(label: str, step_s: float) -> None:
            with smb.connect(cluster.address, name=label) as client:
                values = np.zeros(1000, np.float32)
                with smb.train.join(client, "run", values, smb.train.LocalSGD(every=1)) as worker:
                    while not leaving.wait(step_s):  # in the place of a computation
                        values += 0.01
                        worker.step(samples=1)

        def told() -> dict[str, Any]:
            url = f"http://{cluster.coordinator.metrics}/api/training?name=run"
            with urllib.request.urlopen(url, timeout=10) as page:
                return dict(json.load(page))

        threads = [threading.Thread(target=work, args=each) for each in (("slow", SLOW_S), ("quick", FAST_S))]
        for thread in threads:
            thread.start()
        try:
            with smb.connect(cluster.address) as client:
                client.open("run", timeout=20)

            def shares() -> dict[str, dict[str, float]]:
                workers = told()["worker_list"]
                return {each["client"].partition(" ")[0]: each["time"] for each in workers if each["time"]}

            def as_it_is() -> bool:
                found = shares()
                return found.keys() == {"slow", "quick"} and (
                    found["slow"]["computing"] > MOST and found["quick"]["waiting"] > MOST
                )

            wait_for(as_it_is, "shares of time")
            assert shares()["slow"]["waiting"] < 1 - MOST
            found = wait_for(lambda: (each := told())["waits_for"] and each, "somebody who is waited for")
            assert [name.partition(" ")[0] for name in found["waits_for"]] == ["slow"]
            assert "waits for slow" in found["why"]
        finally:
            leaving.set()
            for thread in threads:
                thread.join(60)
