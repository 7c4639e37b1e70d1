"""After a change of roles the coordinator's token was for the new ones, of which the server had not heard. A client
that had to connect at that moment ended with "its right has expired".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import smb


@pytest.fixture
def denied(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[smb.Client, list[int]]]:
    """A client, and how often it is denied from now on."""
    connect().create("w", 1000, replicas=2)
    client, left = connect(timeout=4), [0]
    link = client._session._link_to_copies

    def link_or_not(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise smb.PermissionDeniedError("its right has expired")
        return link(*arguments, **options)

    monkeypatch.setattr(client._session, "_link_to_copies", link_or_not)
    yield client, left
    left[0] = 0


def test_the_server_hears_of_them_soon(denied: tuple[smb.Client, list[int]]) -> None:
    """Calls and locks wait for that."""
    client, left = denied
    left[0] = 6
    buffer = client.open("w")
    buffer.write(np.ones(1000, np.float32))
    assert left[0] == 0
    left[0] = 6
    with client.open("w").lock(ttl=10):
        buffer.accumulate(np.ones(1000, np.float32))
    assert left[0] == 0
    assert (buffer.read() == 2).all()


def test_it_never_hears_of_them(denied: tuple[smb.Client, list[int]]) -> None:
    """Then it is an error, at the client's timeout."""
    client, left = denied
    left[0] = 1 << 30
    with pytest.raises(smb.PermissionDeniedError, match="has expired"):
        client.open("w").read()
    with pytest.raises(smb.PermissionDeniedError, match="has expired"):
        client.open("w").lock(ttl=10).acquire()
