"""Who changed what: audit lines, request ids from a client's error to the servers' logs, and logs as JSON."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from smb.config.request_ids import CLIENT, REQUEST, TRACE, begin, end, metadata_of, new_id
from smb.coordinator.service import CoordinatorService
from smb.daemon.log import JsonLines
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import load_directory
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import RULES, Role
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for

US = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    holders = [
        Holder(Role.COORDINATOR, ""), Holder(Role.OPERATOR, "ann"), Holder(Role.SERVER, "server-0"),
        Holder(Role.SERVER, "server-1"), Holder(Role.CLIENT, "alice"), Holder(Role.READER, "carol"),
    ]  # fmt: skip
    make_set(tmp_path / "lab", holders)
    return tmp_path / "lab"


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def until_alive(client: smb.Client, count: int) -> None:
    wait_for(lambda: sum(server.alive for server in client.servers()) == count, "memory servers")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_change_leaves_a_line(daemons: Daemons, place: Path, tmp_path: Path) -> None:
    """Who, from which process, what, with which result and request; the same request in the error of a failed one and
    in the memory server's log; and nothing else leaves a line."""
    audit = tmp_path / "audit.jsonl"
    form = ("--log-format", "json")
    coordinator = daemons.coordinator(
        "127.0.0.1:0", None, "--credentials", str(place / "coordinator"), "--audit-log", str(audit), *form
    )
    servers = [
        daemons.memory_server(coordinator.address, name, "--credentials", str(place / name), *form)
        for name in ("server-0", "server-1")
    ]
    with smb.connect(coordinator.address, credentials=place / "alice", name="trainer") as alice:
        until_alive(alice, 2)
        weights = alice.create("team/w", (10,), servers=["server-0"])
        weights.write(np.ones(10, np.float32))
        alice.create("team/w", (10,), exist_ok=True)
        with pytest.raises(smb.AlreadyExistsError, match=r"\(request [0-9a-f]{16}\)$") as exists:
            alice.create("team/w", (10,))
        with pytest.raises(smb.NotFoundError) as missing:
            alice.open("team/none")
        assert "request" not in str(missing.value)  # a look for what is not there is no news
        alice.rename("team/w", "team/v")
        alice.delete("team/v")
        alice.list()
        with alice.lock("turn"):
            pass
        operator = Coordinator(coordinator.address, load_directory(place / "ann"))
        for _ in range(3):
            operator.drain_server("server-1", 10)  # the second and third ask how far it is
        operator.drain_server("server-1", 10, undo=True)
        operator.rebalance(10, dry_run=True)
        operator.rebalance(10, dry_run=False)
        with pytest.raises(smb.NotFoundError, match=r"\(request [0-9a-f]{16}\)$"):
            operator.forget_segments("server-0", [0xABC], 10)
        operator.kick_clients("alice", 10)
        operator.close()
    found = lines(audit)
    assert [(each["action"], each["target"], each["result"]) for each in found] == [
        ("create", "team/w", "ok"), ("create", "team/w", "ok"), ("create", "team/w", "already_exists"),
        ("rename", "team/w -> team/v", "ok"), ("delete", "team/v", "ok"), ("drain", "server-1", "ok"),
        ("undrain", "server-1", "ok"), ("rebalance", "two copies", "ok"),
        ("forget", "server-0: 0000000000000abc", "not_found"), ("kick", "alice", "ok"),
    ]  # fmt: skip
    for each in found:
        by_alice = each["target"].startswith("team/")
        assert each["certificate"] == ("alice" if by_alice else "ann")
        assert each["role"] == ("client" if by_alice else "operator")
        assert each["client"] == (f"trainer ({US})" if by_alice else US)
        assert "127.0.0.1" in each["address"]
        assert re.fullmatch("[0-9a-f]{16}", each["request"])
        assert each["logger"] == "audit"
    assert found[2]["request"] in str(exists.value)
    assert "exists" in found[2]["why"]
    assert audit.stat().st_mode & 0o777 == 0o600
    made, dropped = (
        [line for line in log_of(servers[0]) if line["message"].startswith(what) and line.get("request")]
        for what in ("made segment", "dropped segment")
    )
    assert found[0]["request"] in {line["request"] for line in made}
    assert found[4]["request"] in {line["request"] for line in dropped}
    assert not any(line["logger"] == "audit" for line in log_of(coordinator))


def log_of(daemon: Daemon) -> list[dict[str, Any]]:
    """The lines of a log in JSON; each of them is that."""
    return lines(daemon.log)


