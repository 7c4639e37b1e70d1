"""Who sees the pages: names of buffers, clients and servers are on them."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import smb
import smb.metrics
from smb.daemon.process import Answer, Pages
from smb.errors import InvalidArgumentError
from smb.security.page_access import admission, read_token
from smb.tools.cli import targets
from tests.support.daemons import Daemons, running_daemons

TOKEN = "a-word-of-24-characters!"
Ask = Callable[..., int]
PATHS = ("/metrics", "/", "/targets", "/api/state", "/none")


def status_of(url: str, **headers: str) -> int:
    """What a GET is answered with."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def pages() -> Iterator[Callable[..., Ask]]:
    """Makes pages as of a daemon at `address`, and asks them; they listen on loopback, whatever the address."""
    made: list[Pages] = []

    def make(address: str, token_file: Path | None = None, insecure: bool = False, names: tuple[str, ...] = ()) -> Ask:
        admit = admission(address, token_file, insecure=insecure, names=names)
        there = Answer("200 OK", "text/plain", b"names")
        made.append(Pages("127.0.0.1:0", CollectorRegistry(), lambda: {"ok": True}, lambda _p, _q: there, admit))
        return lambda path, **headers: status_of(f"http://{made[-1].address}{path}", **headers)

    yield make
    for each in made:
        each.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """Holds TOKEN."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_on_loopback_who_is_here_and_no_strangers_page(pages: Callable[..., Ask]) -> None:
    """Addresses, names without a dot and the host's own are served; a domain that was led here is not, on any path but
    that of health, which names nothing.
    """
    ask = pages("127.0.0.1:0", names=("storage-1.lab.example",))
    for host in ("127.0.0.1:9470", "[::1]:9470", "localhost", "localhost:1", "a.localhost", "10.1.2.3", "storage-1",
                 "Storage-1.lab.example:80"):  # fmt: skip
        assert [ask(path, Host=host) for path in PATHS] == [200] * len(PATHS), host
    for host in ("evil.example", "evil.example:9470", "127.0.0.1.evil.example", "evil.localhost.example", "1.2.3.4.5"):
        assert [ask(path, Host=host) for path in PATHS] == [421] * len(PATHS), host
        assert ask("/healthz", Host=host) == 200


@pytest.mark.parametrize("address", ["0.0.0.0:9470", "[::]:9470", "10.1.2.3:9470"])
def test_beyond_loopback_health_alone(pages: Callable[..., Ask], address: str) -> None:
    """Without a token nothing that names anything, unless told that the network is trusted; and then by no stranger's
    domain either.
    """
    ask = pages(address)
    assert [ask(path) for path in PATHS] == [403] * len(PATHS)
    assert ask("/healthz") == 200
    ask = pages(address, insecure=True)
    assert [ask(path) for path in PATHS] == [200] * len(PATHS)
    assert ask("/metrics", Host="evil.example") == 421


def test_who_shows_the_token(pages: Callable[..., Ask], token_file: Path) -> None:
    """As a bearer (Prometheus) or as a password (a browser asks for it); anything else is 401, also with --insecure."""

    def basic(text: str) -> str:
        return "Basic " + base64.b64encode(text.encode()).decode()

    for address, insecure in (("0.0.0.0:9470", False), ("0.0.0.0:9470", True), ("127.0.0.1:9470", False)):
        ask = pages(address, token_file, insecure)
        for shown in (f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(f"me:{TOKEN}"), basic(f":{TOKEN}")):
            assert [ask(path, Authorization=shown) for path in PATHS] == [200] * len(PATHS), shown
        for shown in ("", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", TOKEN, basic(TOKEN),
                      "Basic %", basic(f"{TOKEN}:"), f"Digest {TOKEN}", "Bearer \xff"):  # fmt: skip
            assert [ask(path, Authorization=shown) for path in PATHS] == [401] * len(PATHS), shown
        assert ask("/metrics") == 401
        assert ask("/healthz") == 200


def test_a_replaced_token_counts_at_once(pages: Callable[..., Ask], token_file: Path) -> None:
    """The former one is refused from then on; a file that cannot be used changes nothing."""
    ask, another = pages("0.0.0.0:9470", token_file), "another-word-of-characters"

    def who_may() -> list[str]:
        return [token for token in (TOKEN, another) if ask("/metrics", Authorization=f"Bearer {token}") == 200]

    assert who_may() == [TOKEN]
    token_file.write_text("short\n")
    assert who_may() == [TOKEN]
    token_file.unlink()
    assert who_may() == [TOKEN]
    token_file.write_text(another + "\n")
    token_file.chmod(0o600)
    assert who_may() == [another]


def test_a_bad_token_file_says_what_is_wrong(token_file: Path, tmp_path: Path) -> None:
    """One that is not there, is open to all, or is guessed too easily; the word itself is in no message."""
    assert read_token(token_file) == TOKEN
    for text in ("", "short", "two words that are long enough", "\xe9" * 20):
        token_file.write_text(text)
        with pytest.raises(InvalidArgumentError, match="metrics-token-file") as raised:
            read_token(token_file)
        assert not text or text not in str(raised.value)
    token_file.write_text(TOKEN)
    token_file.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="anybody may read"):
        read_token(token_file)
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        admission("127.0.0.1:0", tmp_path / "none", insecure=False)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """Daemons of this test."""
    with running_daemons(tmp_path) as running:
        yield running


def test_daemons_and_clients_ask_for_it(daemons: Daemons, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinator, memory server and a program's pages take the same file; `smb targets` shows it."""
    option = ("--metrics-token-file", str(token_file))
    coordinator = daemons.coordinator("127.0.0.1:0", None, *option)
    server = daemons.memory_server(coordinator.address, "server-0", *option)
    monkeypatch.setenv("SMB_METRICS_TOKEN_FILE", str(token_file))
    with smb.connect(coordinator.address) as client:
        served = smb.metrics.serve(client)
        for address in (coordinator.metrics, server.metrics, served.address):
            assert status_of(f"http://{address}/metrics") == 401
            assert status_of(f"http://{address}/healthz") == 200
            assert status_of(f"http://{address}/metrics", Authorization=f"Bearer {TOKEN}") == 200
        served.close()
    assert json.loads(targets._read(coordinator.metrics))[0]["targets"] == [coordinator.metrics]
    monkeypatch.delenv("SMB_METRICS_TOKEN_FILE")
    with pytest.raises(smb.UnavailableError, match="401"):
        targets._read(coordinator.metrics)
