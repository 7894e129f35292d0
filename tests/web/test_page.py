"""The page, as a person sees it: Chromium before a real `trahiv watch`."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.kit.commands import LOOPBACK, ROOT, wait_until
from tests.kit.recipes import write_tiny
from tests.web import recorded
from tests.web.recorded import FIRST, OWN, SECOND

pytest.importorskip("playwright", reason="playwright is not installed")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import expect  # noqa: E402

REWRITE = "TRAHIV_REWRITE"
"""Set to 1 to make the pictures of the docs anew."""

MOMENT = 5_000  # milliseconds, in which a busy machine shows a change


def is_wider_than_its_window(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def complaints(page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]


SWARM = f"""
def look():
    names = ["Ana", "bruno", "Clara's desktop"]
    devices = [("NVIDIA RTX 3090", 24.0), ("NVIDIA RTX 4070 Ti", 12.0), ("Apple M2 Max", 64.0)]
    now = float(sys.argv[2])
    return recorded.event(now, "peers", run_id="spanish-qlora-958ba95d", peers=[
        dict(peer_id=peer, name=name, version="0.1.0", device=device, memory_gib=memory, step=412,
             max_steps=1000, loss=1.5, samples=12336 - 3800 * number, tokens=9_100_000 - 2_900_000 * number,
             samples_per_second=17.9 - 4.2 * number, reached=reached, since=now - 5000 + 1300 * number,
             round_at=now - 5, round_peers=3, round_seconds=1.8, trouble="", waits_for="", state="training")
        for number, (peer, name, (device, memory), reached) in enumerate(zip(
            {(OWN, SECOND, FIRST)!r}, names, devices, ("direct", "punched", "relayed")))])

page = Page(lambda: Tail(Path(sys.argv[1])), "token", lookout=Lookout(look))
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_run_fits_phone_and_wide_screen(serve, browse, tmp_path, scheme):
    now = time.time()
    peer = serve(SWARM, recorded.write(tmp_path / "run", recorded.run(412, ends_at=now - 5)), now)
    for width in (1920, 360, 1100):
        page = browse(peer, width, scheme)
        expect(page.locator("h1")).to_contain_text("Training, step 412 of 1,000; the last round was")
        expect(page.locator("h1")).to_contain_text(re.compile(r"done (to|on ).* about \d\d:\d\d"))
        expect(page).to_have_title("412/1,000 · Training · spanish-qlora-958ba95d")
        expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("Loss over 412 steps: 1"))
        expect(page.locator("#people tr")).to_have_count(3, timeout=MOMENT)
        expect(page.locator("#people tr").first).to_contain_text("Anathis machine")
        expect(page.locator("#rounds tr")).to_have_count(50)
        expect(page.locator("#pays")).to_contain_text("Samples given")
        expect(page.locator("#now")).to_contain_text("junto a la puerta de la cocina")
        expect(page.locator("#then")).to_contain_text("ado ,, la la")
        expect(page.locator("#notices")).to_contain_text("The round for step 310 failed")
        expect(page.locator("#notices")).to_contain_text("nothing to do, unless it repeats")
        expect(page.locator("#deeds button")).to_have_count(0)
        assert not is_wider_than_its_window(page)
        assert not complaints(page)
    if os.environ.get(REWRITE):
        page.screenshot(path=ROOT / "docs" / f"watch_{scheme}.png")
    assert (ROOT / "docs" / f"watch_{scheme}.png").stat().st_size < 150_000


