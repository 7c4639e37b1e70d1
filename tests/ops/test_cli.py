"""The command line as a user meets it: as a process, with its output, errors and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
import smb.train
from perf import netlab
from smb.config.parse import parse_address
from tests.support.commands import COMMAND, run_here, run_smb
from tests.support.daemons import wait_for

DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


def stat_here(capsys: pytest.CaptureFixture[str], cluster: smb.LocalCluster, *arguments: str) -> str:
    code, out, err = run_here(capsys, "stat", *arguments, "-c", cluster.address)
    assert code == 0, err
    return out


# More than 5 s: eight commands one after the other.
def test_a_buffer_from_creation_to_deletion(cluster: smb.LocalCluster) -> None:
    """create makes a buffer that clients can use, ls and stat show it with its placement, rm deletes it."""
    name = "cli/" + "long-name-" * 15
    made = run_smb(
        "create", name, "--shape", "1000,300", "--servers", "2", "--stripe", "64KiB", coordinator=cluster.address
    )
    assert made.returncode == 0, made.stderr
    with smb.connect(cluster.address) as client:
        assert client.open(name).shape == (1000, 300)
        assert not client.open(name).read().any()

    listed = run_smb("ls", coordinator=cluster.address)
    assert any(name in line and "1000 x 300" in line and "float32" in line for line in listed.stdout.splitlines())
    (entry,) = (each for each in json.loads(run_smb("ls", "--json", coordinator=cluster.address).stdout))
    assert (entry["name"], entry["shape"], entry["nbytes"]) == (name, [1000, 300], 1_200_000)

    detail = run_smb("stat", name, coordinator=cluster.address)
    assert detail.returncode == 0
    assert "64 KiB" in detail.stdout
    for server in cluster.servers:
        assert server.name in detail.stdout
    described = json.loads(run_smb("stat", name, "--json", coordinator=cluster.address).stdout)
    assert described == {**entry, "versions": 1, "version": 0, "metadata": {}}
    assert sum(segment["nbytes"] for segment in described["segments"]) == 1_200_000
    assert {segment["server"] for segment in described["segments"]} == {server.name for server in cluster.servers}

    assert run_smb("rm", name, coordinator=cluster.address).returncode == 0
    assert json.loads(run_smb("ls", "--json", coordinator=cluster.address).stdout) == []


def test_stat_shows_metadata(cluster: smb.LocalCluster) -> None:
    """stat names each entry, shortened where it is long, and has all of it with --json; ls has none."""
    with smb.connect(cluster.address) as client:
        given = {"run": {"every": 50}, "long": "x" * 1000}
        client.create("cli/meta", (4,), metadata=given)
        shown = run_smb("stat", "cli/meta", coordinator=cluster.address)
        assert shown.returncode == 0, shown.stderr
        assert any("metadata run" in line and '{"every": 50}' in line for line in shown.stdout.splitlines())
        assert "x" * 300 not in shown.stdout
        described = json.loads(run_smb("stat", "cli/meta", "--json", coordinator=cluster.address).stdout)
        assert described["metadata"] == given
        assert "metadata" not in run_smb("ls", "--json", coordinator=cluster.address).stdout
        client.delete("cli/meta")


def test_stat_shows_what_was_published(cluster: smb.LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of copies and the version published last; a buffer that nobody publishes has no such line."""
    with smb.connect(cluster.address) as client:
        buffer = client.create("cli/published", 4, versions=2)
        client.create("cli/plain", 4)
        for told in ("nothing yet", "version 1"):
            lines = stat_here(capsys, cluster, "cli/published").splitlines()
            assert any(line.split() == ["versions", "2"] for line in lines)
            assert any(line.split() == ["published", *told.split()] for line in lines)
            buffer.publish(np.ones(4, np.float32))
        described = json.loads(stat_here(capsys, cluster, "cli/published", "--json"))
        assert (described["versions"], described["version"]) == (2, 2)
        assert "published" not in stat_here(capsys, cluster, "cli/plain").replace("cli/published", "")
        client.delete("cli/published")
        client.delete("cli/plain")


