from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_server import EngineServer, engine_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """One server for a file of tests. That it lives and that the witness segment is untouched is checked at its end."""
    directory: Path = tmp_path_factory.mktemp("wire")
    with engine_server(directory) as running:
        yield running