def test_events_are_shown_live_and_after_reload(watch, browse, tmp_path):
    folder, now = tmp_path / "run", time.time()
    folder.mkdir()
    page = browse(watch(folder))
    expect(page.locator("h1")).to_have_text("Waiting for the first word of this run.")
    recorded.write(folder, [recorded.ready(now)])
    expect(page.locator("#said")).to_have_text("Loading the model")
    recorded.write(folder, [recorded.joined(now, 0), recorded.step(now, 1, 2.5)])
    expect(page.locator("h1")).to_contain_text("Training alone, step 1 of 1,000")
    waits = {"what": "another peer", "seconds": 5.0, "until_seconds": 60.0}
    ended = {"step": 2, "path": None, "reason": "signal", "had_ended": False}
    failed = {"code": "memory", "message": "It does not fit.", "hint": "a smaller batch"}
    for phase, event in (
        ("Waiting for another peer", recorded.event(now, "waiting", **waits)),
        ("Training, step 2", recorded.step(now, 2, 2.4, [OWN, FIRST])),
        ("Paused, step 2 of 1,000: a game runs", recorded.event(now, "paused", step=2, why="a game runs")),
        ("Loading the model", recorded.event(now, "resumed", step=2, seconds=9.0)),
        ("Training, step 3", recorded.step(now, 3, 2.4, [OWN, FIRST])),
        ("Stopped, step 2", recorded.event(now, "done", **ended)),
        ("Loading the model", recorded.ready(now)),
        ("Training alone, step 1", recorded.joined(now, 1, "checkpoint")),
        ("Training, step 2", recorded.step(now, 2, 2.3, [OWN, FIRST])),
        ("Stopped by an error, step 2 of 1,000: It does not fit.", recorded.event(now, "error", **failed)),
    ):
        recorded.write(folder, [event])
        expect(page.locator("h1")).to_contain_text(phase, timeout=MOMENT)
    page.reload()
    expect(page.locator("h1")).to_contain_text("It does not fit.")
    expect(page.locator("#rounds tr")).to_have_count(3)
    expect(page.locator("#notices li").first).to_contain_text("a smaller batch")
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("Loss over 2 steps: 2.300 now"))


def test_page_reconnects_to_restarted_server(watch, browse, tmp_path):
    story = recorded.run(30, ends_at=time.time())
    rounds = sum(bool(event.get("round")) or event.get("code") == "round" for event in story)
    folder = recorded.write(tmp_path / "run", story)
    peer = watch(folder)
    page = browse(peer)
    expect(page.locator("#said")).to_have_text("Training")
    peer.kill()
    expect(page.locator("h1")).to_contain_text("Disconnected: `trahiv watch` does not run.", timeout=MOMENT)
    expect(page.locator("#rounds tr")).to_have_count(rounds)
    recorded.write(folder, [recorded.step(time.time(), 31, 1.5, [OWN, SECOND])])
    port = peer.events[0]["url"].split(":")[2].split("/")[0]
    watch(folder, "--port", port)
    expect(page.locator("h1")).to_contain_text("step 31 of", timeout=3 * MOMENT)
    expect(page.locator("#rounds tr")).to_have_count(rounds + 1)


def test_browser_opens_private_file(start, browse, tmp_path):
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o700)
    folder = recorded.write(tmp_path / "run", recorded.run(3, ends_at=time.time()))
    peer = start("watch", folder, is_cold=True, env={"BROWSER": f"{browser} %s", "DISPLAY": ":0"})
    url = peer.wait_for("watching", timeout=30)["url"]
    wait_until(lambda: opened.exists() and opened.read_text())
    way_in = folder / "watch.html"
    assert opened.read_text() == way_in.as_uri() != url
    assert way_in.stat().st_mode & 0o777 == 0o600
    page = browse(peer, url=way_in.as_uri())
    expect(page.locator("h1")).to_contain_text("Training, step 3")
    peer.send_signal(signal.SIGINT)
    wait_until(lambda: not way_in.exists())


def test_long_run_opens_whole(watch, browse, tmp_path):
    events = recorded.run(20_000, ends_at=time.time(), max_steps=30_000)
    middle = len(events) // 2
    recorded.write(tmp_path / "run", events[:middle], "events.jsonl.1")
    page = browse(watch(recorded.write(tmp_path / "run", events[middle:])))
    expect(page.locator("h1")).to_contain_text("step 20,000 of 30,000", timeout=10_000)
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("Loss over 20,000 steps"))
    page.locator("#range").select_option("100 steps")
    expect(page.locator("#pays")).to_contain_text("of the swarm's")


