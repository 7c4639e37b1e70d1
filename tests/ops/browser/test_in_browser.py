"""The coordinator's page in a real browser: what is seen, on what screen, by whom, and when daemons die.

One cluster for all; what a test creates it deletes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import smb
import smb.train
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from tests.fault import long
from tests.ops.browser.conftest import Watched
from tests.support.daemons import running_daemons, wait_for
from tests.support.live_training import training

Open = Callable[..., Watched]

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
HOSTILE = "<img src=x onerror=\"document.title='broken in'\"><b>bold</b>"
LONG = "a-name-of-many-characters/" * 8 + "end"
# The relative luminance of WCAG 2, of what is seen: behind transparent elements lies what is further out.
CONTRAST = """selector => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(c[i]), 0);
  const seen = [...document.querySelectorAll(selector)].filter((e) => e.offsetParent);
  return seen.map((element) => {
    let behind = element;
    while ((rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(rgb).map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""


@pytest.fixture(scope="module")
def cluster(chromium: Any) -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=3, capacity="64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with smb.connect(cluster.address) as made:
        made.create("weights", (1_000_000,))
        made.create(LONG, (10,))
        yield made


@contextmanager
def traffic(client: smb.Client) -> Iterator[None]:
    """Writes and reads of "weights" all the while."""
    leaving = threading.Event()
    weights = client.open("weights")
    values = np.ones(weights.size, dtype=np.float32)

    def run() -> None:
        while not leaving.wait(0.05):
            weights.write(values)
            weights.read(out=values)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join()


def row(page: Any, section: str, name: str) -> Any:
    return page.locator(f"#{section} tbody tr").filter(has=page.get_by_text(name, exact=True))


def wait_text(locator: Any, pattern: str) -> None:
    """Wait until the text of such an element matches."""
    locator.filter(has_text=re.compile(pattern)).wait_for()


def scrolls_sideways(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def test_shows_what_there_is_and_how_it_moves(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Servers with their load, buffers with their stripes, clients, a held lock and who waits, the plots."""
    page = open_page(cluster.coordinator.metrics).page
    other = smb.connect(cluster.address)
    with client.lock("turn"), traffic(client):
        asked = other.lock("turn", timeout=60)
        waiting = threading.Thread(target=lambda: asked.acquire().release())
        waiting.start()
        for number in range(3):
            wait_text(
                row(page, "servers", f"server-{number}"),
                r"alive.*of 64 MiB.*[1-9][\d.]* [KM]iB/s.*[1-9][\d.]* [KM]iB/s",
            )
        wait_text(row(page, "buffers", "weights"), r"ok.*1,000,000 float32.*3.81 MiB1[1-9].*/s1\.\d.*3 servers")
        wait_text(page.locator("#buffers tbody tr").first, "^weights")  # the busiest; by name it would be the last
        wait_text(page.locator("#waits tbody tr"), r"lock turn.*:\d+.*1server-\d")
        wait_text(page.locator("#totals"), r"Servers3alive.*Operations[1-9]")
        wait_text(page.locator("#chart-bytes .legend"), r"in [1-9].*out [1-9]")
        assert page.locator("#chart-bytes path.line").count() == 2
        assert "most" in (page.locator("#chart-bytes svg").get_attribute("aria-label") or "")
        page.get_by_text("Nothing: 3 servers alive.").wait_for()
    waiting.join()
    other.close()


def test_by_keyboard_alone(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Tab reaches a buffer with a focus that is seen, Enter opens it, Escape closes it and the focus is where it was; a
    column's head sorts.
    """
    page = open_page(cluster.coordinator.metrics).page
    row(page, "buffers", "weights").wait_for()
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.textContent"))
        seen = page.evaluate(
            "(({outlineStyle, outlineWidth}) => outlineStyle + outlineWidth)(getComputedStyle(document.activeElement))"
        )
        assert seen == "solid2px", order
        if order[-1] == "weights":
            break
    assert order[0] == "Skip to content"
    assert order.index("server-0") < order.index("server-2") < order.index("weights")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    wait_text(dialog, r"buffer weights.*How it is striped.*16 stripes of 256 KiB, in turn on 3 segments of 3 servers")
    assert dialog.locator(".stripes li").count() == 16
    assert page.url.endswith("#buffer=weights")
    assert page.evaluate("document.activeElement.ariaLabel") == "Close"
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert page.evaluate("document.activeElement.textContent") == "weights"
    wait_for(lambda: "#" not in page.evaluate("location.href"), "address without the dialog's part")
    head = page.locator("#buffers th").filter(has_text="Size")
    head.get_by_role("button").focus()
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert page.locator("#buffers tbody tr").first.get_by_text("weights", exact=True).count() == 1


def test_an_address_opens_a_server_and_leads_on(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """A name in an event is a link; what is after # survives a reload, a link inside leads to the next thing, a name
    that is gone is said to be.
    """
    watched = open_page(cluster.coordinator.metrics)
    page = watched.page
    page.locator("#event-list").get_by_role("link", name="server-1", exact=True).click()
    dialog = page.get_by_role("dialog")
    wait_for(lambda: page.evaluate("location.hash") == "#server=server-1", "the server's address")
    page.reload()
    wait_text(dialog, r"server server-1.*data address127.0.0.1:\d+.*Holds.*weights.*1.25 MiB")
    dialog.get_by_role("link", name="weights").click()
    wait_text(dialog, r"buffer weights.*How it is striped")
    page.goto(page.url.replace("weights", "none"))
    dialog.get_by_text("There is no buffer of this name any more.").wait_for()
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="hidden")
    assert watched.errors
    assert all("404" in error for error in watched.errors)  # the browser's own
    watched.errors.clear()


def test_where_second_copies_lie(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """A buffer with two copies says so in the list, and in its dialog which servers hold the second copies."""
    client.create("twice", (300_000,), replicas=2)
    page = open_page(cluster.coordinator.metrics).page
    wait_text(row(page, "buffers", "twice"), r"1\.14 MiB2")
    row(page, "buffers", "twice").get_by_role("link").click()
    copies = page.get_by_role("dialog").get_by_role("table", name="Second copies")
    copies.get_by_role("link", name="server-").first.wait_for()
    wait_text(copies, r"server-\d.*[KM]iB.*alive")
    page.keyboard.press("Escape")
    client.delete("twice")


def test_many_problems_of_one_kind_are_one_row(open_page: Open, cluster: smb.LocalCluster) -> None:
    """Five hundred are one row with their number, that opens to the first of them, which lead to their servers."""
    one = {"severity": "critical", "detail": "", "action": "Start it.", "since": 0, "count": 1, "members": []}
    members = [one | {"title": f"server-{n} is gone", "about": ["server", f"server-{n}"]} for n in range(20)]
    many = one | {"title": "500 memory servers are gone", "about": ["", ""], "count": 500, "members": members}

    def answer(route: Any) -> None:
        found = route.fetch()
        route.fulfill(response=found, json=found.json() | {"problems": [many]})

    page = open_page(cluster.coordinator.metrics).page
    page.route("**/api/state", answer)
    wait_text(page.locator("#problem-list summary"), "500 memory servers are gone")
    assert page.locator("#problem-list > *").count() == 1
    assert page.locator("#problem-list li").count() == 20
    page.get_by_text("480 more are not shown").wait_for()
    page.locator("#problem-list li").first.get_by_role("link", name="server-0").wait_for()
    assert page.title() == "(500) Soft Memory Box"
    page.unroute("**/api/state")


def test_on_a_phone(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """360 pixels wide nothing scrolls sideways, with names of 200 characters and in the dialog too."""
    watched = open_page(
        cluster.coordinator.metrics, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True
    )
    page = watched.page
    row(page, "buffers", LONG).wait_for()
    assert not scrolls_sideways(page)
    assert page.get_by_role("table").count() >= 3  # cards for the eye, tables still for a screen reader
    row(page, "buffers", LONG).get_by_role("link").tap()
    wait_text(page.get_by_role("dialog"), "How it is striped")
    assert not scrolls_sideways(page)
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def test_dark_and_light(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """It follows the system, in both every text has the contrast that WCAG asks for; reduced motion moves nothing."""
    page = open_page(cluster.coordinator.metrics, reduced_motion="reduce").page
    row(page, "buffers", "weights").wait_for()
    backs = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for selector in ("h1, h2, dt, dd, td, a, .quiet, .badge, th button", "#live, .fine, #event-list li, time"):
            ratios = page.evaluate(CONTRAST, selector)
            assert ratios
            assert min(ratios) >= 4.5, (scheme, selector, ratios)
    assert backs[0] != backs[1]
    assert page.evaluate("getComputedStyle(document.querySelector('.fill')).transitionDuration") == "0s"


def test_a_name_is_text_whatever_it_holds(open_page: Open, cluster: smb.LocalCluster) -> None:
    """A client may call itself anything: it is shown letter by letter, and nothing of it is run."""
    with grpc.insecure_channel(cluster.address) as channel:
        stub = CoordinatorStub(channel)
        session = stub.OpenSession(pb.OpenSessionRequest(client_name=HOSTILE), timeout=10)
        page = open_page(cluster.coordinator.metrics).page
        row(page, "clients", HOSTILE).wait_for()
        assert page.locator("main img, main b").count() == 0
        assert page.title() == "Soft Memory Box"
        stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id), timeout=10)


def test_says_what_to_do_first(open_page: Open, tmp_path: Path) -> None:
    """With nothing there: the commands that bring a server, a buffer and a client, with this cluster's address."""
    with running_daemons(tmp_path) as daemons:
        alone = daemons.coordinator()
        page = open_page(alone.metrics).page
        page.get_by_text(f"smb-memserver --coordinator {alone.address} --capacity 1GiB").wait_for()
        page.get_by_text(f"smb create weights --shape 1000,1000 --coordinator {alone.address}").wait_for()
        page.get_by_text(f'smb.connect("{alone.address}")').wait_for()
        page.get_by_text("Nothing, but there is no memory server yet.").wait_for()
        page.context.close()  # before the coordinator ends: the page asks it every second


def test_a_killed_server_turns_red_and_comes_back(
    open_page: Open, cluster: smb.LocalCluster, client: smb.Client
) -> None:
    """Its row, its buffers and the first thing on the page say so, with the command that brings it back; then all is
    well again. What is open and focused stays so meanwhile.
    """
    page = open_page(cluster.coordinator.metrics).page
    ok = row(page, "servers", "server-1")
    wait_text(ok, "alive")
    before = ok.evaluate("e => getComputedStyle(e.firstElementChild).backgroundColor")
    row(page, "servers", "server-1").get_by_role("link").focus()
    cluster.servers[1].kill()
    gone = page.locator("#servers tbody tr.critical")
    wait_text(gone, r"server-1.*gone, \d+ s ago")
    red = gone.evaluate("e => getComputedStyle(e.firstElementChild).backgroundColor")
    assert red != before
    wait_text(page.locator("#problem-list"), r"critical server-1 is gone.*smb-memserver --name server-1")
    wait_text(row(page, "buffers", "weights"), "server gone")
    wait_text(page.locator("#event-list"), "server-1. is gone")
    assert page.title() == "(1) Soft Memory Box"
    assert page.locator("#n-servers").text_content() == "2/3"
    assert page.evaluate("document.activeElement.textContent") == "server-1"
    cluster.servers[1].start()
    wait_text(row(page, "servers", "server-1"), "alive")
    page.get_by_text("Nothing: 3 servers alive.").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "server-1"


def test_says_that_it_lost_the_coordinator(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """What is shown stays and is said to be old; when the coordinator is back the page lives again by itself."""
    watched = open_page(cluster.coordinator.metrics)
    page = watched.page
    row(page, "buffers", "weights").wait_for()
    cluster.coordinator.kill()
    alert = page.get_by_role("alert")
    wait_text(alert, r"The coordinator is lost: it does not answer. What you see is \d+ s old")
    assert row(page, "buffers", "weights").count() == 1
    cluster.coordinator.start()
    page.get_by_text("live", exact=True).wait_for()
    alert.wait_for(state="hidden")
    row(page, "buffers", "weights").wait_for()
    # The browser's own, for each attempt at the dead coordinator, also one that was under way.
    assert [error for error in watched.errors if not error.startswith("Failed to load resource: net::ERR_")] == []
    watched.errors.clear()


@pytest.mark.parametrize("screen", ["desktop", "phone"] if long.LONG else ["phone"])
def test_a_training(open_page: Open, cluster: smb.LocalCluster, client: smb.Client, screen: str) -> None:
    """Who trains what, how fast and how far; its own buffers and locks under it; names of tensors. The picture is kept
    in build/screenshots.
    """
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    with training(cluster.address), client.lock("vision/digits/mine"), client.lock("mine"):
        page = open_page(cluster.coordinator.metrics, **(phone if screen == "phone" else {})).page
        wait_text(row(page, "trainings", "vision/digits"), r"trains.*diloco.*[1-9].*2.*[1-9][\d.]*( k)?/s")
        wait_for(lambda: page.locator("#n-trainings").inner_text() == "1", "the count in the heading")
        assert row(page, "buffers", "vision/digits/tick").count() == 0
        wait_text(page.locator("#event-list"), 'made buffer "vision/digits"')
        assert "vision/digits/tick" not in page.locator("#event-list").inner_text()
        wait_text(page.locator("#waits tbody tr"), "lock mine")
        page.get_by_text("In place: what servers combine themselves").wait_for()  # seen, not in a tooltip
        assert "vision/digits" not in page.locator("#waits tbody").inner_text()
        wait_text(row(page, "buffers", "weights"), "weights")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"training-{screen}.png", full_page=True)
        page.get_by_text("vision/digits", exact=True).first.click()
        dialog = page.get_by_role("dialog")
        wait_text(dialog, r"scheme\s*diloco.*every=5.*50 k parameters")
        for label in ("alice", "bob"):
            wait_text(dialog, rf"{label} \(")
        assert dialog.locator("path.line").count() == 2
        wait_text(dialog, r"lock vision/digits/mine.*vision/digits/members")
        wait_for(lambda: "most 0" not in (dialog.locator("svg").first.get_attribute("aria-label") or ""), "rounds")
        assert not scrolls_sideways(page)
        page.screenshot(path=SCREENSHOTS / f"training-{screen}-dialog.png")
    wait_text(dialog, "Nobody trains it now")
    page.keyboard.press("Escape")
    smb.train.delete(client, "vision/digits")
    page.get_by_text("No training. In a PyTorch script").wait_for()


def test_names_of_tensors_and_links(open_page: Open, cluster: smb.LocalCluster, client: smb.Client) -> None:
    """A buffer's dialog names the tensors in it; every link of the heading leads to a section."""
    client.create("named", tensors={"layer.weight": ((10, 5), "float32"), "<b>": ((3,), "float32")})
    page = open_page(cluster.coordinator.metrics, "#buffer=named").page
    wait_text(page.get_by_role("dialog"), r"Tensors in it.*layer.weight10 . 5float32.*<b>3float32")
    page.keyboard.press("Escape")
    for link in page.locator("nav a:visible").all():  # that of published states is hidden without any
        link.click()
        wait_for(
            lambda link=link: page.evaluate(
                "id => document.getElementById(id).getBoundingClientRect().top < innerHeight",
                link.get_attribute("href")[1:],
            ),
            "the section in sight",
        )
    client.delete("named")
