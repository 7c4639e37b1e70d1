"""What the tests of files share."""

from __future__ import annotations

import pytest

import smb
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.transports import EACH_WAY, way_of


@pytest.fixture(params=EACH_WAY if LONG else None)
def client(request: pytest.FixtureRequest, connect: Connect) -> smb.Client:
    """A client over one way, since files know no transports."""
    return connect(getattr(request, "param", way_of(request.node.nodeid)))