FROM_FILE = """
import json
from trahiv_cli.errors import Unreachable
lookout.LOOK_EVERY_S = 0.1

def look():
    there = json.loads(Path(sys.argv[1]).read_text())
    if not there:
        raise Unreachable("No peer answered.", hint="try again")
    return recorded.event(float(sys.argv[2]), "peers", run_id="tiny-1", peers=[
        dict(peer_id=name * 9, name=name, version="0.1.0", device="CPU", memory_gib=8.0, step=5, max_steps=10,
             loss=2.5, samples=9, tokens=90, samples_per_second=2.0, reached="direct", since=0.0,
             round_at=0.0, round_peers=0, round_seconds=0.0,
             trouble="", waits_for="", state="training") for name in there])

page = Page(Nothing, "token", lookout=Lookout(look))
"""


def test_swarm_is_shown_from_peer_reports(serve, browse, tmp_path):
    there, now = tmp_path / "there.json", time.time()
    there.write_text("[]")
    page = browse(serve(FROM_FILE, there, now))
    expect(page.locator("h1")).to_have_text("The swarm does not answer: No peer answered.")
    expect(page.locator("#trouble")).to_contain_text("try again")
    for names in (["Ana", "bruno"], ["Ana"], ["Ana", "bruno", "Clara"]):
        aside = tmp_path / "aside.json"
        aside.write_text(json.dumps(names))
        aside.rename(there)
        expect(page.locator("#people tr:not(.away)")).to_have_count(len(names))
        expect(page.locator("h1")).to_contain_text("step 5 of 10")
        expect(page.locator("#trouble")).to_be_hidden()
        if names == ["Ana"]:
            expect(page.locator("#people tr.away")).to_contain_text("brunogone since")
    expect(page.locator("#legend")).to_contain_text("joined")
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("2.500 now"))


HOSTILE = """
lookout.LOOK_EVERY_S = 0.2
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt;"
NAMES = [
    MARKUP, "\\u202egnihton si siht\\u2066", "x" * 10_000, "\\U0001F469\\u200d\\U0001F4BB " * 9,
    "a\\x1b[31m\\x00b\\nc", "Z\\u0351\\u036b" * 40, "\\u05e9\\u05dc\\u05d5\\u05dd", "__proto__",
]
NAMES += [f"peer {number}" for number in range(50 - len(NAMES))]
MOST = dict(memory_gib=1e12, step=2**30, max_steps=7, samples=2**52, tokens=2**52, since=1e11, round_at=1e11)

def look(count=[0]):
    count[0] += 1
    return recorded.event(1000.0, "peers", run_id=MARKUP, peers=[
        dict(MOST, peer_id=f"Qm{number}" + "Y" * 44, name=name, version=MARKUP, device=name, loss=None,
             samples_per_second=1e11 + count[0], reached=MARKUP, round_peers=0, round_seconds=0.0,
             trouble=name, waits_for=name, state="training")
        for number, name in enumerate(NAMES)])

deeds = {"kick": lambda wanted: {"message": to_json(wanted)}}
page = Page(Nothing, "token", lookout=Lookout(look), deeds=deeds)
"""


@pytest.mark.parametrize("width", [360, 1920])
def test_strangers_text_is_never_markup(serve, browse, width):
    page = browse(serve(HOSTILE), width)
    rows = page.locator("#people tr")
    expect(rows).to_have_count(50, timeout=MOMENT)
    expect(rows.nth(0).locator("bdi")).to_have_text(re.compile("^<img src=x onerror"))
    expect(rows.nth(1).locator("bdi")).to_have_text("�gnihton si siht�")
    expect(rows.nth(2).locator("bdi")).to_have_text("x" * 39 + "…")
    expect(rows.nth(3).locator("bdi")).to_contain_text("\U0001f469\u200d\U0001f4bb")
    expect(rows.nth(4).locator("bdi")).to_have_text("a�[31m�b c")
    assert page.locator("img, main script, #people b").count() == 0
    assert not is_wider_than_its_window(page)
    assert not complaints(page)

    # A row keeps its element and its focus while its numbers change.
    button = rows.nth(0).get_by_role("button")
    button.focus()
    speed = rows.nth(9).locator("td").nth(4)
    before = speed.text_content()
    expect(speed).not_to_have_text(before, timeout=MOMENT)
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#dialog-title")).to_contain_text("Remove <img src=x")
    page.locator("#dialog-do").click()
    expect(page.locator("#dialog-answer")).to_have_text(json.dumps({"peer": f"Qm0{'Y' * 44}"}))