def test_mirrors_are_made_shown_and_stopped(cluster: smb.LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    def relay(*arguments: str) -> tuple[int, str, str]:
        return run_here(capsys, "relay", "cli/published", *arguments, "-c", cluster.address)

    with smb.connect(cluster.address) as client:
        client.create("cli/published", 1000, "uint8", versions=2, servers=["server-0"]).publish(np.ones(1000, np.uint8))
        assert "has no mirrors" in relay()[1]
        assert relay("--auto")[0] == 0
        client.open("cli/published.mirror.server-1").wait(1, timeout=DEADLINE_SECONDS)
        code, out, _ = relay("--json")
        assert code == 0
        (mirror,) = json.loads(out)
        assert mirror["server"] == "server-1"
        assert mirror["name"] == "cli/published.mirror.server-1"
        assert "MIRROR ON" in stat_here(capsys, cluster, "cli/published")
        assert json.loads(stat_here(capsys, cluster, "cli/published", "--json"))["mirrors"][0]["server"] == "server-1"
        code, _, err = relay("--to", "server-7")
        assert code == 1
        assert 'no memory server is named "server-7"' in err
        assert 'mirror of "cli/published" on server-7' in err
        assert "cli/published.mirror" not in err
        assert relay("--auto", "--stop")[0] == 1
        assert "has no mirrors" in relay("--stop")[1]
        client.delete("cli/published")
        assert not [info.name for info in client.list() if info.name.startswith("cli/published")]
        client.create("cli/published", 1 << 20, "uint8", versions=2, servers=2, stripe="64KiB")
        code, out, err = relay("--auto")
        assert (code, out) == (1, "")
        assert "no memory server is free for a mirror: 2 with a part of it. Start another" in err
        assert relay()[0] == 0
        client.delete("cli/published")


def test_how_far_a_dead_mirror_is_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """It is counted from what is published now, not when the mirror died; once the source is gone, too, nobody knows.
    The page, which hears of publications from mirrors alone, says then that it is not known.
    """
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster, smb.connect(cluster.address) as client:

        def relay(*arguments: str) -> str:
            return run_here(capsys, "relay", "w", *arguments, "-c", cluster.address)[1]

        def reported() -> bool:
            return client.open("w").info.mirrors[0].version == 1

        def gone() -> set[str]:
            return {server.name for server in client.servers() if not server.alive}

        source = client.create("w", 1000, "uint8", versions=2, servers=["server-0"])
        source.publish(np.ones(1000, np.uint8))
        client.relay("w", ["server-1"])
        wait_for(reported, "a report of the mirror", DEADLINE_SECONDS)
        cluster.servers[1].kill()
        for _ in range(4):
            source.publish(np.ones(1000, np.uint8))
        wait_for(lambda: gone() == {"server-1"}, "the end of its lease", DEADLINE_SECONDS)
        assert "1, 4 behind" in relay()
        assert "1, 4 behind" in stat_here(capsys, cluster, "w")
        assert json.loads(relay("--json"))[0]["published"] == 5
        assert json.loads(client._coordinator.overview(10.0, buffer="w"))["mirrors"][0]["behind"] is None
        cluster.servers[0].kill()
        wait_for(lambda: gone() == {"server-0", "server-1"}, "the end of the source's lease", DEADLINE_SECONDS)
        assert "1, lag unknown" in relay()
        assert json.loads(relay("--json"))[0]["published"] is None


def test_stat_shows_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a group its scheme, round and workers, those that left too; lines end where their text does.

    What only the servers know is unknown while they are down.
    """
    values = np.zeros(4, np.float32)
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster, smb.connect(cluster.address) as client:
        worker = smb.train.join(client, "cli-run", values, smb.train.LocalSGD(every=1))
        for _ in range(2):
            values += 1
            worker.step(samples=8)
        shown = stat_here(capsys, cluster, "cli-run")
        assert re.search(r"training by localsgd, round \d+, 1 of 1 workers alive", shown)
        assert re.search(rf"^ *0 +alive .* {os.getpid()} .* 2 +0 +0 +16$", shown, re.MULTILINE)
        assert shown == re.sub(r" +\n", "\n", shown)
        training = json.loads(stat_here(capsys, cluster, "cli-run", "--json"))["training"]
        assert (training["scheme"], training["settings"]["every"], training["round"] > 0) == ("localsgd", 1, True)
        assert [each["samples"] for each in training["workers"]] == [16]
        worker.close()
        assert "0 of 1 workers alive" in stat_here(capsys, cluster, "cli-run")
        cluster.servers[0].terminate()
        assert re.search(r"published +unknown", shown := stat_here(capsys, cluster, "cli-run"))
        assert "its round and workers are unknown" in shown
        described = json.loads(stat_here(capsys, cluster, "cli-run", "--json"))
        assert (described["versions"], described["version"], described["training"]) == (1, None, None)


def test_create_with_a_wire(cluster: smb.LocalCluster) -> None:
    """create --wire sets how elements travel, stat says it; another name, or another dtype, is refused."""
    arguments = ("create", "cli/wire", "--shape", "10", "--wire")
    assert run_smb(*arguments, "bfloat16", coordinator=cluster.address).returncode == 0
    assert json.loads(run_smb("stat", "cli/wire", "--json", coordinator=cluster.address).stdout)["wire"] == "bfloat16"
    for refused in (("float8",), ("int8", "--dtype", "int64")):
        result = run_smb("create", "cli/other", *arguments[2:], *refused, coordinator=cluster.address)
        assert result.returncode != 0
        assert refused[0] in result.stderr
    assert run_smb("rm", "cli/wire", coordinator=cluster.address).returncode == 0


def test_create_twice_is_an_error_unless_allowed(cluster: smb.LocalCluster) -> None:
    """A taken name is one line on stderr and exit code 1; with --exist-ok and the same shape it is fine."""
    arguments = ("create", "cli/twice", "--shape", "10", "--dtype", "int64")
    assert run_smb(*arguments, coordinator=cluster.address).returncode == 0
    again = run_smb(*arguments, coordinator=cluster.address)
    assert again.returncode == 1
    assert len(again.stderr.splitlines()) == 1
    assert "cli/twice" in again.stderr
    assert "pass --exist-ok" in again.stderr
    assert run_smb(*arguments, "--exist-ok", coordinator=cluster.address).returncode == 0
    other = run_smb("create", "cli/twice", "--shape", "11", "--exist-ok", coordinator=cluster.address)
    assert other.returncode == 1
    assert run_smb("rm", "cli/twice", coordinator=cluster.address).returncode == 0


def test_removing_what_is_not_there(cluster: smb.LocalCluster) -> None:
    """rm of a missing name fails and says which; with --missing-ok it works; several names go in one call."""
    missing = run_smb("rm", "cli/never", coordinator=cluster.address)
    assert missing.returncode == 1
    assert len(missing.stderr.splitlines()) == 1
    assert "cli/never" in missing.stderr
    assert run_smb("rm", "--missing-ok", "cli/never", coordinator=cluster.address).returncode == 0
    with smb.connect(cluster.address) as client:
        for name in ("cli/one", "cli/two"):
            client.create(name, (4,))
        assert run_smb("rm", "cli/one", "cli/two", coordinator=cluster.address).returncode == 0
        assert client.list() == []


def test_stat_of_a_missing_buffer(cluster: smb.LocalCluster) -> None:
    """stat of a missing name is one line on stderr, nothing on stdout, exit code 1."""
    result = run_smb("stat", "cli/never", "--json", coordinator=cluster.address)
    assert (result.returncode, result.stdout) == (1, "")
    assert "cli/never" in result.stderr


def test_more_than_there_is_says_what_is_free(cluster: smb.LocalCluster) -> None:
    """A buffer larger than the cluster is refused in one line that names the servers."""
    result = run_smb("create", "cli/huge", "--shape", "1000000000", coordinator=cluster.address)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert cluster.servers[0].name in result.stderr


def test_status_shows_servers_and_totals(cluster: smb.LocalCluster) -> None:
    """status names each server as alive with its capacity, and sums them up, in the table and in JSON."""
    with smb.connect(cluster.address) as client:
        client.create("cli/status", (1 << 20,), "uint8", servers=2, stripe="256KiB")
        shown = run_smb("status", coordinator=cluster.address)
        described = json.loads(run_smb("status", "--json", coordinator=cluster.address).stdout)
        client.delete("cli/status")
    for server in cluster.servers:
        assert re.search(rf"{server.name}\s+alive.*64 MiB", shown.stdout)
    assert "2 of 2 servers alive" in shown.stdout
    assert described["totals"]["capacity_bytes"] == 128 << 20
    assert described["totals"]["buffers"] == 1
    assert described["totals"]["segments"] == 2
    assert [server["alive"] for server in described["servers"]] == [True, True]


def test_check_has_an_exit_code_for_cron(kept_port: int) -> None:
    """0 while all is well; 1 for a server that is nearly full; 2 for one that is gone with data; 3
    where no coordinator answers, as text and as JSON. The worst comes first, and what is not a problem is left out.
    Waits for two reports of a server and for the end of its lease, 6 s.
    """

    def check(*options: str, of: str = "") -> tuple[int, list[str]]:
        result = run_smb("status", "--check", *options, coordinator=of or cluster.address)
        assert result.stderr == ""
        return result.returncode, result.stdout.splitlines()

    with smb.LocalCluster(servers=2, capacity="8MiB") as cluster, smb.connect(cluster.address) as client:
        assert check() == (0, ["OK: 2 of 2 servers alive, 0 buffers"])
        client.create("cli/large", (7_700_000,), "uint8", servers=[cluster.servers[0].name])
        wait_for(lambda: check()[0] == 1, "the warning")
        code, (head, line) = check()
        assert (code, head) == (1, "WARNING: 2 of 2 servers alive, 1 buffer")
        assert line.startswith("WARNING server-0 is nearly full. What to do: Delete buffers")
        for server in cluster.servers:
            server.kill()
        wait_for(lambda: not any(server.alive for server in client.servers()), "the end of their leases")
        code, (head, line, *_) = check()  # the other server holds nothing: that is a note
        assert (code, head[:9]) == (2, "CRITICAL:")
        assert "0 of 2" in head
        assert line.startswith("CRITICAL server-0 is gone. What to do: On the server's host")
        code, lines = check("--json")
        told = json.loads("\n".join(lines))
        assert (code, told["state"], told["problems"][0]["severity"]) == (2, "critical", "critical")
        client.delete("cli/large")
    code, (line,) = check(of=f"127.0.0.1:{kept_port}")
    assert (code, line[:9]) == (3, "UNKNOWN: ")
    assert str(kept_port) in line
    code, lines = check("--json", of=f"127.0.0.1:{kept_port}")
    assert (code, json.loads("\n".join(lines))["state"]) == (3, "unknown")
    lost = run_smb("--credentials", "/does/not/exist", "status", "--check", coordinator=f"127.0.0.1:{kept_port}")
    assert (lost.returncode, lost.stdout[:9]) == (3, "UNKNOWN: ")
    assert run_smb("status", "--chekc", coordinator=cluster.address).returncode == 2


@pytest.mark.parametrize("command", [("ls",), ("status",), ("stat", "x"), ("create", "x", "--shape", "1"), ("rm", "x")])
def test_no_coordinator_there(command: tuple[str, ...], capsys: pytest.CaptureFixture[str], kept_port: int) -> None:
    """Every command says in one line which address does not answer and how to start a cluster; exit code 1."""
    address = f"127.0.0.1:{kept_port}"
    code, out, err = run_here(capsys, *command, "-c", address)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert address in err
    assert "smb up" in err


def test_no_coordinator_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an address the error names the option, the variable and `smb up`."""
    code, _, err = run_here(capsys, "ls")
    assert code == 1
    assert "--coordinator" in err
    assert "SMB_COORDINATOR" in err
    assert "smb up" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "x"),
        ("create", "x", "--shape", "big"),
        ("create", "x", "--shape", "1", "--stripe", "many"),
        ("bench", "--transport", "pigeon"),
        ("bench", "--sizes", "3"),
        ("demo", "--scheme", "pigeon"),
        ("nonsense",),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be meant is wrong usage: exit code 2, an explanation on stderr, no traceback."""
    code, out, err = run_here(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "smb" in err
    assert "Traceback" not in err


def test_help_names_every_command() -> None:
    """`smb --help` lists the commands of the design that exist."""
    out = run_smb("--help").stdout
    commands = (
        "up coordinator status top ls stat create rm cp snapshot restore mount umount bench demo certs config doctor"
    )
    for command in commands.split():
        assert re.search(rf"^\s+{command}\s", out, re.M), command


def test_up_runs_a_cluster_until_it_is_stopped(kept_port: int) -> None:
    """`smb up` prints the address and what to type next, serves clients there, and ends cleanly with nothing left."""
    command = [*COMMAND, "up", "--servers", "2", "--capacity", "16MiB"]
    with subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{kept_port}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        greeting = ""
        while f"SMB_COORDINATOR=127.0.0.1:{kept_port}" not in greeting:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            greeting += line
        assert "WARNING" not in greeting
        with smb.connect(f"127.0.0.1:{kept_port}") as client:
            buffer = client.create("up/weights", (1 << 16,), "float32", servers=2, stripe="64KiB")
            buffer.accumulate(np.ones(1 << 16, dtype=np.float32))
            assert buffer.read().sum() == 1 << 16
        assert list(Path("/dev/shm").glob(f"smb-cluster-{process.pid}-*"))
        process.send_signal(signal.SIGTERM)  # the tests below send SIGINT
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not list(Path("/dev/shm").glob(f"smb-cluster-{process.pid}-*"))


def test_up_restarts_what_dies_and_keeps_what_it_had(tmp_path: Path, kept_port: int) -> None:
    """A server that is killed again and again is back with its memory, without a word to anybody; --data-dir has it at
    the next start, too.
    """
    command = [*COMMAND, "up", "--servers", "1", "--capacity", "16MiB"]
    command += ["--listen", f"127.0.0.1:{kept_port}", "--metrics", "127.0.0.1:0", "--data-dir", str(tmp_path / "kept")]
    for kills in (True, False):
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up,
            contextlib.ExitStack() as running,
        ):
            running.callback(up.kill)  # where an assertion fails
            assert up.stdout is not None
            assert up.stderr is not None
            greeting = ""
            while "Ctrl-C" not in greeting:
                line = up.stdout.readline()
                assert line, up.stderr.read()
                greeting += line
            memory = re.search(r"memory in (\S+);", greeting)
            assert memory is not None
            with smb.connect(f"127.0.0.1:{kept_port}", timeout=60) as client:
                if kills:
                    client.create("kept", 10).fill(7)
                    said = greeting
                    for _ in range(2):
                        pid = re.search(r"server-0 .* pid (\d+)", said)
                        assert pid is not None, said
                        os.kill(int(pid[1]), signal.SIGKILL)
                        assert "restarting it with its data" in up.stderr.readline()
                        said = up.stderr.readline()
                assert (client.open("kept").read() == 7).all()
            taken = run_smb("up", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "kept"))
            assert "another cluster uses" in taken.stderr
            up.send_signal(signal.SIGINT)
            _, errors = up.communicate(timeout=DEADLINE_SECONDS)
            assert (up.returncode, "Traceback" in errors) == (0, False), errors
    shutil.rmtree(memory[1])


HELPED = (
    *("up", "coordinator", "status", "top", "train ls", "train stat", "train rm", "demo", "ls", "stat", "create", "rm"),
    *("cp", "snapshot", "restore", "mount", "umount", "doctor", "bench", "config", "certs", "targets"),
    *("train save", "train load", "coordinator migrate", "relay"),
)


@pytest.mark.parametrize("asked", HELPED)
def test_help_has_an_example_and_speaks_of_what_users_type(capsys: pytest.CaptureFixture[str], asked: str) -> None:
    """No type of Python, no braces around arguments."""
    code, out, _ = run_here(capsys, *asked.split(), "--help")
    assert code == 0
    assert f"Example: smb {asked}" in out
    assert not re.search(r"<(str|int|float|path|list)|\{", out), out


def test_commands_stand_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """What one looks for stands under what it is for, in whole sentences."""
    assert "...\n" not in run_here(capsys, "train", "--help")[1].partition("Commands:")[2]
    _, out, _ = run_here(capsys, "--help")
    assert "...\n" not in out.partition("A cluster:")[2]
    sections = dict(re.findall(r"^(\w[\w ]+):\n((?:  .*\n)+)", out + "\n", re.M))
    assert "  train " in sections["Trainings"]
    assert "  up " in sections["A cluster"]
    assert "--install-completion" in out


def test_a_command_imports_no_other() -> None:
    """Importing and describing all of them takes as long as Python's own start."""
    program = (
        "import sys; from typer.testing import CliRunner; from smb.tools.cli.main import app;"
        "assert 'List the buffers' in CliRunner().invoke(app, ['ls', '--help']).output;"
        "print(*(name for name in sys.modules if name.startswith('smb.tools.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    modules = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert modules == {"main", "ls", "connection", "options", "output"}, done


@pytest.mark.parametrize(
    ("typed", "offered"), [("smb tr", "train"), ("smb train ", "rm"), ("smb up --da", "--data-dir")]
)
def test_a_shell_completes(typed: str, offered: str) -> None:
    """As bash asks for it."""
    words = typed.split(" ")
    asked = {"_SMB_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    program = "from smb.tools.cli.main import app; app(prog_name='smb')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert offered in done.stdout.split(), done


def test_a_cluster_listens_at_one_host() -> None:
    """Memory servers listen at the coordinator's host and are registered there, and nowhere else."""
    with smb.LocalCluster(servers=2, capacity="16MiB", listen="127.0.0.2:0") as cluster:
        with smb.connect(cluster.address) as client:
            addresses = [cluster.address, *(server.address for server in client.servers())]
        for host, port in map(parse_address, addresses):
            assert host == "127.0.0.2"
            with pytest.raises(ConnectionRefusedError):  # at 127.0.0.1 another test may have a server of this port
                socket.create_connection(("127.0.0.3", port), 5)


def test_a_cluster_at_all_addresses() -> None:
    """With 0.0.0.0 no address that is told is 0.0.0.0, and a server that is restarted listens at all of them again."""
    with smb.LocalCluster(servers=1, capacity="16MiB", listen="0.0.0.0:0", insecure=True) as cluster:
        (server,) = cluster.servers
        before = server.address
        server.kill()
        server.start()
        assert server.address == before
        with smb.connect(cluster.address) as client:
            assert [each.address for each in client.servers()] == [before]
        for host, port in map(parse_address, (cluster.address, before)):
            assert host != "0.0.0.0"
            socket.create_connection(("127.0.0.1", port), 5).close()
        assert json.loads(run_smb("top", "--json", coordinator=cluster.address).stdout)["coordinator"]["address"] == (
            cluster.address
        )


USER = """
import sys, smb
with smb.connect(sys.argv[1], transport="tcp", timeout=5) as client:
    buffer = client.create("far", (4,), servers=1)
    buffer.fill(3)
    print(buffer.read().sum())
"""


@pytest.mark.skipif(netlab.missing() is not None, reason=str(netlab.missing()))
def test_up_for_other_hosts() -> None:
    """At 0.0.0.0 `smb up` says who may do what, and what it tells to export works on another host."""
    with netlab.Lab([netlab.Host("here"), netlab.Host("there")]) as lab:
        command = [*COMMAND, "up", "--servers", "1", "--capacity", "16MiB"]
        up = lab.popen("here", [*command, "--listen", "0.0.0.0:7070", "--insecure"], stdout=subprocess.PIPE, text=True)
        assert up.stdout is not None
        greeting = ""
        while "Ctrl-C" not in greeting:
            line = up.stdout.readline()
            assert line, greeting
            greeting += line
        assert "everybody who reaches these ports may read" in greeting
        told = re.search(r"SMB_COORDINATOR=(\S+)", greeting)
        assert told is not None
        assert told[1] == f"{lab.address('here')}:7070"
        used = lab.run("there", [sys.executable, "-c", USER, told[1]], stdout=subprocess.PIPE, text=True, timeout=30)
        assert used.stdout.strip() == "12.0"
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=DEADLINE_SECONDS)


def test_up_on_a_taken_port_says_so() -> None:
    """When the address is taken, `smb up` ends with exit code 1 and says which, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_smb("up", "--listen", address, "--capacity", "16MiB")
    assert result.returncode == 1
    assert address in result.stderr
    assert "Traceback" not in result.stderr
