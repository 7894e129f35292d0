"""Who may read the page, and who may press its buttons."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import psutil
import pytest

from tests.kit.commands import ROOT
from tests.web import recorded


def request(port: int, path: str, method: str = "GET", body: str | None = None, **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"host": f"127.0.0.1:{port}"} | headers).items():
        connection.putheader(name, value)
    connection.putheader("content-length", str(len(body or "")))
    connection.endheaders((body or "").encode())
    answer = connection.getresponse()
    is_endless = answer.headers.get_content_type() == "text/event-stream"
    text = "" if is_endless else answer.read().decode()
    connection.close()
    return answer, text


@pytest.fixture
def served(watch, tmp_path):
    """The port of a page, and its token."""
    folder = recorded.write(tmp_path / "run", recorded.run(3, ends_at=1000.0))
    (folder / "recipe.json").write_text("{}")
    peer = watch(folder)
    url = urlsplit(peer.wait_for("watching", timeout=1)["url"])
    assert url.hostname == "127.0.0.1"
    return url.port, url.query.removeprefix("token=")


def test_only_own_browser_reads_page(served, tmp_path):
    port, token = served
    cookie = {"cookie": f"trahiv-{port}={token}"}
    for path in ("/", "/main.js", "/about", "/events", "/no-such-thing"):
        for headers in ({}, {"cookie": f"trahiv-{port}=x{token[1:]}"}, {"cookie": f"trahiv-1={token}"}):
            answer, text = request(port, path, **headers)
            assert answer.status == 403 and "open the address that `trahiv watch` printed" in text
        for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
            assert request(port, path, host=host, **cookie)[0].status == 421
    assert request(port, "/?token=wrong")[0].status == 403

    answer, _ = request(port, f"/?token={token}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    given = answer.headers["set-cookie"]
    assert given.startswith(f"trahiv-{port}={token};")
    assert "HttpOnly" in given and "SameSite=lax" in given
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        answer, text = request(port, "/", host=host, **cookie)
        assert answer.status == 200 and "<main>" in text
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert request(port, "/events", **cookie)[0].headers["content-type"].startswith("text/event-stream")
    assert json.loads(request(port, "/about", **cookie)[1])["deeds"] == ["pause", "resume", "finish"]
    for path in ("/../guard.py", "/%2e%2e/guard.py", "/..%2fguard.py", "//etc/passwd", "/index.html/.."):
        assert request(port, path, **cookie)[0].status == 404, path
    for method in ("POST", "PUT", "DELETE"):
        own = {"origin": f"http://127.0.0.1:{port}"}
        assert request(port, "/about", method, **cookie, **own)[0].status == 405
    assert (tmp_path / "run" / "watch.key").stat().st_mode & 0o777 == 0o600
    assert token not in repr(sorted(os.environ.items()))


def test_program_run_has_no_buttons(watch, tmp_path):
    peer = watch(recorded.write(tmp_path / "run", recorded.run(3, ends_at=1000.0)))
    url = urlsplit(peer.wait_for("watching", timeout=1)["url"])
    cookie = {"cookie": f"trahiv-{url.port}={url.query.removeprefix('token=')}"}
    assert json.loads(request(url.port, "/about", **cookie)[1])["deeds"] == []


DEEDS = """
from trahiv_cli.errors import SetupError

def refuse(wanted):
    raise SetupError("It does not run.", hint="start it")

