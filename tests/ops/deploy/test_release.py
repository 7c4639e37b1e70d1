"""`make release`: its note, and the one place of the version. The command itself makes and tries the files."""

from __future__ import annotations

import re

import pytest
import yaml

import smb
from tests.ops.deploy import upgrade
from tests.ops.deploy.release import REQUIREMENTS, ROOT, ReleaseError, build_requirements, note_of

CHANGELOG = (
    "# Changelog\n\n## 0.3.0, unreleased\n\nnew\n\n## 0.2.0, 2026-11-30\n\nold\n\n### More\n\n- line\n\n"
    "## 0.1.0\n\nfirst\n"
)


def test_the_note_is_the_section_of_the_version() -> None:
    assert note_of(CHANGELOG, "0.2.0", trial=False) == "old\n\n### More\n\n- line"
    assert note_of(CHANGELOG, "0.1.0", trial=False) == "first"


def test_a_version_that_is_unreleased_or_unknown_is_refused() -> None:
    with pytest.raises(ReleaseError, match=r"put the day there"):
        note_of(CHANGELOG, "0.3.0", trial=False)
    assert note_of(CHANGELOG, "0.3.0", trial=True) == "new"
    with pytest.raises(ReleaseError, match=r"no section '## 0\.30\.0'"):
        note_of(CHANGELOG, "0.30.0", trial=True)
    with pytest.raises(ReleaseError, match=r"no section '## 0x3\.0'"):
        note_of(CHANGELOG, "0x3.0", trial=True)


def test_every_file_has_the_version_of_the_package() -> None:
    """smb/__init__.py has it; pyproject.toml reads it there, and what is deployed names the same image."""
    assert '\nversion = "' not in (ROOT / "pyproject.toml").read_text()
    assert note_of((ROOT / "CHANGELOG.md").read_text(), smb.__version__, trial=True)
    chart = yaml.safe_load((ROOT / "deploy/helm/Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {smb.__version__}
    for file in ("base", "backup"):
        images = yaml.safe_load((ROOT / f"deploy/kubernetes/{file}/kustomization.yaml").read_text())["images"]
        assert {image["newTag"] for image in images} == {smb.__version__}


def test_the_upgrade_is_from_what_the_readme_names() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,40}|v?\d[\w.]*", upgrade.named_in((ROOT / "README.md").read_text()))
    assert upgrade.named_in("tests a rolling upgrade from 0.1.0. The") == "0.1.0"
    with pytest.raises(SystemExit, match="name one"):
        upgrade.named_in("nothing")


def test_the_tools_and_what_the_build_needs_have_versions() -> None:
    """Else a release would be made with whatever is newest."""
    names = [re.split(r"[><=~ ]", need)[0] for need in build_requirements((ROOT / "pyproject.toml").read_text())]
    names += [line.split()[0] for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    pinned = {line.split("==")[0] for line in (ROOT / "tests/constraints.txt").read_text().splitlines() if "==" in line}
    assert set(names) - pinned == set()
