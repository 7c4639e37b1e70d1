"""Two commands of Slurm, as deploy/slurm/smb.sbatch uses them, on one machine whose nodes are loopback addresses."""

from __future__ import annotations

from pathlib import Path

_SRUN = """#!/bin/bash
# A step: the command once for each node; all are told of a SIGTERM; fails as one of them does.
while [[ ${1:-} == --* ]]; do [[ $1 != --nodelist=* ]] || FAKE_NODES=${1#*=}; shift; done
pids=()
for node in $FAKE_NODES; do SLURMD_NODENAME=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
status=0
for pid in "${pids[@]}"; do
    code=0; wait "$pid" || code=$?
    # 128 and more: the trap interrupted this wait
    while kill -0 "$pid" 2>/dev/null; do code=0; wait "$pid" || code=$?; done
    [ $code -eq 0 ] || status=$code
done
exit $status
"""
_SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' $FAKE_NODES
"""


def install(directory: Path) -> None:
    """Write srun and scontrol into a directory, for PATH."""
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
