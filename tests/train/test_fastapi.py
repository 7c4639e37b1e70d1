"""examples/fastapi_serve.py under the real FastAPI and uvicorn: weights change under load, no request is dropped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import smb
import smb.torch
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.daemons import wait_for
from tests.support.transports import SLOWNESS

# In the short form test_publish.py has readers of states that change under them, in every order.
pytestmark = pytest.mark.skipif(not LONG, reason="one more example; SMB_LONG=1 runs it")
ROOT = Path(__file__).parents[2]
INPUTS = [0.5, -1.0, 2.0, 0.25]
CALLERS, GENERATIONS = 4, 20
PATIENCE_S = 60 * SLOWNESS


@pytest.fixture
def served(cluster: smb.LocalCluster, kept_port: int, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The example's server, and its log. It answers once there is a generation."""
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", "fastapi_serve:app", "--port", str(kept_port)]
    with log.open("wb") as to:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=to, stderr=to, env=os.environ | {"SMB_COORDINATOR": cluster.address}
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


class Caller(threading.Thread):
    """Asks over one connection until it is stopped. Any answer but 200 ends it, and is kept as `failure`."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.answers: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def ask(self) -> dict[str, Any]:
        body = json.dumps({"inputs": INPUTS})
        self._connection.request("POST", "/answer", body, {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        text = reply.read()
        assert reply.status == 200, (reply.status, text)
        found: dict[str, Any] = json.loads(text)
        return found

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.answers.append(self.ask())
        except BaseException as error:  # noqa: BLE001 - checked by the test
            self.failure = error
        finally:
            self._connection.close()


def sees(callers: list[Caller], generation: int) -> bool:
    """Return True if each caller has an answer of that generation. Raises what ended a caller."""
    for caller in callers:
        if caller.failure is not None:
            raise caller.failure
    return all(caller.answers and caller.answers[-1]["generation"] >= generation for caller in callers)


@pytest.mark.timeout(4 * PATIENCE_S + 60)
# More than 5 s: a server that imports PyTorch and FastAPI is started.
def test_weights_change_and_no_request_is_dropped(
    served: tuple[subprocess.Popen[bytes], Path], kept_port: int, connect: Connect
) -> None:
    """Each answer is of one generation as a whole, no caller goes back to an older one, all come to the last one, and
    the server ends in order while it waits for the next generation.
    """
    from examples.fastapi_serve import network

    process, log = served
    model = network().eval()
    publisher = smb.torch.Publisher(connect(), "policy", model)
    expected: dict[int, torch.Tensor] = {}

    def publish() -> int:
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.normal_()
            expected[len(expected) + 1] = model(torch.tensor(INPUTS))
        return publisher.publish()

    assert publish() == 1
    wait_for(lambda: b"Application startup complete" in log.read_bytes(), "the server", PATIENCE_S)
    callers = [Caller(kept_port) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    for generation in range(2, GENERATIONS + 1):
        assert publish() == generation
        if generation % 4 == 0:  # the others follow one another as fast as they are published
            wait_for(partial(sees, callers, generation), f"generation {generation}", PATIENCE_S)
    for caller in callers:
        caller.stop.set()
    for caller in callers:
        caller.join(PATIENCE_S)
        assert caller.failure is None
        numbers = [answer["generation"] for answer in caller.answers]
        assert numbers == sorted(numbers)
        assert {4, 8, 12, 16, 20} <= set(numbers)
        for answer in caller.answers:
            assert torch.allclose(torch.tensor(answer["outputs"]), expected[answer["generation"]], atol=1e-5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
    assert b"Application shutdown complete" in log.read_bytes()
    assert b"Traceback" not in log.read_bytes()
