"""The coordinator's page and `smb top` tell who publishes a state, and how far each reader is."""

from __future__ import annotations

import json
from typing import Any

import torch

from smb.torch import Publisher, follow
from tests.conftest import Connect
from tests.support.daemons import wait_for


def test_clients_tell_what_they_publish_and_read(connect: Connect) -> None:
    """With their renewals: the generation of the publisher, and how far behind the reader is, until both are gone."""
    trainer, evaluator = connect(name="trainer"), connect(name="evaluator")
    state = {"w": torch.zeros(1000)}
    publisher = Publisher(trainer, "policy", state)
    publisher.publish()
    follower = follow(evaluator, "policy")
    follower.state_dict()
    publisher.publish()
    publisher.publish()

    def told() -> dict[str, Any]:
        (found,) = json.loads(evaluator._coordinator.overview(10.0))["states"]
        return {key: found[key] for key in ("publisher", "generation", "readers", "behind")}

    wanted = {"publisher": trainer.name, "generation": 3, "readers": 1, "behind": 2}
    wait_for(lambda: told() == wanted, "both reports", 60)
    del follower
    wait_for(lambda: told()["readers"] == 0, "the end of the reader", 60)
    trainer.close()
    wait_for(lambda: told()["publisher"] == "", "the end of the trainer", 60)
