"""An operator's day on one machine, with what an operator has, while clients add and every sum must be exact.

    python -m tests.ops.deploy.day        or make day

Hosts are network namespaces (perf/netlab.py). Certificates are made by openssl as docs/own-authority.md says; three
members of etcd, two coordinators, four memory servers in two zones and Prometheus with its shipped configuration are
real processes; changes are made by the commands. Alerts wait for half of their time. After each step all clients
stand still, and what each of them has added must be in its buffer and in a common one, of two copies each.

Ends with a table, and with 0 only if all sums were exact, no step was late and no alert fired but those that are to.
Needs root. What the daemons said stays in build/day; nothing else stays, also after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import smb
from perf.netlab import Host, Lab, LabError
from tests.nightly import SIGNALS, stop
from tests.ops.test_own_authority import BLOCKS
from tests.ops.test_prometheus import Prometheus
from tests.support.daemons import wait_for
from tests.support.floods import flooded
from tests.support.transports import SLOWNESS

ROOT = Path(__file__).parents[3]
LOGS = ROOT / "build" / "day"
SERVERS = tuple(f"server-{number}" for number in range(4))
COORDINATORS = ("coordinator-0", "coordinator-1")
CLIENTS = tuple(f"client-{number}" for number in range(4))
ETCD = {"etcd-0": "ops", "etcd-1": "c0", "etcd-2": "c1"}
HOSTS = ("ops", "c0", "c1", "s0", "s1", "s2", "s3", "k0", "k1")
COUNT = 100_000  # elements of a buffer, of 8 bytes
SOONER = 2  # alerts' times are divided by this
FLOOD_S = 20.0  # three leases of a server
READ_AGAIN = "credentials were read again"  # of daemons' and clients' logs
PATIENCE_S = 120.0 * SLOWNESS  # of a client's call, and for what has no bound of its own
# Beside the certificates of the page.
MORE = """
for each in server-2 server-3; do
    issue $each "URI:smb:role/server,URI:smb:name/$each,DNS:$each.server.smb" serverAuth,clientAuth 90
