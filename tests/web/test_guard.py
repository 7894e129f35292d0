"""Who may read the page, and who may press its buttons."""

import http.client
import json
import signal
from urllib.parse import urlsplit

import psutil
import pytest

from tests.kit.commands import wait_until
from tests.web.recorded import run, write


class Browser:
    """The browser of the page's user: it has the cookie, and its requests come from the page."""

    def __init__(self, peer):
        url = urlsplit(peer.events[0]["url"])
        self.port = url.port
        self.token = url.query.removeprefix("token=")
        self.cookie = f"trahiv-{self.port}={self.token}"

    def connect(self, path, method="GET", body=None, **changes):
        """Send a request; a header that is None is left out."""
        headers = {"cookie": self.cookie, "origin": f"http://127.0.0.1:{self.port}"} | changes
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {name: value for name, value in headers.items() if value is not None}
        connection.request(method, path, body, given)
        return connection

    def ask(self, *request, **changes):
        """The answer to a request, with its whole text."""
        connection = self.connect(*request, **changes)
        answer = connection.getresponse()
        answer.text = answer.read().decode()
        connection.close()
        return answer

    def press(self, deed, body="{}", **changes):
        """The status and the text that answer a button."""
        answer = self.ask(f"/do/{deed}", "POST", body, **changes)
        return answer.status, answer.text


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run", run(3, ends_at=1000.0))


@pytest.fixture
def page(watch, folder):
    return Browser(watch(folder))


PATHS = ("/", "/main.js", "/about", "/events", "/no-such-thing")


def test_only_cookie_opens_page(page):
    for path in PATHS:
        for cookie in (None, f"trahiv-{page.port}=x{page.token[1:]}", f"trahiv-1={page.token}"):
            answer = page.ask(path, cookie=cookie)
            assert answer.status == 403
            assert "open the address that `trahiv watch` printed" in answer.text
    assert page.ask("/?token=wrong", cookie=None).status == 403


def test_other_host_is_refused(page):
    for path in PATHS:
        for host in (f"evil.example:{page.port}", "127.0.0.1", f"127.0.0.1:{page.port + 1}", ""):
            assert page.ask(path, host=host).status == 421


def test_token_is_exchanged_for_cookie(page):
    answer = page.ask(f"/?token={page.token}", cookie=None)
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    given = {*answer.headers["set-cookie"].split("; ")}
    assert {page.cookie, "HttpOnly", "SameSite=lax"} <= given


def test_own_browser_gets_guarded_page(page):
    for host in ("127.0.0.1", "localhost"):
        answer = page.ask("/", host=f"{host}:{page.port}")
        assert answer.status == 200
        assert "<main>" in answer.text
    for name, value in {
        "content-security-policy": "default-src 'none'; script-src 'self';",
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }.items():
        assert answer.headers[name].startswith(value)


def test_no_other_file_is_served(page):
    for path in ("/../guard.py", "/%2e%2e/guard.py", "/..%2fguard.py", "//etc/passwd", "/index.html/.."):
        assert page.ask(path).status == 404, path


def test_page_is_only_read(page):
    for method in ("POST", "PUT", "DELETE"):
        assert page.ask("/about", method).status == 405


DEEDS = """
from trahiv_cli.errors import SetupError

def refuse(wanted):
    raise SetupError("It does not run.", hint="start it")

page = Page(Nothing, "secret", deeds={"pause": lambda wanted: {"had": wanted}, "finish": refuse})
"""


@pytest.fixture
def buttons(serve):
    return Browser(serve(DEEDS))


def test_only_page_presses_buttons(buttons):
    for origin in (None, "http://evil.example", "null", "http://127.0.0.1"):
        assert buttons.press("pause", origin=origin)[0] == 403
    for way in ("pause", "pause?token=secret"):
        assert buttons.press(way, cookie=None)[0] == 403
    assert buttons.ask("/do/pause").status == 405


def test_page_offers_its_buttons(buttons):
    assert json.loads(buttons.ask("/about").text)["deeds"] == ["pause", "finish"]
    assert buttons.press("kick")[0] == 404


def test_button_answers_with_result_or_error(buttons):
    assert buttons.press("pause", '{"why": "a game"}') == (200, '{"had":{"why":"a game"}}')
    assert buttons.press("finish") == (409, '{"message":"It does not run.","hint":"start it"}')
    for body, status in {"{": 400, "[]": 400, f'"{"x" * 20_000}"': 413}.items():
        assert buttons.press("pause", body)[0] == status


@pytest.mark.parametrize(
    ("words", "mode", "said"),
    [
        (["run", "--port", "{port}"], 0o600, "Port {port}"),
        (["run"], 0o644, "can be read by other users"),
        (["nowhere"], 0o600, "There is no folder nowhere."),
        ([], 0o600, "--peer ADDR"),
    ],
)
def test_unusable_page_is_refused(page, workplace, folder, words, mode, said):
    key = folder / "watch.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(mode)
    peer = workplace.start("watch", *(word.format(port=page.port) for word in words), is_cold=True)
    assert peer.exit_code(timeout=30) == 3
    assert said.format(port=page.port) in peer.out
    assert page.token not in peer.out + peer.err


def test_ssh_session_gets_tunnel_command(workplace, folder):
    env = {"SSH_CONNECTION": "192.0.2.1 51234 192.0.2.7 22", "DISPLAY": ":0"}
    peer = workplace.start("watch", folder, env=env, is_cold=True)
    url = peer.wait_for("watching", timeout=30)["url"]
    port = urlsplit(url).port
    wait_until(lambda: f"ssh -L {port}:127.0.0.1:{port} " in peer.err and "@192.0.2.7" in peer.err)


def test_signal_ends_stream_in_order(watch, folder):
    peer = watch(folder)
    stream = Browser(peer).connect("/events").getresponse()
    while stream.readline() != b"event: live\n":
        pass
    peer.press_ctrl_c()
    assert peer.exit_code(timeout=10) == 0
    assert stream.read(), "the stream was ended, not cut"


WITHOUT = """
import sys
sys.modules["starlette"] = None
from trahiv_cli.cli.app import run
run(["watch", "--format", "json"])
"""


def test_missing_web_packages_are_named(workplace):
    peer = workplace.start_script(WITHOUT, is_cold=True)
    assert peer.exit_code(timeout=60) == 3
    assert peer.errors[0]["hint"] == "pip install 'trahiv[web]'"


def test_stalled_reader_costs_no_memory(watch, tmp_path):
    peer = watch(write(tmp_path / "run", run(20_000, ends_at=1000.0)))
    process = psutil.Process(peer.pid)
    before = process.memory_info().rss
    connections = [Browser(peer).connect("/events") for _ in range(8)]
    read = 0
    while read < 10_000_000:
        read += len(connections[-1].sock.recv(2**20))
    assert process.memory_info().rss - before < 30_000_000, "the folder holds 12 MB for each"
    peer.send_signal(signal.SIGTERM)
    assert peer.exit_code(timeout=10) == 0
    assert peer.err == ""
    for connection in connections:
        connection.close()
