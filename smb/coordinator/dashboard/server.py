"""The page at / and its JSON, on the coordinator's address for metrics. Read only. All files are served from here;
there is no build step and no outside resource.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from smb.coordinator.dashboard.history import EventWatch
from smb.coordinator.dashboard.overview import Look, OverviewJson
from smb.coordinator.dashboard_interface import LookAtStore
from smb.daemon.process import Answer
from smb.errors import NotFoundError

if TYPE_CHECKING:
    from smb.coordinator.mirrors.filling import Mirrors

_DIRECTORY = Path(__file__).parent / "web"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing inline, nothing from other origins, in no frame: so a name is never run as a script, even if we fail to quote
# it.
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),  # browsers ask each time; the tag makes that cheap
)


class DashboardServer:
    """The dashboard: what it receives, what it answers, and its page. The page calls it from any thread."""

    def __init__(self, look: Look, look_at_store: LookAtStore, address: str, mirrors: Mirrors) -> None:
        self.watch = EventWatch(look()[1])
        self.watch.look_at_store = look_at_store
        self.overview = OverviewJson(look, self.watch, address, mirrors)
        self._files = {}
        for path in _DIRECTORY.iterdir():
            if path.suffix in _KINDS:
                self._files["/" if path.name == "index.html" else f"/{path.name}"] = _answer(
                    _KINDS[path.suffix], path.read_bytes()
                )

    def __call__(self, path: str, query: str) -> Answer | None:
        """Return the answer to GET path?query; None if no such page exists."""
        if path in self._files:
            return self._files[path]
        try:
            if path == "/api/state":
                return _answer("application/json", self.overview.all())
            if path in ("/api/server", "/api/buffer", "/api/training"):
                name = parse_qs(query).get("name", [""])[0]
                overview = self.overview
                describe = {"server": overview.server, "buffer": overview.buffer, "training": overview.training}[
                    path.rsplit("/")[-1]
                ]
                return _answer("application/json", describe(name))
        except NotFoundError as error:
            return Answer("404 Not Found", "text/plain", f"{error}\n".encode(), _HEADERS)
        return None


def _answer(kind: str, body: bytes) -> Answer:
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    return Answer("200 OK", kind, body, (*_HEADERS, ("ETag", tag)), tag)