def test_a_refusal_is_logged_with_its_request(daemons: Daemons, place: Path) -> None:
    """As text, in the log that has the audit lines as well, also above their level; what others sent forges no line."""
    coordinator = daemons.coordinator(
        "127.0.0.1:0", None, "--credentials", str(place / "coordinator"), "--log-level", "warning"
    )
    daemons.memory_server(coordinator.address, "server-0", "--credentials", str(place / "server-0"))
    with smb.connect(coordinator.address, credentials=place / "carol") as carol:
        with pytest.raises(smb.PermissionDeniedError, match=r"\(request [0-9a-f]{16}\)$") as refused:
            carol.create("w", (1,))
        request = str(refused.value)[-17:-1]
    (line,) = [line for line in coordinator.log.read_text().splitlines() if request in line]
    assert "WARNING access: refused: CreateBuffer" in line
    with smb.connect(coordinator.address, credentials=place / "alice", name="b ü") as alice:
        until_alive(alice, 1)
        alice._session.coordinator._client_name = "a\n" + alice._session.name
        alice.create("w", (1,))
    (line,) = [line for line in coordinator.log.read_text().splitlines() if " audit: " in line]
    assert f'INFO audit: create "w": ok; by role client, certificate "alice", client a\\nb ü ({US}) at ' in line


def test_an_audit_file_that_is_moved_away_is_made_again(daemons: Daemons, place: Path, tmp_path: Path) -> None:
    """As logrotate does; and one that others may write, or a link, is refused at the start."""
    audit = tmp_path / "audit.jsonl"
    options = ("--credentials", str(place / "coordinator"), "--audit-log", str(audit))
    coordinator = daemons.coordinator("127.0.0.1:0", None, *options)
    daemons.memory_server(coordinator.address, "server-0", "--credentials", str(place / "server-0"))
    with smb.connect(coordinator.address, credentials=place / "alice") as alice:
        until_alive(alice, 1)
        alice.create("one", (1,))
        audit.rename(tmp_path / "audit.1")
        alice.create("two", (1,))
        assert [each["target"] for each in lines(tmp_path / "audit.1")] == ["one"]
        assert [each["target"] for each in wait_for(lambda: lines(audit), "line")] == ["two"]


def test_an_audit_file_that_cannot_be_made_again_fails_no_call(daemons: Daemons, place: Path, tmp_path: Path) -> None:
    """Something else has its name: changes are answered as they went, the log has their lines, and the file is made
    when its name is free.
    """
    audit = tmp_path / "audit.jsonl"
    options = ("--credentials", str(place / "coordinator"), "--audit-log", str(audit))
    coordinator = daemons.coordinator("127.0.0.1:0", None, *options)
    daemons.memory_server(coordinator.address, "server-0", "--credentials", str(place / "server-0"))
    with smb.connect(coordinator.address, credentials=place / "alice") as alice:
        until_alive(alice, 1)
        audit.unlink()
        audit.mkdir()
        for name in ("one", "two"):
            assert alice.create(name, 1).name == name
        with pytest.raises(smb.AlreadyExistsError, match="exists"):
            alice.create("one", 1)
        told = [line for line in coordinator.log.read_text().splitlines() if f"cannot write {audit}: " in line]
        wanted = [("one", "ok"), ("two", "ok"), ("one", "already_exists")]
        found = [json.loads(line.partition("the line: ")[2]) for line in told]
        assert [(each["target"], each["result"]) for each in found] == wanted
        audit.rmdir()
        for name in ("three", "four"):
            alice.create(name, 1)
        assert [each["target"] for each in lines(audit)] == ["three", "four"]


def test_lines_of_json_steer_no_terminal() -> None:
    """What a client's name may hold is escaped, and is the same when the line is read; letters stay as they are."""
    name = "ü\x1b[31m\x7f\x9b2J\u202e\u2028\ud800\U000e0001\n"
    record = logging.LogRecord("audit", logging.INFO, "", 0, "%s", (name,), None)
    record.client = name
    line = JsonLines().format(record)
    assert line.isprintable()
    assert "ü" in line
    assert json.loads(line)["message"] == json.loads(line)["client"] == name


def test_metadata_of_strangers_is_bounded() -> None:
    """A request id, a trace and a name are taken only if they are that; else the daemon makes its own id."""
    sent = new_id()
    call = begin(metadata_of(sent, "höst:1\n", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    assert (call.request, call.client, call.trace[3:35]) == (sent, "höst:1\n", "a" * 32)
    assert all(text.isascii() and text.isprintable() for pair in metadata_of(sent, "höst:1\n") for text in pair)
    for request, trace in (("x" * 16, "00-1"), (sent + "0", "0" * 300), ("", ""), (sent.upper() + "\n", "00--")):
        call = begin(((REQUEST, request), (TRACE, trace), (CLIENT, "a" * 5000), ("other", b"\0")))
        assert re.fullmatch("[0-9a-f]{16}", call.request)
        assert call.request != request
        assert (call.trace, len(call.client)) == ("", 255)
    end()


def test_what_operators_alone_may_do_leaves_a_line() -> None:
    """A new RPC for them is not forgotten."""
    of_operators = {method.rpartition("/")[2] for method, rule in RULES.items() if rule.roles == {Role.OPERATOR}}
    assert of_operators >= {"DrainServer", "Rebalance", "ForgetSegments", "KickClients"}
    for method in {*of_operators, "CreateBuffer", "DeleteBuffer", "RenameBuffer"}:
        assert "audited(" in inspect.getsource(getattr(CoordinatorService, method)), method