def test_run_messages_are_never_markup(watch, browse, tmp_path):
    now, markup = time.time(), "<img src=x onerror=alert(1)>"
    texts = [markup, "\u202ethgir", "word " * 2000, "x" * 10_000, "a\u0000b"]
    story = [recorded.ready(now) | {"run_id": markup * 9}, recorded.joined(now, 0)]
    for number, text in enumerate(texts, 1):
        story.append(recorded.event(now, "warning", code=text, message=text, hint=text))
        story.append(recorded.event(now, "sample", step=number, prompt=text, text=text))
        left = {"left_out": {FIRST: text}, "reason": text}
        taken = recorded.step(now, number, 2.0, [OWN, FIRST])
        story.append(taken | {"round": taken["round"] | left})
    story.append(recorded.event(now, "constructor", step=1))
    page = browse(watch(recorded.write(tmp_path / "run", story)), 360)
    expect(page.locator("#notices li.warning")).to_have_count(len(texts))
    expect(page.locator("#rounds tr")).to_have_count(len(texts))
    expect(page.locator("#now")).to_have_text("a�b")
    assert page.locator("img").count() == 0
    assert not is_wider_than_its_window(page)
    assert not complaints(page)


DEEDS = """
from trahiv_cli.errors import SetupError

def say(deed, **answer):
    def done(wanted):
        print(to_json(recorded.event(0, deed, wanted=wanted)), flush=True)
        return answer
    return done

def refuse(wanted):
    raise SetupError("It does not run.", hint="start it")

line = "trahiv join --peer trahiv1-secret"
deeds = {"pause": refuse, "finish": say("finish"), "invite": say("invite", message="It is good.", line=line)}
page = Page(lambda: Tail(Path(sys.argv[1])), "token", deeds=deeds)
"""


def test_buttons_act_and_finish_asks_first(serve, browse, tmp_path):
    peer = serve(DEEDS, recorded.write(tmp_path / "run", recorded.run(3, ends_at=time.time())))
    page = browse(peer)
    press = lambda name: page.get_by_role("button", name=name, exact=True).click()  # noqa: E731
    press("Pause")
    expect(page.get_by_role("alert")).to_have_text("It does not run. start it")
    press("Finish…")
    assert not complaints(page)
    press("Cancel")
    press("Finish…")
    press("Finish")
    assert peer.wait_for("finish", timeout=5)["wanted"] == {}
    press("Close")
    press("Invite…")
    page.locator("#role").select_option("look on only")
    expect(page.get_by_label("for one peer only")).to_be_disabled()
    press("Make a line")
    assert peer.wait_for("invite", timeout=5)["wanted"] == {"watch": True, "once": False, "hours": 24}
    expect(page.get_by_label("The line to send")).to_have_value("trahiv join --peer trahiv1-secret")
    assert not complaints(page)
    assert [event["event"] for event in peer.events] == ["watching", "finish", "invite"]


def test_recording_plays_back_any_moment(workplace, browse, tmp_path):
    ends_at = time.time() - 3600
    mine = recorded.write(tmp_path / "mine", recorded.run(20, ends_at))
    ready = recorded.ready(ends_at - 400) | {"peer_id": FIRST}
    warning = recorded.event(
        ends_at - 100, "warning", code="x", message="The disk is full.", hint="free some"
    )
    theirs = recorded.write(tmp_path / "theirs", [ready, warning])
    peer = workplace.start("replay", mine, theirs, is_cold=True)
    peer.wait_for("watching", timeout=30)
    page = browse(peer)
    expect(page.locator("h1")).to_contain_text("step 20 of 1,000")
    expect(page.locator("#notices")).to_contain_text(re.compile("theirs.*The disk is full", re.DOTALL))
    expect(page.locator("#people")).to_contain_text("theirs")
    assert not complaints(page)
    page.get_by_role("slider", name="Time").focus()
    page.keyboard.press("Home")
    expect(page.locator("h1")).to_have_text("Waiting for the first word of this run.")
    page.get_by_label("Speed").select_option("100×")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("h1")).to_contain_text("step 20 of 1,000", timeout=6 * MOMENT)
    expect(page.get_by_role("button", name="Play")).to_be_visible()


