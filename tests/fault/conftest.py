"""What the fault tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from smb.security.credentials import CREDENTIALS_VARIABLE
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a coordinator and of servers from a to d. Who connects in the test, or in its processes, is an operator."""
    directory = tmp_path / "certificates"
    roles = (Role.COORDINATOR, Role.OPERATOR)
    make_set(directory, [*(Holder(role, "") for role in roles), *(Holder(Role.SERVER, name) for name in "abcd")])
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(directory / "operator"))
    return directory
