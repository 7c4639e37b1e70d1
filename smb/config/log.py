"""The library's log: warnings, and lines about joins to trainings, go to standard error."""

from __future__ import annotations

import logging
import sys

from smb.config.settings import text_of

LOGGER = "smb"
TRAINING = "smb.train"  # logs one line for each join and delete, which people want to see


class _Stderr(logging.Handler):
    """Writes to the current standard error; silent if the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            sys.stderr.write(self.format(record) + "\n")


def start(training: int = logging.INFO) -> None:
    """Make the library's log visible, unless the program has set up logging. SMB_LOG sets the level in both cases.

    `training` is the level of the trainings' log if SMB_LOG is not set.
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