@pytest.mark.swarm
@pytest.mark.story
def test_training_peer_appears_within_seconds(start, watch, browse, tmp_path):
    data = {"datasets": [{"path": "builtin/trahiv"}]}
    recipe = write_tiny(tmp_path, data=data, training__max_steps=100_000)
    peer = start("init", recipe, "--output-dir", "run", pace_s=0.3)
    ready, step = peer.wait_for("ready", timeout=90), peer.wait_for("step", timeout=90)
    server = watch("run")
    began = time.monotonic()
    page = browse(server)
    expect(page.locator("h1")).to_contain_text("Training alone, step", timeout=3 * MOMENT)
    print(f"first state after {time.monotonic() - began:.2f} s")
    expect(page.locator("#people bdi")).to_have_text(f"…{ready['peer_id'][-6:]}")

    def shown() -> int:
        figures = page.locator("#figures dd").first.text_content()
        return int(figures.replace(",", ""))

    late = []
    for number in range(shown() + 1, shown() + 6):
        step = peer.wait_for("step", timeout=60, step=lambda one, number=number: one >= number)
        wait_until(lambda step=step: shown() >= step["step"], seconds=10)
        late.append(time.time() - step["t"])
    print("shown after", [f"{one:.2f} s" for one in late])
    assert min(late) < 1

    page.get_by_role("button", name="Invite…").click()
    page.get_by_role("button", name="Make a line").click()
    line = page.get_by_label("The line to send")
    expect(line).to_have_value(re.compile("^trahiv join --peer trahiv"), timeout=30_000)
    page.get_by_role("button", name="Close").click()

    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#said")).to_have_text("Paused", timeout=30_000)
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#said")).to_have_text("Training alone", timeout=30_000)
    page.get_by_role("button", name="Finish…").click()
    page.get_by_role("button", name="Finish", exact=True).click()
    expect(page.locator("#said")).to_have_text("Stopped", timeout=30_000)
    assert peer.exit_code(timeout=30) == 0


@pytest.mark.swarm
@pytest.mark.story
def test_page_shows_return_of_killed_peer(start, watch, browse, tmp_path):
    opt = {"target_batch_size": 24, "tracker_opts": {"metadata_expiration": 8.0}}
    data = {"datasets": [{"path": "builtin/trahiv"}]}
    recipe = write_tiny(tmp_path, data=data, training__max_steps=100_000, hivemind_config__opt=opt)

    def begin(name, *words):
        return start(*words, "--output-dir", name, "--name", f"{name}'s box", *LOOPBACK, pace_s=0.2)

    ann = begin("Ann", "init", recipe)
    begin("Bob", "join", "--peer", ann.address, "--yes")
    cem = begin("Cem", "join", "--peer", ann.address, "--yes")
    ann.wait_for_group(3)
    page = browse(watch("Ann"))
    people, peers = (
        page.locator("#people"),
        page.locator("#figures div", has_text="Peers").locator("dd").first,
    )
    for name in ("Ann", "Bob", "Cem"):  # each is known by its status, which is read every 15 s
        expect(people).to_contain_text(f"{name}'s box", timeout=60_000)
    expect(page.locator("h1")).to_contain_text("Training")
    cem.kill()
    expect(peers).to_have_text("2", timeout=60_000)
    expect(page.locator("#legend")).to_contain_text("left")
    begin("Cem", "join", "--peer", ann.address, "--yes").wait_for_group(3)
    expect(peers).to_have_text("3", timeout=60_000)
    expect(people.locator("tr")).to_have_count(3)


def test_page_is_packaged_with_licence():
    page = Path(__import__("trahiv_cli").__file__).parent / "watch" / "page"
    assert "MIT" in (page / "uplot" / "LICENSE").read_text()
    html = (page / "index.html").read_text()
    for script in page.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", script.read_text())
    assert not re.search(r"https?://|style=|onclick", html)