page = Page(Nothing, "secret", deeds={"pause": lambda wanted: {"had": wanted}, "finish": refuse})
"""


def test_only_page_presses_buttons(serve):
    port = urlsplit(serve(DEEDS).events[0]["url"]).port
    cookie = {"cookie": f"trahiv-{port}=secret"}
    own = cookie | {"origin": f"http://127.0.0.1:{port}"}
    for origin in ({}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1"}):
        assert request(port, "/do/pause", "POST", "{}", **cookie, **origin)[0].status == 403
    assert request(port, "/do/pause", "POST", "{}", origin=own["origin"])[0].status == 403
    assert request(port, "/do/pause?token=secret", "POST", "{}", origin=own["origin"])[0].status == 403
    assert request(port, "/do/pause", **own)[0].status == 405
    assert json.loads(request(port, "/about", **own)[1])["deeds"] == ["pause", "finish"]

    answer, text = request(port, "/do/pause", "POST", '{"why": "a game"}', **own)
    assert (answer.status, json.loads(text)) == (200, {"had": {"why": "a game"}})
    answer, text = request(port, "/do/finish", "POST", "{}", **own)
    assert (answer.status, json.loads(text)) == (409, {"message": "It does not run.", "hint": "start it"})
    bodies = {"{": 400, "[]": 400, f'"{"x" * 20_000}"': 413}
    for body, status in bodies.items():
        assert request(port, "/do/pause", "POST", body, **own)[0].status == status
    assert request(port, "/do/kick", "POST", "{}", **own)[0].status == 404


def test_readable_key_and_taken_port_are_refused(served, workplace, tmp_path):
    def refused(*args):
        peer = workplace.start("watch", *args, is_cold=True)
        assert peer.exit_code(timeout=30) == 3
        assert token not in peer.out + peer.err
        return peer.errors[0]

    port, token = served
    assert f"Port {port}" in refused("run", "--port", port)["message"]
    (tmp_path / "run" / "watch.key").chmod(0o644)
    assert "can be read by other users" in refused("run")["message"]
    assert refused("nowhere")["hint"] and "--peer ADDR" in refused()["hint"]


def test_ssh_session_gets_tunnel_command(workplace, tmp_path):
    folder = recorded.write(tmp_path / "run", recorded.run(3, ends_at=1000.0))
    env = {"SSH_CONNECTION": "192.0.2.1 51234 192.0.2.7 22", "DISPLAY": ":0"}
    peer = workplace.start("watch", folder, env=env, is_cold=True)
    url = urlsplit(peer.wait_for("watching", timeout=30)["url"])
    token = url.query.removeprefix("token=")
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=10)
    connection.request("GET", "/events", headers={"Cookie": f"trahiv-{url.port}={token}"})
    stream = connection.getresponse()
    while stream.readline() != b"event: live\n":
        pass
    peer.press_ctrl_c()
    assert peer.exit_code(timeout=10) == 0
    assert stream.read(), "the stream was ended, not cut"
    assert f"ssh -L {url.port}:127.0.0.1:{url.port} " in peer.err and "@192.0.2.7" in peer.err


WITHOUT = """
import sys
sys.modules["starlette"] = None
from trahiv_cli.cli.app import run
run(["watch", "--format", "json"])
"""


def test_missing_web_packages_are_named(tmp_path):
    command = [sys.executable, "-c", WITHOUT]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["hint"] == "pip install 'trahiv[web]'"


def test_sigterm_ends_server(served, workplace):
    [peer] = workplace.peers
    peer.send_signal(signal.SIGTERM)
    assert peer.exit_code(timeout=10) == 0


def test_stalled_reader_costs_no_memory(watch, tmp_path):
    folder = recorded.write(tmp_path / "run", recorded.run(20_000, ends_at=1000.0))
    peer = watch(folder)
    url, process = urlsplit(peer.events[0]["url"]), psutil.Process(peer.pid)
    cookie = f"trahiv-{url.port}={url.query.removeprefix('token=')}"
    asked = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{url.port}\r\nCookie: {cookie}\r\n\r\n".encode()
    before, read = process.memory_info().rss, 0
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", url.port), timeout=30))
            connection.sendall(asked)
        while read < 10_000_000:
            read += len(connection.recv(2**20))
        assert process.memory_info().rss - before < 30_000_000, "the folder holds 12 MB for each"
        peer.send_signal(signal.SIGTERM)
        assert peer.exit_code(timeout=10) == 0
    assert peer.err == ""
