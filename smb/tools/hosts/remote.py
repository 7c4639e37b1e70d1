"""One process on a host, as this side sees it: an ssh connection whose input keeps it alive."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from smb.errors import InvalidArgumentError, UnavailableError
from smb.security.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from smb.tools.hosts.names import bare
from smb.tools.hosts.there import HEARTBEAT_S, SPEC_BYTES_MAX

START_S = 60.0  # ssh, Python, the imports of a daemon
_STOP_S = 25.0  # longer than a daemon or program has for its own end
_LINE_MAX = 1 << 16
_LINES_KEPT = 20
# Asks for no password; notices a dead network after 15 s.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
# As `python -m`, without searching the working directory, for every version of Python.
_CODE = "import sys; sys.path[:] = filter(None, sys.path); from smb.tools.hosts.there import main; sys.exit(main())"


@dataclass(frozen=True)
class Ssh:
    """How a host is reached: the words of ssh, and the Python there."""

    words: tuple[str, ...]
    python: str

    def command(self, host: str) -> list[str]:
        """Return the command that runs our process on a host. An empty host is this machine, without ssh."""
        there = [self.python, "-c", _CODE]
        if not host:
            return there
        options = [word for option in _OPTIONS for word in ("-o", option)]
        return [*self.words, "-T", *options, "--", host, "exec " + shlex.join(there)]


def credentials_files(directory: Path) -> dict[str, str]:
    """Return the files of a directory of credentials, by name. Raises InvalidArgumentError if one cannot be read."""
    try:
        return {name: (directory / name).read_text() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)}
    except OSError as error:
        raise InvalidArgumentError(f"credentials in {directory}: {error.filename}: {error.strerror}") from None


class Remote:
    """A daemon, or programs, on a host. They end with this object's stop(), with this process, or with the connection.

    `show` gets each line that they, or ssh, write to standard error.
    """

    def __init__(self, ssh: Ssh, host: str, name: str, spec: Mapping[str, Any], show: Callable[[str], None]) -> None:
        self.host, self.name = host, name
        self._ssh, self._show = ssh, show
        self._last: deque[str] = deque(maxlen=_LINES_KEPT)
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        pipe = subprocess.PIPE
        try:
            # A session of its own: a Ctrl-C of the terminal reaches us alone, and we end it in order.
            self._process = subprocess.Popen(  # noqa: S603 - the user's own ssh
                ssh.command(host), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise UnavailableError(f"{self.where()}: cannot run {ssh.command(host)[0]}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input = self._process.stdin
        self._threads = [
            threading.Thread(target=work, args=arguments, daemon=True)
            for work, arguments in (
                (self._beat, (json.dumps(spec).encode() + b"\n",)),
                (self._read_events, (self._process.stdout,)),
                (self._read_lines, (self._process.stderr,)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def where(self) -> str:
        """Return what runs where, for messages."""
        return f"{self.name} on {bare(self.host) or 'this machine'}"

    @property
    def running(self) -> bool:
        """Whether the connection is there."""
        return self._process.poll() is None

    def _beat(self, first: bytes) -> None:
        """Write what to start, then a line now and then, until stop(). Closes the input, which ends the other side."""
        with contextlib.suppress(OSError):  # the connection is lost, which `running` tells
            line = first
            while True:
                self._input.write(line)
                self._input.flush()
                line = b"\n"
                if self._stopping.wait(HEARTBEAT_S):
                    break
        with contextlib.suppress(OSError):
            self._input.close()

    def _read_events(self, output: IO[bytes]) -> None:
        with output:
            while line := output.readline(SPEC_BYTES_MAX):
                with contextlib.suppress(ValueError):  # a greeting of the host's shell
                    event = json.loads(line)
                    if isinstance(event, dict):
                        self._events.put(event)

    def _read_lines(self, errors: IO[bytes]) -> None:
        with errors:
            while line := errors.readline(_LINE_MAX):
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                self._show(text)

    def wait_event(self, deadline: float) -> dict[str, Any]:
        """Return the next event. Raises UnavailableError, with what to do, if it failed, ended, or is late."""
        while True:
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                if not self.running:
                    for thread in self._threads[1:]:
                        thread.join(_STOP_S)  # what it said last
                    if self._events.empty():
                        raise UnavailableError(f"{self.where()}: {self._why()}") from None
                elif time.monotonic() > deadline:
                    raise UnavailableError(f"{self.where()} did not start within {START_S:g} s") from None
                continue
            if event.get("event") == "failed":
                raise UnavailableError(f"{self.where()}: {event.get('reason')}")
            return event

    def _why(self) -> str:
        """Return why the connection ended, and what to do."""
        said = " | ".join(line for line in list(self._last)[-3:] if line) or "it said nothing"
        command = shlex.join(self._ssh.command(self.host))
        if self.host and self._process.returncode == 255:
            trial = shlex.join([*self._ssh.words, "-o", "BatchMode=yes", self.host, "true"])
            return f"ssh failed: {said}. Try it: {trial}"
        if "No module named" in said or "not found" in said or "No such file" in said:
            return f"{said}. Install the package there, or name its Python by --python; the command was {command}"
        return f"it ended with {self._process.returncode}: {said}"

    def ended(self) -> UnavailableError:
        """Return the error for a connection that has ended by itself."""
        return UnavailableError(f"{self.where()}: {self._why()}")

    def ask_to_end(self) -> None:
        """Close the input, which ends what was started there. Does not wait."""
        self._stopping.set()

    def stop(self, deadline: float) -> None:
        """End what was started there, and wait for it; at the deadline end the connection, which ends it as well."""
        self.ask_to_end()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_STOP_S)


def stop_all(remotes: Sequence[Remote]) -> None:
    """Stop them side by side, in 25 s at most."""
    for remote in remotes:
        remote.ask_to_end()
    deadline = time.monotonic() + _STOP_S
    for remote in remotes:
        remote.stop(deadline)