done
for each in bob carol; do issue $each "URI:smb:role/client,URI:smb:name/$each" clientAuth 30; done
"""
# Adds until it is asked, says how often it has, and goes on or ends as it is told.
ADD = """
import select, sys
import numpy as np, smb
address, patience_s, name, done, count = sys.argv[1], float(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
with smb.connect(address, timeout=patience_s, transport="tcp") as client:
    both = [client.create(each, count, "int64", replicas=2, exist_ok=True) for each in (name, "common")]
    ones = np.ones(count, np.int64)
    print("ready", flush=True)
    while True:
        for buffer in both:
            buffer.accumulate(ones)
        done += 1
        if select.select([sys.stdin], [], [], 0.02)[0]:
            sys.stdin.readline()
            print(done, flush=True)
            if sys.stdin.readline() != "on\\n":
                break
"""


@dataclass
class Row:
    """What became of a step."""

    step: str
    bound_s: float
    seconds: float = 0.0
    added: int = 0
    sums: str = "not compared"
    alerts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Day:
    """The cluster, and what is done with it. This process is on the host of the operator."""

    def __init__(self, running: ExitStack) -> None:
        self._place = Path(running.enter_context(tempfile.TemporaryDirectory(prefix=f"smb-day-{os.getpid()}-")))
        self._memory = Path(
            running.enter_context(tempfile.TemporaryDirectory(prefix=f"smb-day-{os.getpid()}-", dir="/dev/shm"))
        )
        self._lab = running.enter_context(Lab([Host(name) for name in HOSTS]))
        running.enter_context(self._lab.inside("ops"))
        self._running = running
        self._keys, self._next = self._place / "keys", self._place / "next"
        self._addresses = {name: f"{self._lab.address(f'c{name[-1]}')}:7070" for name in COORDINATORS}
        self._at = ",".join(self._addresses.values())
        self._daemons: dict[str, subprocess.Popen[Any]] = {}
        self._load: dict[str, subprocess.Popen[str]] = {}
        self.done = dict.fromkeys(CLIENTS, 0)
        self._token = self._place / "token"
        self._token.touch(0o600)
        self._token.write_text("a-word-for-the-pages-of-daemons\n")
        self.prometheus: Prometheus | None = None

    # ---- what an operator has

    def _variables(self, who: str = "operator") -> dict[str, str]:
        """Ours, without settings of somebody else's clusters and ways to the internet."""
        found = {k: v for k, v in os.environ.items() if not k.startswith("SMB_") and not k.lower().endswith("_proxy")}
        ours = {"SMB_COORDINATOR": self._at, "SMB_CREDENTIALS": str(self._keys / who), "COLUMNS": "200"}
        ours |= {"SMB_LOG": "info"} if who == "client" else {}  # that it reads its certificate again
        return found | ours | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}

    def _smb(self, *words: object, who: str = "operator", fails: bool = False) -> str:
        """Run a command on the operator's host; return what it says."""
        command, asked = [sys.executable, "-m", "smb.tools.cli.main", *map(str, words)], self._variables(who)
        done = subprocess.run(command, env=asked, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S)
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, f"smb {' '.join(map(str, words))} ended with {done.returncode}: {said}"
        return said

    def _program(self, who: str) -> smb.Client:
        return smb.connect(self._at, credentials=self._keys / who, transport="tcp", timeout=5)

    @staticmethod
    def _until(condition: Callable[[], object], what: str) -> None:
        """Wait; a command that fails meanwhile is asked again, and told if it fails to the end."""
        why: list[str] = []

        def holds() -> object:
            try:
                return condition()
            except AssertionError as error:
                why[:] = [str(error)]
                return False

        try:
            wait_for(holds, what, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {why}") from None

    def _wait_whole(self, alive: int = len(SERVERS)) -> None:
        """Until so many servers live, and all that is to have two copies has them."""

        def is_whole() -> bool:
            totals = self._status()["totals"]
            return totals["alive"] == alive and not totals["degraded"] + totals["lost"]

        self._until(is_whole, f"two copies of all on {alive} servers")

    def _wait_ok(self) -> None:
        """Until all servers live, and nothing is wrong."""
        self._wait_whole()
        self._until(lambda: self._smb("status", "--check"), "OK")

    def _status(self, at: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._smb("status", "--json", "-c", at or self._at))
        return found

    def _follow(self, place: Path, *blocks: str, more: str = "") -> None:
        """Run these blocks of docs/own-authority.md, for all our certificates."""
        place.mkdir(exist_ok=True)
        text = "\n".join(BLOCKS[block] for block in blocks) + more
        text = text.replace(" server-1;", " server-1 server-2 server-3;")
        text = text.replace(" alice reader;", " alice reader server-2 server-3 bob carol;")
        done = subprocess.run(["bash", "-e", "-c", text], cwd=place, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr

    # ---- daemons

    def _begin(self, host: str, name: str, command: Sequence[str], **options: Any) -> None:
        options = {"stdin": subprocess.DEVNULL, "env": self._variables(), **options}
        with (LOGS / f"{name}.log").open("ab") as log:
            self._daemons[name] = self._lab.popen(host, command, cwd="/", stderr=log, **{"stdout": log, **options})

    def _start(self, *names: str) -> None:
        """Start coordinators or memory servers, and wait until all serve."""
        for name in names:
            host = f"{name[0]}{name[-1]}"
            at, ready = self._lab.address(host), self._place / f"{name}.ready"
            ready.unlink(missing_ok=True)
            if name in SERVERS:
                memory = self._memory / name
                memory.mkdir(mode=0o700, exist_ok=True)
                own = [
                    "memserver", "--name", name, "--coordinator", self._at, "--memory-dir", str(memory), "--capacity",
                    "64MiB", "--loops", "1", "--host-name", host, "--zone", f"zone-{int(name[-1]) % 2}",
                ]  # fmt: skip
            else:
                members = ",".join(f"{self._lab.address(each)}:2379" for each in ETCD.values())
                own = [
                    "smb.tools.cli.main",
                    "coordinator",
                    "--state",
                    f"etcd://{members}/smb",
                    "--servers",
                    f"{at}:7072",
                ]
            keys = self._keys / (name if name in SERVERS else "coordinator")
            own += ["--listen", f"{at}:7070", "--metrics", f"{at}:9470", "--metrics-token-file", str(self._token)]
            own += ["--credentials", str(keys), "--ready-file", str(ready)]
            self._begin(host, name, [sys.executable, "-m", *own])
        for name in names:
            ready, daemon = self._place / f"{name}.ready", self._daemons[name]
            wait_for(lambda: ready.exists() or daemon.poll() is not None, f"{name} that serves", PATIENCE_S)  # noqa: B023
            assert daemon.poll() is None, f"{name} does not start: {LOGS / name}.log"

    def _start_all(self) -> None:
        """An empty cluster."""
        peers = ",".join(f"{name}=http://{self._lab.address(host)}:2380" for name, host in ETCD.items())
        for name, host in ETCD.items():
            at = f"http://{self._lab.address(host)}"
            command = ["etcd", "--name", name, "--data-dir", str(self._memory / name), "--initial-cluster", peers]
            command += ["--listen-client-urls", f"{at}:2379", "--advertise-client-urls", f"{at}:2379"]
            command += ["--listen-peer-urls", f"{at}:2380", "--initial-advertise-peer-urls", f"{at}:2380"]
            command += ["--auto-compaction-retention", "1h", "--log-level", "warn", "--logger", "zap"]
            self._begin(host, name, command)
        ask = ["etcdctl", "--endpoints", f"{self._lab.address('ops')}:2379", "endpoint", "health"]
        ways = self._variables()
        wait_for(lambda: not subprocess.run(ask, env=ways, capture_output=True).returncode, "etcd", PATIENCE_S)
        self._start(*COORDINATORS, *SERVERS)

    def _end(self, name: str, number: int = signal.SIGTERM) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(PATIENCE_S)

    def _leader(self) -> str:
        """Its name, or nothing."""
        found = [each["address"] for each in self._status()["coordinators"] if each["role"] == "leader"]
        return next((name for name, address in self._addresses.items() if address in found), "")

    # ---- the load

    def _start_load(self) -> None:
        """Clients that go on with what they had done."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        for number, name in enumerate(CLIENTS):
            words = [self._at, PATIENCE_S, name, self.done[name], COUNT]
            own = {"env": self._variables("client"), **pipes}
            self._begin(f"k{number % 2}", name, [sys.executable, "-c", ADD, *map(str, words)], **own)
            self._load[name] = self._daemons.pop(name)
        for name in CLIENTS:
            assert self._hear(name) == "ready", f"{name} did not begin: {LOGS / name}.log"

    def _hear(self, name: str) -> str:
        """A line of a client. It waits no longer than the client's calls."""
        out = self._load[name].stdout
        assert out is not None
        return str(out.readline()).strip()

    def _tell(self, word: str) -> None:
        for client in self._load.values():
            assert client.stdin is not None
            client.stdin.write(f"{word}\n")
            client.stdin.flush()

    def _pause(self, then: str) -> None:
        """Have all clients stand still, and compare; then they go "on", or "end"."""
        self._tell("count")
        before, told = self.done, {name: self._hear(name) for name in CLIENTS}
        assert all(told.values()), f"clients ended: {[name for name in CLIENTS if not told[name]]}; see {LOGS}"
        self.done = {name: int(text) for name, text in told.items()}
        stuck = [name for name in CLIENTS if self.done[name] <= before[name]]
        assert not stuck, f"these added nothing: {stuck}"
        self._compare()
        self._tell(then)

    def _compare(self) -> None:
        """Everything that was added, and nothing else, is there."""
        with smb.connect(self._at, credentials=self._keys / "reader", timeout=PATIENCE_S) as reader:
            for name, count in {**self.done, "common": sum(self.done.values())}.items():
                values = reader.open(name).read()
                least, most = int(np.min(values)), int(np.max(values))
                assert (values.size, least, most) == (COUNT, count, count), (
                    f"WRONG SUM: {name} has {least} to {most}, not {count}"
                )

    def check(self) -> None:
        """Compare all sums, while nobody adds."""
        self._pause("on")

    # ---- alerts

    def firing(self) -> set[str]:
        """Alerts that fire now."""
        return set(self.prometheus.firing()) if self.prometheus else set()

    def fired(self, seconds: float) -> set[str]:
        """Those that fired in the last seconds, by Prometheus's own record."""
        assert self.prometheus is not None
        window = f"{max(1, int(seconds))}s"
        found = self.prometheus.query(
            f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{window}]))'
        )
        return {each["metric"]["alertname"] for each in found}

    # ---- the day

    def stand_up(self) -> None:
        """From nothing to a cluster under load that is watched."""
        self._follow(self._keys, "ecdsa", "authorities", "issue", "set", more=MORE)
        self._start_all()
        self._start_load()
        place = self._place / "prometheus"
        place.mkdir()
        pages = [address.replace(":7070", ":9470") for address in self._addresses.values()]
        self.prometheus = prometheus = Prometheus(place, *pages, token_file=self._token, sooner=SOONER)
        self._running.enter_context(closing(prometheus))
        wait_for(lambda: len(prometheus.query("up == 1")) == len(COORDINATORS) + len(SERVERS), "targets", PATIENCE_S)
        self._wait_ok()

    def restart(self) -> None:
        """All daemons in turn, as for an upgrade."""
        for name in SERVERS:
            self._smb("maintenance", name, "--for", "10m")
            self._end(name)
            self._start(name)
            self._smb("maintenance", name, "--end")
            self._wait_ok()
        for name in COORDINATORS:
            self._end(name)
            self._start(name)
            self._wait_ok()

    def drain(self) -> None:
        """Empty a server, stop it, start it again, and give it its share."""
        self._smb("drain", "server-1", "--wait")
        self._end("server-1")
        self._start("server-1")
        self._until(lambda: "Nothing to move" in self._smb("rebalance"), "balance")
        self._wait_ok()

    def lose_a_server(self) -> None:
        """With its memory. All has two copies again without it; then it comes back, empty."""
        self._end("server-2", signal.SIGKILL)
        shutil.rmtree(self._memory / "server-2")
        self._wait_whole(len(SERVERS) - 1)
        told = {"SmbServerDown", "SmbServerGone"}
        wait_for(lambda: told <= self.firing(), "alerts", PATIENCE_S)
        self._start("server-2")
        self._wait_ok()
        wait_for(lambda: not told & self.firing(), "end of the alerts", PATIENCE_S)

    def lose_the_leader(self) -> None:
        """The other coordinator leads; it comes back as the one that stands by."""
        lost = self._leader()
        self._end(lost, signal.SIGKILL)
        self._until(lambda: self._leader() not in ("", lost), "another leader")
        self._start(lost)
        self._wait_ok()

    def rotate(self) -> None:
        """Another authority beside the old one, then in its place. Who has a certificate of the old one is out."""
        self._follow(self._next, "ecdsa", "authorities", "issue", "set", more=MORE)
        logs = [LOGS / f"{name}.log" for name in (*COORDINATORS, *SERVERS, *CLIENTS)]
        for block in ("both", "anew", "old-out"):
            if block == "anew":
                shutil.copytree(self._keys / "operator", self._keys / "of-before")
            before = {path: path.read_text().count(READ_AGAIN) for path in logs}
            self._follow(self._keys, block)

            def are_read() -> (
                bool
            ):  # a coordinator that stands by reads them with the next connection: that of a command
                self._wait_ok()
                return all(path.read_text().count(READ_AGAIN) > count for path, count in before.items())  # noqa: B023

            self._until(are_read, "new files at all daemons and clients")
        assert "does not accept us" in self._smb("status", who="of-before", fails=True)

    def overload(self) -> None:
        """A reader asks the leader for everything at once. An operator is answered at the port of the servers, and no
        server loses its lease.
        """
        assert self.prometheus is not None
        lost = 'sum(smb_coordinator_leases_lost_total{of="server"})'
        before = self.prometheus.query(lost)[0]["value"][1]
        with flooded(self._addresses[self._leader()], self._keys / "reader", everything=True):
            end = time.monotonic() + FLOOD_S
            while time.monotonic() < end:
                assert self._status(self._at.replace(":7070", ":7072"))["totals"]["alive"] == len(SERVERS)
        self._wait_ok()
        assert self.prometheus.query(lost)[0]["value"][1] == before, "servers lost their leases"

    def revoke(self) -> None:
        """alice by a list of openssl, bob by a line in deny.txt: what they have open ends, and they don't come back."""
        who = {"alice": "team-a/notes", "bob": "notes"}
        with ExitStack() as open_:
            clients = {name: open_.enter_context(self._program(name)) for name in who}
            buffers = {name: clients[name].create(buffer, 8, "int64", replicas=2) for name, buffer in who.items()}
            for buffer in buffers.values():
                buffer.write(np.arange(8))
            shutil.copy(self._keys / "alice" / "cert.pem", self._next / "alice")
            self._follow(self._next, "revoke")
            for daemon in ("coordinator", *SERVERS):
                shutil.copy(self._next / "crl.pem", self._keys / daemon / "crl.pem")
                (self._keys / daemon / "deny.txt").write_text("name=bob\n")
            for name, buffer in buffers.items():
                wait_for(lambda: _refusal(buffer.read, "is denied: |revoked"), f"end of {name}", PATIENCE_S)  # noqa: B023
        for name in who:
            assert "is denied: " in self._smb("ls", who=name, fails=True)

    def kick(self) -> None:
        """carol's program is ended; its calls say by whom."""
        with self._program("carol") as carol:
            buffer = carol.open("notes")
            assert buffer.read().sum() == 28
            assert "1 session of carol ended" in self._smb("clients", "kick", "carol")
            wait_for(lambda: _refusal(buffer.read, "an operator ended the session"), "end of carol", PATIENCE_S)

    def restore(self) -> None:
        """Save all, destroy all, and make it again of what was saved."""
        self._pause("end")
        for client in self._load.values():
            assert client.wait(PATIENCE_S) == 0
        self._smb("snapshot", "--all", self._place / "backup")
        for name in list(self._daemons):
            self._end(name, signal.SIGKILL)
        for path in self._memory.iterdir():
            shutil.rmtree(path)
        self._start_all()
        self._wait_ok()
        assert self._status()["totals"]["buffers"] == 0
        self._smb("restore", "--all", self._place / "backup")
        self._compare()
        self._start_load()
        self._wait_ok()

    def steps(self) -> list[tuple[str, float, Callable[[], None], set[str]]]:
        """Each with a generous bound in seconds, and the alerts that may fire."""
        gone = {
            "SmbServerDown",
            "SmbServerGone",
            "SmbServerFlaps",
        }  # it was restarted shortly before, and so was the leader
        anew = {"SmbCoordinatorDown", "SmbServerRestarts"}
        ended = {"SmbClientsLost"}  # the reader's sessions end with their leases, half a minute later
        return [
            ("stand up", 120, self.stand_up, set()),
            ("restart all daemons in turn", 240, self.restart, set()),
            ("drain a server, take it back", 120, self.drain, set()),
            ("lose a server and its memory", 180, self.lose_a_server, gone),
            ("lose the leading coordinator", 90, self.lose_the_leader, set()),
            ("rotate the authority", 120, self.rotate, set()),
            ("overload by one reader", 120, self.overload, ended),
            ("revoke: a list, and deny.txt", 90, self.revoke, ended),
            ("kick a client", 60, self.kick, ended),
            ("save, destroy, restore all", 240, self.restore, gone | ended | anew),
        ]


