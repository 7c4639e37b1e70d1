"""`smb doctor`: problems on this machine, and on the path to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smb.tools.cli.options import Coordinator, Json, option, usage_errors
from smb.tools.cli.output import console, print_json

if TYPE_CHECKING:
    from smb.tools.doctor import Finding


def doctor(
    memory_dir: Annotated[Path | None, option("memserver.memory_dir")] = None,
    capacity: Annotated[str | None, option("memserver.capacity")] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Check this machine and a cluster; say what to change.

    On this machine: memory directory, huge pages, limits, network buffers, MTU, RDMA. In the cluster at --coordinator,
    or at 127.0.0.1:7070 if there is one: its clock, and each memory server over each transport, measured through a
    buffer of 4 MiB that is deleted afterwards.

    Exit code 0: no problem (advice may be given); 1: there are problems; 2: wrong usage.

    Example: smb doctor --coordinator storage-1:7070
    """
    from smb.config.parse import parse_bytes
    from smb.config.settings import DEFAULT_COORDINATOR, SETTINGS
    from smb.tools.doctor import Severity, look_at_cluster, look_at_machine, somebody_listens

    with usage_errors():
        if capacity is not None:
            parse_bytes(capacity)
    findings: list[Finding] = []

    def note(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            _show(finding)

    for finding in look_at_machine(memory_dir or Path(SETTINGS["memserver.memory_dir"].default), capacity):
        note(finding)
    cluster = coordinator or (DEFAULT_COORDINATOR if somebody_listens(DEFAULT_COORDINATOR) else None)
    if cluster:
        for finding in look_at_cluster(cluster):
            note(finding)
    problems = sum(finding.state is Severity.PROBLEM for finding in findings)
    if as_json:
        print_json({"problems": problems, "findings": [finding.to_json() for finding in findings]})
    elif not cluster:
        console().print(
            f"no cluster was checked: nobody listens at {DEFAULT_COORDINATOR}; "
            "for another address pass --coordinator HOST:PORT or set SMB_COORDINATOR",
            soft_wrap=True,
        )
    if problems:
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    """Print one line in reading order: severity, check, finding, advice."""
    line = f"{finding.state.value:8} {finding.check}: {finding.found}"
    style = {"problem": "red", "advice": "yellow"}.get(finding.state.value)
    if finding.change:
        line += f" -> {finding.change}"
    console().print(line, style=style, soft_wrap=True)
