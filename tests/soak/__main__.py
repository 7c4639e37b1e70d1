"""See soak.py."""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak import soak

ENDING = (signal.SIGTERM, signal.SIGHUP)


def end(_number: int, _frame: object) -> None:
    """As Ctrl-C: what was started and mounted is taken down."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


parser = argparse.ArgumentParser(prog="python -m tests.soak", description=soak.__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
parser.add_argument("--minutes", type=float, default=60.0)
parser.add_argument("--seed", type=int, default=None)
parser.add_argument("--etcd", action="store_true", help="the coordinators' state in etcd, and two of them")
given = parser.parse_args()
seed = given.seed if given.seed is not None else secrets.randbits(32)
again = f"{sys.executable} -m tests.soak --minutes {given.minutes:g} --seed {seed}{' --etcd' if given.etcd else ''}"
print(f"seed {seed}: repeat with {again}", flush=True)
for each in ENDING:
    if signal.getsignal(each) != signal.SIG_IGN:  # as under nohup
        signal.signal(each, end)
directory = Path(tempfile.mkdtemp(prefix="smb-soak-"))
try:
    soak.soak(directory, given.minutes * 60, seed, etcd=given.etcd)
except BaseException:
    print(f"the clients' notes and the daemons' logs are in {directory}", flush=True)
    raise
shutil.rmtree(directory)
