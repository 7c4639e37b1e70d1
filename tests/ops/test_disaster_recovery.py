"""docs/disaster-recovery.md, as an operator types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import smb
from tests.support.daemons import keep_port, running_daemons, wait_for

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```sh (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVERS = ("storage-1", "storage-2")


class Operator:
    """A shell on the coordinator's host, with a directory of its own in place of / and a systemctl for one service."""

    def __init__(self, root: Path, address: str) -> None:
        page = (ROOT / "docs/disaster-recovery.md").read_text()
        self._blocks: dict[str, str] = dict(_BLOCK.findall(page))
        self._root = root
        for directory in ("var/lib/smb", "backup", "bin"):
            (root / directory).mkdir(parents=True)
        service = root / "bin/systemctl"
        service.write_text(
            "#!/bin/sh\n"
            f"cd {root}\n"
            '[ "$1" = stop ] && { kill $(cat pid); while kill -0 $(cat pid) 2>/dev/null; do sleep 0.02; done; exit; }\n'
            f"smb coordinator --listen {address} --metrics 127.0.0.1:0 --state {root}/var/lib/smb 2>>log >/dev/null &\n"
            "echo $! >pid\n"
            "until smb status >/dev/null 2>&1; do sleep 0.1; done\n"
        )
        service.chmod(0o755)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
        path = f"{root}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = environment | {"PATH": path, "SMB_COORDINATOR": address, "SMB_OWNER_PID": str(os.getpid())}

    def types(self, text: str) -> str:
        """Run commands; return what they print."""
        for path in ("/var/lib/smb", "/backup"):
            text = re.sub(rf"(?<=\s){path}", f"{self._root}{path}", text)
        done = subprocess.run(
            ["bash", "-e", "-c", text], env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def follows(self, block: str) -> str:
        """Run a block of the page."""
        return self.types(self._blocks[block])


# More than 5 s: runs the commands of the page one by one, as programs, with restarts in between.
def test_the_page_works_as_it_is_written(tmp_path: Path) -> None:
    """A backup, a creation, a drain, then the restore. What moved is there; what is new is quarantined, freed by
    hand, and its memory is free again.
    """
    with keep_port() as kept, running_daemons(tmp_path) as daemons:
        address = f"127.0.0.1:{kept.getsockname()[1]}"
        operator = Operator(tmp_path / "host", address)
        operator.types("systemctl start smb-coordinator")
        for name in SERVERS:
            assert daemons.memory_server(address, name).address  # it has registered
        try:
            with smb.connect(address, timeout=20) as client:
                values = np.arange(1000, dtype=np.float32)
                client.create("kept", 1000, servers=[SERVERS[0]]).write(values)
                operator.follows("backup")
                client.create("new", 1000, servers=[SERVERS[0]]).write(values)
                operator.types(f"smb drain {SERVERS[0]} --wait; smb undrain {SERVERS[0]}")
                operator.follows("restore")
                wait_for(lambda: operator.follows("look").count(" alive ") == len(SERVERS), "both servers")
                wait_for(lambda: not client.open("kept").info.lost, "the records to be brought up to what servers hold")
                np.testing.assert_array_equal(client.open("kept").read(), values)
                quarantined = json.loads(operator.follows("list"))["quarantined"]
                assert [(each["server"], each["buffer"]) for each in quarantined] == [(SERVERS[1], "")]
                operator.types(f"smb forget {SERVERS[1]} {quarantined[0]['segment']}")
                assert json.loads(operator.follows("list"))["quarantined"] == []
                assert "frees 0 quarantined segments" in operator.follows("forget")
                used = {server.name: server.used for server in client.servers()}
                assert used == {SERVERS[0]: 0, SERVERS[1]: quarantined[0]["bytes"]}
        finally:
            operator.types("systemctl stop smb-coordinator")
