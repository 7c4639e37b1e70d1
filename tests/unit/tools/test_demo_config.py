from __future__ import annotations

import pytest

from smb.errors import Error, InvalidArgumentError
from smb.tools.demo import DemoConfig
from smb.tools.demo.config import WorkerTask
from smb.tools.demo.extras import check_extras
from smb.tools.demo.recipes import RECIPES
from smb.train import SCHEMES


@pytest.mark.parametrize("scheme", RECIPES)
def test_every_recipe_can_be_run(scheme: str) -> None:
    """The settings that the demo gives a scheme are settings of it."""
    config = DemoConfig(scheme=scheme)
    assert scheme == SCHEMES[scheme].from_settings(config.settings).NAME


def test_every_scheme_has_a_recipe() -> None:
    """What smb.train has, the demo shows."""
    ours = {name for name, scheme in SCHEMES.items() if scheme.__module__.startswith("smb.")}  # not those of tests
    assert set(RECIPES) == ours


def test_a_scheme_that_is_not_there_is_refused() -> None:
    """An unknown scheme is refused, and the message names what there is."""
    with pytest.raises(InvalidArgumentError, match=r"unknown scheme 'nonsense'; known are bsp, .*seasgd"):
        DemoConfig(scheme="nonsense")


def test_options_take_the_place_of_the_recipes_settings() -> None:
    """An option is a setting of the scheme; what is none is refused before anything starts."""
    assert DemoConfig(scheme="diloco").settings == {"every": 20}
    assert DemoConfig(scheme="diloco", options={"every": 7, "quorum": 2}).settings == {"every": 7, "quorum": 2}
    with pytest.raises(InvalidArgumentError, match=r"scheme 'bsp'.*pigeons"):
        DemoConfig(scheme="bsp", options={"pigeons": 2})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("transport", "carrier-pigeon", "known are auto, shm, tcp"),
        ("workers", 1, "must be at least 2"),
        ("servers", 0, "must be more than 0"),
        ("epochs", 0.0, "must be more than 0"),
        ("target", 97.0, "between 0 and 1"),
        ("digits", 0, "must be more than 0"),
        ("digits", 288, "4 workers and one that joins late can have 287 digits each, of 1437, not 288"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(option: str, value: object, says: str) -> None:
    """Each bad option is refused with what would do."""
    with pytest.raises(InvalidArgumentError, match=says):
        DemoConfig(**{option: value})  # type: ignore[arg-type]


def test_moving_rates_of_all_workers_stay_below_one() -> None:
    """alpha times the number of workers is the same whatever their number: the shared model can't overshoot."""
    for workers in (2, 4, 16):
        for scheme in ("easgd", "eamsgd", "seasgd"):
            assert DemoConfig(scheme, workers=workers).settings["alpha"] * workers == pytest.approx(0.8)


def test_tasks_survive_their_way_to_the_process() -> None:
    """A task read from its JSON is the same task."""
    task = WorkerTask(
        "worker-1", "share", "digits.npz", 1, 2, 32, 1000, coordinator="127.0.0.1:1", settings={"every": 4}
    )
    assert WorkerTask.from_json(task.to_json()) == task


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is a pip command with just what is missing; matplotlib counts only where a plot is wanted."""
    monkeypatch.setattr(
        "smb.tools.demo.extras.find_spec", lambda name: None if name in ("torch", "matplotlib") else object()
    )
    with pytest.raises(Error, match=r"python -m pip install 'torch>=2\.2' 'matplotlib>=3\.8,<4'$"):
        check_extras(plot=True)
    with pytest.raises(Error, match=r"python -m pip install 'torch>=2\.2'$"):
        check_extras(plot=False)
    monkeypatch.setattr("smb.tools.demo.extras.find_spec", lambda name: object())
    check_extras(plot=True)
