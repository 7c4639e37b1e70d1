"""A step whose reading of the weights failed was made again, and the samples of it were counted once more each time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import smb
import smb.train


@pytest.mark.parametrize("scheme", [smb.train.BSP(), smb.train.DiLoCo(every=1)])
def test_samples_of_a_step_that_is_made_again(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch, scheme: smb.train.Scheme
) -> None:
    values = np.zeros(100, np.float32)
    with smb.train.join(connect(), "run", values, scheme) as worker:
        mover = worker.exchange.mover  # type: ignore[attr-defined]
        fetch, failures = mover.fetch, [smb.UnavailableError("away"), smb.UnavailableError("away")]

        def fetch_or_not(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return fetch(*arguments)

        monkeypatch.setattr(mover, "fetch", fetch_or_not)
        values += 1
        for _ in range(2):
            with pytest.raises(smb.UnavailableError, match="away"):
                worker.step(samples=8)
        worker.step(samples=8)
        assert not failures
        assert (worker.status.samples, worker.status.contributions) == (8, 1)
        values += 1
        worker.step(samples=8)
        assert (worker.status.samples, worker.status.contributions) == (16, 2)


@pytest.mark.parametrize("scheme", [smb.train.ASP(), smb.train.SSP(staleness=2), smb.train.BSP()])
def test_a_step_whose_report_failed_is_no_other(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch, scheme: smb.train.Scheme
) -> None:
    """What it sent was in the model; made again it counted once more. The next report says what this one could not."""
    values = np.zeros(100, np.float32)
    with smb.train.join(connect(), "run", values, scheme) as worker:
        member = worker.group.member
        report, failures = member.report, [smb.UnavailableError("away")]

        def report_or_not() -> None:
            if failures:
                raise failures.pop()
            report()

        monkeypatch.setattr(member, "report", report_or_not)
        for _ in range(2):
            values += 1
            worker.step(samples=8)
        assert not failures
        assert (worker.status.samples, worker.status.contributions) == (16, 2)
