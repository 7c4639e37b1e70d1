"""A daemon's log: lines of text or of JSON on standard error, and audit lines, which may go to a file of their own.

Each line of a call on the control plane has the call's id (smb/config/request_ids.py).
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import os
import sys
from pathlib import Path
from typing import Any

from smb.config.printable import printable
from smb.config.request_ids import LogsRequest
from smb.daemon.own_files import open_own
from smb.errors import Error, InvalidArgumentError

AUDIT = "audit"  # the name of the logger
TEXT, JSON = FORMATS = ("text", "json")
# Of an audit line: what was done to what, by whom, and the result.
_AUDIT_FIELDS = ("action", "target", "result", "role", "certificate", "client", "address", "why")


class OneLine(logging.Formatter):
    """Lines of text. Keeps text of others in a message (a client's name) from looking like a line of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = super().formatMessage(record)
        request = getattr(record, "request", "")
        text = printable(text)
        return f"{text} (request {request})" if request else text


class JsonLines(logging.Formatter):
    """Lines of JSON: time (UTC), level, logger, message; request and trace in a call; error if there was one; and for
    audit lines their fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        entry: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for field in ("request", "trace", *_AUDIT_FIELDS):
            if value := getattr(record, field, ""):
                entry[field] = value
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        text = json.dumps(entry, ensure_ascii=False)
        # A name may hold what steers a terminal (C1 controls) or turns a line round (marks of direction).
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class _AuditFile(logging.handlers.WatchedFileHandler):
    """A file of this user's own, to which lines are appended. If it was moved away, a new one is made."""

    def _open(self) -> Any:
        return os.fdopen(open_own(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line. A file that cannot be opened again is not the caller's error: the change was made."""
        try:
            super().emit(record)
        except (Error, OSError):
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say on standard error that a line could not be written, with the line."""
        sys.stderr.write(f"cannot write {self.baseFilename}: {sys.exc_info()[1]}; the line: {self.format(record)}\n")


def start_log(level: str, form: str = TEXT, audit: Path | None = None) -> None:
    """Send the log to stderr, one line per entry; `form` is "text" or "json". Audit lines, of whatever level, go there
    too, or with `audit` to that file, as JSON.

    Raises InvalidArgumentError for an unknown level or form, and UnavailableError if the file cannot be written.
    """
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise InvalidArgumentError(f'the log level must be debug, info, warning or error, not "{level}"')
    if form not in FORMATS:
        raise InvalidArgumentError(f'the log format must be text or json, not "{form}"')
    out = logging.StreamHandler()
    out.setFormatter(JsonLines() if form == JSON else OneLine())
    out.addFilter(LogsRequest())
    logging.basicConfig(level=number, handlers=[out], force=True)
    log = logging.getLogger(AUDIT)
    log.setLevel(logging.INFO)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = audit is None
    if audit is not None:
        file = _AuditFile(audit)
        file.setFormatter(JsonLines())
        file.addFilter(LogsRequest())
        log.addHandler(file)
    # It logs a traceback for each client that goes away before its answer, which is normal. Our own bugs are logged
    # where they happen.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
