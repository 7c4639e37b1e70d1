"""Wall clocks that can be set while a process runs, each for some processes alone (clock.c)."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path


class Clock:
    """A wall clock. Processes that are started with its `variables` go by it."""

    def __init__(self, directory: Path, name: str) -> None:
        """Two of one directory take two names. Compiles, once for each directory."""
        library = directory / "clock.so"
        if not library.exists():
            source = Path(__file__).with_name("clock.c")
            subprocess.run(
                ["cc", "-std=gnu11", "-O", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source],
                check=True,
            )
        self._file = directory / f"{name}.clock"
        self._file.write_bytes(bytes(8))
        self._library = str(library)

    def variables(self, others: Mapping[str, str]) -> dict[str, str]:
        """Return these variables of a process and its own."""
        libraries = " ".join(filter(None, [others.get("LD_PRELOAD"), self._library]))
        return {**others, "LD_PRELOAD": libraries, "SMB_TEST_CLOCK": str(self._file)}

    def set(self, ahead_s: int) -> None:
        """Let it be so many seconds ahead of the true one, at once."""
        with self._file.open("r+b") as file:  # which processes have mapped
            file.write(struct.pack("=q", ahead_s))
