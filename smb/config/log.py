"""The library's log: warnings, and what a training's join did, go to standard error."""

from __future__ import annotations

import logging
import sys

from smb.config.settings import text_of

LOGGER = "smb"
TRAINING = "smb.train"  # one line for each join and delete; people want to see those


class _Stderr(logging.Handler):
    """Writes to standard error, as it is then; silent where the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            sys.stderr.write(self.format(record) + "\n")


def start(training: int = logging.INFO) -> None:
    """Let the library be heard, unless the program has set up logging. SMB_LOG sets the level in both cases.

    `training` is the level of what trainings tell where SMB_LOG says nothing.
    """
    smb, level = logging.getLogger(LOGGER), text_of("client.log")
    if not any(isinstance(handler, _Stderr) for handler in smb.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        smb.addHandler(handler)
    if level:
        smb.setLevel(level.upper())
        logging.getLogger(TRAINING).setLevel(logging.NOTSET)
    elif not logging.root.handlers and smb.level == logging.NOTSET:
        logging.getLogger(TRAINING).setLevel(training)
