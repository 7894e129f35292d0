"""Fixtures for tests of the page, in a real Chromium; what has none is skipped with its reason."""

import shutil

import pytest

from tests.kit.commands import Workplace

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
]


@pytest.fixture
def workplace(tmp_path):
    """The folder of this test; what was started in it ends with the test."""
    with Workplace(tmp_path) as place:
        yield place


@pytest.fixture
def watch(workplace):
    """`watch(folder, "--port", 1234)` starts `trahiv watch` and waits until it says where its page is."""

    def watch(*args):
        return served(workplace.start("watch", *args, is_cold=True))

    return watch


@pytest.fixture
def serve(workplace):
    """`serve(script)` starts a script that makes a `Page` and calls it `page`, and serves that."""

    def serve(script, *args):
        return served(workplace.start_script(PAGE.format(script=script), *args, is_cold=True))

    return serve


def served(peer):
    peer.wait_for("watching", timeout=30)
    return peer


PAGE = """
import sys
from pathlib import Path
from tests.web import recorded
from trahiv_cli.telemetry.events import to_json
from trahiv_cli.watch.lookout import Lookout
from trahiv_cli.watch.server import Page
from trahiv_cli.watch.tail import Nothing, Tail

{script}
page.run(lambda: print(to_json(recorded.event(0, "watching", url=page.url)), flush=True))
"""


@pytest.fixture(scope="session")
def chromium():
    path = shutil.which("chromium")
    if not path:
        pytest.skip("there is no Chromium: scripts/install-chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium):
    """`browse(peer)` opens the page that a process serves. Nothing on it may go wrong or ask for anything."""
    contexts = []
    wrong = []

    def browse(peer, width=1280, scheme="light", url=""):
        size = {"width": width, "height": 900}
        context = chromium.new_context(color_scheme=scheme, viewport=size, timezone_id="UTC")
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda said: said.type == "warning" and wrong.append(said.text))
        page.goto(url or served(peer).events[0]["url"])
        return page

    yield browse
    for context in contexts:
        context.close()
    assert not wrong
