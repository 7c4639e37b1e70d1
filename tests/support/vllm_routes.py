"""A stand-in for vLLM's HTTP server: its routes for weights. It notes calls, and serves or refuses as a test says.

Its only use is to see in which order our code calls, and what it does after an error. The real server is tested by
`make vllm`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Take = Callable[[int], None]  # what update_weights does with a generation; raises if the server refuses it


class Routes:
    """One server. `calls` are its routes in order, `infos` the init_infos, `version` the weight version."""

    def __init__(self, take: Take = lambda generation: None, port: int = 0) -> None:
        self.calls: list[str] = []
        self.infos: list[dict[str, Any]] = []
        self.version = ""
        self.paused = False
        self.take = take
        routes = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, said = routes._serve(self.path.lstrip("/"), json.loads(body) if body else {})
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def _serve(self, route: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.calls.append(route)
        try:
            if route == "pause?mode=keep":
                self.paused = True
            elif route == "resume":
                self.paused = False
            elif route == "init_weight_transfer_engine":
                self.infos.append(body["init_info"])
            elif route == "update_weights":
                self.take(body["update_info"]["generation"])
            elif route == "finish_weight_update":
                self.version = body.get("weight_version", "")
        except Exception as error:  # noqa: BLE001 - the caller gets it
            return 500, str(error).encode()
        return 200, b"{}"

    def stop(self) -> None:
        """End the server as a kill does: connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