def _refusal(use: Callable[[], object], match: str) -> bool:
    """Whether a call is refused, with that text."""
    try:
        use()
    except smb.Error as error:
        return bool(re.search(match, str(error)))
    return False


def spend(day: Day, rows: list[Row]) -> None:
    """Do all steps, until one fails."""
    for name, bound_s, act, may in day.steps():
        row = Row(name, bound_s * SLOWNESS)
        rows.append(row)
        print(name, flush=True)
        began, before, added = time.monotonic(), day.firing(), sum(day.done.values())
        try:
            act()
            row.seconds = time.monotonic() - began
            day.check()
            row.sums = "exact"
        except Exception as error:  # noqa: BLE001  # of whatever kind: the table tells it
            traceback.print_exc()
            row.seconds = row.seconds or time.monotonic() - began
            row.wrong.append(f"{type(error).__name__}: {error}")
        row.added = sum(day.done.values()) - added
        if day.prometheus:
            row.alerts = sorted(day.fired(time.monotonic() - began) - before)
        if unexpected := set(row.alerts) - may:
            row.wrong.append(f"unexpected alerts: {', '.join(sorted(unexpected))}")
        if row.seconds > row.bound_s:
            row.wrong.append(f"took {row.seconds:.0f} s, at most {row.bound_s:.0f}")
        if row.sums != "exact":
            return


def table(rows: Sequence[Row]) -> str:
    """Return seconds, sums and alerts of each step, and what was wrong."""
    lines = [f"{'step':30} {'seconds':>7} {'bound':>5} {'additions':>9}  {'sums':12}  alerts that fired"]
    for row in rows:
        told = f"{row.step:30} {row.seconds:7.1f} {row.bound_s:5.0f} {row.added:9}  {row.sums:12}  "
        told += ", ".join(row.alerts)
        lines.append(told.rstrip())
    lines += [f"\n{row.step}: {why}" for row in rows for why in row.wrong]
    return "\n".join(lines)


def main() -> int:
    for program in ("etcd", "etcdctl", "openssl", "prometheus"):
        if shutil.which(program) is None:
            raise SystemExit(f"an operator's day needs the program {program}: run `make day`, which installs Debian's")
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    for each in SIGNALS:
        signal.signal(each, stop)
    rows: list[Row] = []
    interrupted = False
    try:
        with ExitStack() as running:
            spend(Day(running), rows)
    except LabError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        interrupted = True
    print(f"\n{table(rows)}\n\nwhat the daemons said: {LOGS}")
    return 130 if interrupted else int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
