"""Access to a daemon's pages: the one at /, its JSON, /targets and /metrics. They name buffers, clients and servers.

With a token (a file that Prometheus has too), each request must show it, as a bearer token or as the password in a
browser's prompt. Without a token, all local users are admitted on loopback, and nobody beyond it, unless `insecure`
says that all who reach the port are trusted. The pages /healthz, /livez and /readyz contain no names and are open to
all, because orchestrators probe them.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from smb.config.limits import TOKEN_FILE_BYTES_MAX
from smb.config.parse import parse_address
from smb.config.untrusted import open_kept, read_opened
from smb.daemon.process import Admission, Answer
from smb.errors import InvalidArgumentError
from smb.security.credentials import is_loopback

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

TOKEN_CHARACTERS_MIN = 16
_OPEN = frozenset({"/healthz", "/livez", "/readyz"})
_ASKS = (("WWW-Authenticate", 'Basic realm="Soft Memory Box: any name, the token as password", charset="UTF-8"'),)

_log = logging.getLogger("pages")


def read_token(path: Path) -> str:
    """Return the token in a file. Raises InvalidArgumentError if the file cannot be read, if everybody may read it, if
    users other than this one and root can change or replace it, or if the token is too easy to guess.
    """
    try:
        with os.fdopen(open_kept(path, "the token "), "rb", buffering=0) as file:
            text = read_opened(file, path, TOKEN_FILE_BYTES_MAX).decode("ascii").strip()
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--metrics-token-file: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise InvalidArgumentError(f"--metrics-token-file: cannot read {path}: {why}") from None
    if len(text) < TOKEN_CHARACTERS_MIN or not text.isprintable() or " " in text:
        raise InvalidArgumentError(
            f"--metrics-token-file: {path} must hold one word of at least {TOKEN_CHARACTERS_MIN} characters; "
            f"`openssl rand -hex 24` makes one"
        )
    return text


def admission(address: str, token_file: Path | None, *, insecure: bool, names: Iterable[str] = ()) -> Admission:
    """Return the check of requests for the pages at `address`. `names`: host names by which others call this one.

    Raises InvalidArgumentError as `read_token` does.
    """
    host = parse_address(address)[0]
    if token_file is not None:
        return _with_token(_TokenFile(token_file))
    if not insecure and not is_loopback(host):
        _log.warning(
            "pages at %s: only /healthz is served to other machines without --metrics-token-file or --insecure", address
        )
        return _health_alone
    return _by_our_name({name.lower() for name in (host, socket.gethostname(), *names)})


class _TokenFile:
    """The token in a file, read again when the file changes: a token that others have heard of is replaced so. A file
    that cannot be used changes nothing. For any thread.
    """

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgumentError as `read_token` does."""
        self._path = path
        self._stamp = self._look()
        self._token = read_token(path)

    def now(self) -> str:
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp  # first, so that a file that cannot be used is reported once
            try:
                self._token = read_token(self._path)
            except InvalidArgumentError as error:
                _log.warning("the former token stays good: %s", error)
            else:
                _log.info("the pages' token was read again from %s", self._path)
        return self._token

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _with_token(file: _TokenFile) -> Admission:
    def admit(request: WSGIEnvironment) -> Answer | None:
        if request.get("PATH_INFO") in _OPEN or hmac.compare_digest(_shown(request).encode(), file.now().encode()):
            return None
        return Answer("401 Unauthorized", "text/plain", b"These pages take a token.\n", _ASKS)

    return admit


def _shown(request: WSGIEnvironment) -> str:
    scheme, _, rest = request.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() == "bearer":
        return str(rest).strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _health_alone(request: WSGIEnvironment) -> Answer | None:
    if request.get("PATH_INFO") in _OPEN:
        return None
    text = b"Only /healthz: the daemon has neither --metrics-token-file nor --insecure.\n"
    return Answer("403 Forbidden", "text/plain", text)


def _by_our_name(names: set[str]) -> Admission:
    """Refuse a browser that was led here by the domain of an attacker who had it resolve to our address: the attacker's
    page could read what we show. Addresses, names without a dot, and our own names belong to no attacker's domain.
    """

    def admit(request: WSGIEnvironment) -> Answer | None:
        host = _host(request.get("HTTP_HOST", ""))
        if (
            request.get("PATH_INFO") in _OPEN
            or not host
            or "." not in host
            or host in names
            or host.endswith(".localhost")
            or _is_address(host)
        ):
            return None
        return Answer(
            "421 Misdirected Request", "text/plain", b"Ask by address, or by the host's own name; or use a token.\n"
        )

    return admit


def _host(text: str) -> str:
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
