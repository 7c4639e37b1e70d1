"""The batches that are made of work units. The units are given."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from smb.torch.training.batches import shuffled_batches
from smb.train import Unit


def test_units_become_shuffled_rows() -> None:
    """Each epoch has its own order, by the seed, which is the same at all processes; all rows come once."""
    given = [Unit(epoch, start, min(4, 10 - start)) for epoch in (0, 1) for start in (0, 4, 8)]

    def batches(seed: int) -> list[tuple[int, torch.Tensor]]:
        left = iter(given)
        return list(shuffled_batches(lambda: next(left, None), "run", 10, seed, 2))

    found = batches(7)
    assert [(epoch, len(rows)) for epoch, rows in found] == [(0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2)]
    orders = [torch.cat([rows for _, rows in found[at : at + 3]]) for at in (0, 3)]
    for epoch, rows in enumerate(orders):
        assert np.array_equal(rows.numpy(), np.random.default_rng([7, epoch]).permutation(10))
    assert not torch.equal(*orders)
    assert not all(torch.equal(one, other) for (_, one), (_, other) in zip(found, batches(8), strict=True))


@pytest.mark.parametrize(("epochs", "said"), [(3, True), (None, False)])
def test_a_training_without_batches_left_is_logged(
    caplog: pytest.LogCaptureFixture, epochs: int | None, said: bool
) -> None:
    """A second run that asks for as many epochs as the first one gets no batch, and is told why. One that asks for the
    present epoch, which others have just done, goes on with the next one."""
    caplog.set_level(logging.WARNING, "smb")
    assert not list(shuffled_batches(lambda: None, "run", 10, 0, epochs))
    assert ("all batches of all 3 epochs" in caplog.text) == said
