"""The schemes' settings: what each takes, what is refused, and that docs/training.md tells the same."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import smb
from smb.train import ASP, BSP, EAMSGD, EASGD, HSGD, R2SP, SEASGD, SSP, AsyncDiLoCo, DiLoCo, Guards, LocalSGD, scheme_of

SCHEMES = (ASP, AsyncDiLoCo, BSP, DiLoCo, EAMSGD, EASGD, HSGD, LocalSGD, R2SP, SEASGD, SSP)
WHOLE = {"every", "quorum", "staleness", "batch_size", "warmup", "skips", "fragments", "delay"}
SAMPLE = dict.fromkeys(WHOLE, 2) | {"token_weights": True, "step_wire": "int8"}  # what is fine; 0.5 for the others


def _makers() -> list[Any]:
    found = []
    for scheme in SCHEMES:
        needs = {"every": 1} if scheme is LocalSGD else {}
        for field in dataclasses.fields(scheme):
            make = lambda value, scheme=scheme, needs=needs, name=field.name: scheme(**{**needs, name: value})  # noqa: E731
            found.append(pytest.param(make, field.name, id=f"{scheme.NAME}-{field.name}"))
    return found


@pytest.mark.parametrize(("make", "name"), _makers())
def test_what_each_setting_takes(make: Callable[[Any], Any], name: str) -> None:
    """Whole numbers where these are meant, numbers elsewhere; no booleans, texts, NaN or infinity for either."""
    value = SAMPLE.get(name, 0.5)
    assert getattr(make(value), name) == value
    wrong = ["2", float("nan"), float("inf"), -1]
    wrong += [1, "yes"] if name == "token_weights" else [True, False]
    wrong += [2.5, 2.0] if name in WHOLE else []
    for bad in wrong:
        with pytest.raises(smb.InvalidArgumentError, match=name):
            make(bad)


def test_guards_take_numbers() -> None:
    """The same for the limits of a contribution."""
    assert Guards(norm_max=1, norm_factor=None, staleness_max=0).staleness_max == 0
    for bad in ({"norm_max": True}, {"norm_factor": "5"}, {"staleness_max": 1.5}, {"staleness_max": True}):
        with pytest.raises(smb.InvalidArgumentError, match=next(iter(bad))):
            Guards(**bad)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("bsp", {"every": 5}, r"scheme 'bsp' has no setting every; it takes quorum, grace, token_weights$"),
        ("diloco", {"evry": 5, "beta": 1}, r"scheme 'diloco' has no setting beta, evry; it takes .*every, outer_lr"),
        ("asp", {"every": 5}, r"scheme 'asp' has no setting every; it has no settings$"),
        ("localsgd", {"quorum": 2}, r"scheme 'localsgd' needs every="),
        ("nonsense", {}, r"there is no scheme 'nonsense'; the schemes are asp, .*ssp"),
    ],
)
def test_foreign_settings(name: str, settings: dict[str, Any], says: str) -> None:
    """A setting that the scheme does not have is refused with those that it has."""
    with pytest.raises(smb.InvalidArgumentError, match=says):
        scheme_of(name, settings)


def test_the_document_tells_them() -> None:
    """docs/training.md has every scheme's settings, defaults and copies, and what each setting means."""
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (?:`(.*)`)? ?\| (.*) \|$", text, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(scheme.__name__ for scheme in SCHEMES)
    told = set()
    for title, name, settings, copies in rows:
        scheme = getattr(smb.train, title)
        made = scheme(every=1) if scheme is LocalSGD else scheme()
        wanted = {
            field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}"
            for field in dataclasses.fields(scheme)
        }
        assert (name, set(settings.split(", ")) - {""}, copies) == (scheme.NAME, wanted, str(made.footprint()))
        told |= {field.name for field in dataclasses.fields(scheme)}
    meanings = text.split("| setting | meaning |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", meanings, re.MULTILINE)) == told


def test_the_taxonomy_has_every_scheme() -> None:
    """docs/schemes.md says of each scheme who waits, as its traits do: in rounds it is synchronous."""
    text = (Path(__file__).parents[3] / "docs" / "schemes.md").read_text()
    table = text.split("### The schemes in the taxonomy")[1].split("### ")[0]
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if line.startswith("| `")]
    schedules = {name: row[2] for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert schedules.keys() == {scheme.__name__ for scheme in SCHEMES}
    for scheme in SCHEMES:
        assert schedules[scheme.__name__].startswith("synchronous") == (scheme.WAITS or scheme is HSGD), scheme
