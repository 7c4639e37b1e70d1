"""What is seen of a training from outside moves with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import smb
import smb.train
from tests.support.training import Crew, together

Connect = Callable[..., smb.Client]


def test_metrics(connect: Connect) -> None:
    """Rounds, contributions, samples, staleness and refusals of every worker are on the page; none without a group."""
    client = connect()
    registry = CollectorRegistry()
    registry.register(smb.train.Collector(client, "run"))
    assert generate_latest(registry) == b""
    crew = Crew(connect, 2, smb.train.AsyncDiLoCo(every=1))
    status = smb.train.status(client, "run")
    assert (status.scheme, status.round, [w.contributions for w in status.workers]) == ("asyncdiloco", 0, [0, 0])
    assert status.settings["outer_lr"] == 0.07
    crew.step(0, samples=8)
    crew.step(0, samples=8)
    crew.step(1, samples=4)
    crew.values[1][0] = np.nan
    with pytest.raises(smb.train.RefusedContributionError):
        crew.workers[1].step()
    host = smb.train.status(client, "run").workers[0].host
    table = smb.train.status(client, "run")._repr_html_()
    for shown in ("training run", "asyncdiloco, ", "outer_lr=0.07", f"<td>{host}:", "<td>trains</td>", "<td>16</td>"):
        assert shown in table

    def of(name: str, worker: int) -> float | None:
        return registry.get_sample_value(name, {"group": "run", "worker": str(worker), "host": host})

    assert registry.get_sample_value("smb_training_round_count", {"group": "run", "scheme": "asyncdiloco"}) == 3
    assert [of("smb_training_contributions_total", worker) for worker in (0, 1)] == [2, 1]
    assert [of("smb_training_samples_total", worker) for worker in (0, 1)] == [
        16,
        4,
    ]  # of the steps that were told how many
    assert [of("smb_training_refused_contributions_total", worker) for worker in (0, 1)] == [0, 1]
    assert [of("smb_training_staleness_max_count", worker) for worker in (0, 1)] == [0, 2]
    assert (of("smb_training_norm", 0) or 0) > 1
    assert [of("smb_training_staleness_count", worker) for worker in (0, 1)] == [0, 2]
    assert (of("smb_training_bytes_total", 0) or 0) > 2 * crew.values[0].nbytes
    clock = of("smb_training_clock_count", 0) or 0
    crew.step(0)
    assert (of("smb_training_clock_count", 0) or 0) > clock
    assert of("smb_training_alive", 1) == 1
    crew.close()
    assert of("smb_training_alive", 1) == 0


def test_metrics_of_who_was_late_and_who_was_given_up(connect: Connect) -> None:
    """A contribution after its round was closed counts as dropped, a member that comes back after its lease as one
    that joined again."""
    client = connect()
    registry = CollectorRegistry()
    registry.register(smb.train.Collector(client, "run"))

    def total(name: str) -> float:
        return sum(s.value for family in registry.collect() for s in family.samples if s.name == name)

    crew = Crew(connect, 3, smb.train.BSP(quorum=2))
    together(lambda: crew.step(0), lambda: crew.step(1))
    assert total("smb_training_dropped_contributions_total") == 0
    crew.step(2)
    assert total("smb_training_dropped_contributions_total") == 1
    assert total("smb_training_rejoins_total") == 0
    joined = {each.joined for each in smb.train.status(client, "run").workers}
    crew.workers[2].group.rejoin(lost_steps=0)
    assert total("smb_training_rejoins_total") == 1
    assert {each.joined for each in smb.train.status(client, "run").workers} == joined
    crew.close()
