"""Fixtures for tests of the page, in a real Chromium; what has none is skipped with its reason."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.commands import Peer, Workplace

CHROMIUM = shutil.which("chromium") or ""
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """The folder of this test; what was started in it ends with the test."""
    with Workplace(tmp_path) as place:
        yield place


@pytest.fixture
def start(workplace: Workplace) -> Callable[..., Peer]:
    return workplace.start


@pytest.fixture
def watch(workplace: Workplace) -> Callable[..., Peer]:
    """`watch(folder, "--port", 1234)` starts `trahiv watch` and waits until it says where its page is."""

    def started(*args: object) -> Peer:
        peer = workplace.start("watch", *args, is_cold=True)
        peer.wait_for("watching", timeout=30)
        return peer

    return started


@pytest.fixture
def serve(workplace: Workplace) -> Callable[..., Peer]:
    """`serve(script)` starts a script that makes a `Page` and calls it `page`, and serves that."""

    def started(script: str, *args: object) -> Peer:
        peer = workplace.start_script(PAGE.format(script=script), *args, is_cold=True)
        peer.wait_for("watching", timeout=30)
        return peer

    return started


PAGE = """
import sys
from pathlib import Path
from tests.web import recorded
from trahiv_cli.telemetry.events import to_json
from trahiv_cli.watch import lookout
from trahiv_cli.watch.lookout import Lookout
from trahiv_cli.watch.server import Page
from trahiv_cli.watch.tail import Nothing, Tail

{script}
page.run(lambda: print(to_json(recorded.event(0, "watching", url=page.url)), flush=True))
"""


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    if not CHROMIUM:
        pytest.skip("there is no Chromium: scripts/install-chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium) -> Iterator[Callable]:
    """`browse(peer)` opens the page that a process serves. Nothing on it may go wrong or ask for anything."""
    contexts, wrong = [], []

    def opened(peer: Peer, width: int = 1280, scheme: str = "light", url: str = ""):
        size = {"width": width, "height": 900}
        context = chromium.new_context(color_scheme=scheme, viewport=size, timezone_id="UTC")
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda said: said.type == "warning" and wrong.append(said.text))
        page.goto(url or peer.wait_for("watching", timeout=1)["url"])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
