"""The page, as a person sees it: Chromium before a real `trahiv watch`."""

import json
import os
import re
import signal
import time
from urllib.parse import urlsplit

import pytest

from tests.kit.commands import LOOPBACK, ROOT, wait_until
from tests.kit.recipes import write_tiny
from tests.web.recorded import FIRST, OWN, SECOND, event, joined, ready, run, step, write

pytest.importorskip("playwright", reason="playwright is not installed")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import expect  # noqa: E402

REWRITE = "TRAHIV_REWRITE"
"""Set to 1 to make the pictures of the docs anew."""

PAGE = ROOT / "trahiv_cli" / "watch" / "page"

MOMENT = 5_000  # milliseconds, in which a busy machine shows a change


def see(page, place, text, timeout=MOMENT):
    expect(page.locator(place)).to_contain_text(text, timeout=timeout)


def read(page, place, text, timeout=MOMENT):
    expect(page.locator(place)).to_have_text(text, timeout=timeout)


def count(page, place, number):
    expect(page.locator(place)).to_have_count(number)


def hear_chart(page, text):
    """The chart's words for a screen reader."""
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile(text))


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def require_readable(page):
    """Check that the page is no wider than its window, and that Axe has no complaint."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert Axe().run(page).response["violations"] == []


@pytest.fixture
def trained(tmp_path):
    """The folder of a run that has just taken three steps."""
    return write(tmp_path / "run", run(3, ends_at=time.time()))


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
    peer = serve(SWARM, write(tmp_path / "run", run(412, ends_at=now - 5)), now)
    for width in (1920, 360, 1100):
        page = browse(peer, width, scheme)
        for place, text in {
            "h1": "Training, step 412 of 1,000; the last round was",
            "h1 > #rest": re.compile(r"done (to|on ).* about \d\d:\d\d"),
            "#people tr:first-child": "Anathis machine",
            "#pays": "Samples given",
            "#now": "junto a la puerta de la cocina",
            "#then": "ado ,, la la",
            "#notices": re.compile(
                "The round for step 310 failed.*nothing to do, unless it repeats", re.DOTALL
            ),
        }.items():
            see(page, place, text)
        expect(page).to_have_title("412/1,000 · Training · spanish-qlora-958ba95d")
        hear_chart(page, "Loss over 412 steps: 1")
        for rows, number in {"#people tr": 3, "#rounds tr": 50, "#deeds button": 0}.items():
            count(page, rows, number)
        require_readable(page)
    picture = ROOT / "docs" / f"watch_{scheme}.png"
    if os.environ.get(REWRITE):
        page.screenshot(path=picture)
    assert picture.stat().st_size < 150_000


def test_events_are_shown_live_and_after_reload(watch, browse, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    page = browse(watch(folder))
    read(page, "h1", "Waiting for the first word of this run.")
    now = time.time()
    group = [OWN, FIRST]
    for phase, news in (
        ("Loading the model", ready(now)),
        ("Training alone, step 0 of 1,000", joined(now, 0)),
        ("Training alone, step 1 of 1,000", step(now, 1, 2.5)),
        (
            "Waiting for another peer",
            event(now, "waiting", what="another peer", seconds=5.0, until_seconds=60.0),
        ),
        ("Training, step 2", step(now, 2, 2.4, group)),
        ("Paused, step 2 of 1,000: a game runs", event(now, "paused", step=2, why="a game runs")),
        ("Loading the model", event(now, "resumed", step=2)),
        ("Training, step 3", step(now, 3, 2.4, group)),
        ("Stopped, step 2", event(now, "done", step=2, path=None, reason="signal", had_ended=False)),
        ("Loading the model", ready(now)),
        ("Training alone, step 1", joined(now, 1)),
        ("Training, step 2", step(now, 2, 2.3, group)),
        (
            "Stopped by an error, step 2 of 1,000: It does not fit.",
            event(now, "error", message="It does not fit.", hint="a smaller batch"),
        ),
    ):
        write(folder, [news])
        see(page, "h1", phase)
    page.reload()
    see(page, "h1", "It does not fit.")
    count(page, "#rounds tr", 3)
    see(page, "#notices li:first-child", "a smaller batch")
    hear_chart(page, "Loss over 2 steps: 2.300 now")


def test_rewards_are_charted_instead_of_loss(watch, browse, tmp_path):
    now = time.time()
    steps = [step(now, number, 0.0) | {"reward": number / 4} for number in (1, 2, 3)]
    held = event(now, "eval", step=3, eval_loss=0.0, eval_reward=0.625)
    page = browse(watch(write(tmp_path / "run", [ready(now), joined(now, 0), *steps, held])))
    hear_chart(page, "Reward over 3 steps: 0.750 now, 0.750 at its highest")
    see(page, "#h-curve", "Reward")
    see(page, "#figures", "held-out 0.625")


def test_page_reconnects_to_restarted_server(watch, browse, tmp_path):
    folder = write(tmp_path / "run", run(30, ends_at=time.time()))
    peer = watch(folder)
    page = browse(peer)
    read(page, "#said", "Training")
    rounds = page.locator("#rounds tr").count()
    peer.kill()
    see(page, "h1", "Disconnected: `trahiv watch` does not run.")
    count(page, "#rounds tr", rounds)
    write(folder, [step(time.time(), 31, 1.5, [OWN, SECOND])])
    watch(folder, "--port", urlsplit(peer.events[0]["url"]).port)
    see(page, "h1", "step 31 of", 3 * MOMENT)
    count(page, "#rounds tr", rounds + 1)


def test_browser_opens_private_file(workplace, browse, trained, tmp_path):
    browser = tmp_path / "browser"
    opened = tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o700)
    peer = workplace.start("watch", trained, is_cold=True, env={"BROWSER": f"{browser} %s", "DISPLAY": ":0"})
    way_in = trained / "watch.html"
    wait_until(lambda: opened.exists() and opened.read_text() == way_in.as_uri())
    assert way_in.stat().st_mode & 0o777 == 0o600
    see(browse(peer, url=way_in.as_uri()), "h1", "Training, step 3")
    peer.send_signal(signal.SIGINT)
    wait_until(lambda: not way_in.exists())


def test_long_run_opens_whole(watch, browse, tmp_path):
    events = [*run(20_000, ends_at=time.time(), max_steps=30_000)]
    write(tmp_path / "run", events[:9_000], "events.jsonl.1")
    page = browse(watch(write(tmp_path / "run", events[9_000:])))
    see(page, "h1", "step 20,000 of 30,000", 2 * MOMENT)
    hear_chart(page, "Loss over 20,000 steps")
    page.locator("#range").select_option("100 steps")
    see(page, "#pays", "of the swarm's")


FROM_FILE = """
import json
from trahiv_cli.errors import Unreachable

def look():
    there = json.loads(Path(sys.argv[1]).read_text())
    if not there:
        raise Unreachable("No peer answered.", hint="try again")
    return recorded.event(float(sys.argv[2]), "peers", run_id="tiny-1", peers=[
        dict(peer_id=name * 9, name=name, version="0.1.0", device="CPU", memory_gib=8.0, step=5, max_steps=10,
             loss=2.5, samples=9, tokens=90, samples_per_second=2.0, reached="direct", since=0.0,
             round_at=0.0, round_peers=0, round_seconds=0.0,
             trouble="", waits_for="", state="training") for name in there])

page = Page(Nothing, "token", lookout=Lookout(look, every_s=0.1))
"""


def test_swarm_is_shown_from_peer_reports(serve, browse, tmp_path):
    there = tmp_path / "there.json"
    there.write_text("[]")
    page = browse(serve(FROM_FILE, there, time.time()))
    read(page, "h1", "The swarm does not answer: No peer answered.")
    see(page, "#trouble", "try again")
    for names in (["Ana", "bruno"], ["Ana"], ["Ana", "bruno", "Clara"]):
        aside = tmp_path / "aside.json"
        aside.write_text(json.dumps(names))
        aside.rename(there)
        count(page, "#people tr:not(.away)", len(names))
        see(page, "h1", "step 5 of 10")
        expect(page.locator("#trouble")).to_be_hidden()
        if names == ["Ana"]:
            see(page, "#people tr.away", "brunogone since")
    see(page, "#legend", "joined")
    hear_chart(page, "2.500 now")


HOSTILE = """
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
page = Page(Nothing, "token", lookout=Lookout(look, every_s=0.2), deeds=deeds)
"""


@pytest.mark.parametrize("width", [360, 1920])
def test_strangers_text_is_never_markup(serve, browse, width):
    page = browse(serve(HOSTILE), width)
    count(page, "#people tr", 50)
    first, *names = page.locator("#people bdi").all_inner_texts()
    assert first.startswith("<img src=x onerror")
    assert names[:2] == ["�gnihton si siht�", "x" * 39 + "…"]
    assert "\U0001f469\u200d\U0001f4bb" in names[2]
    assert names[3] == "a�[31m�b c"
    assert page.locator("img, main script, #people b").count() == 0
    require_readable(page)


def test_row_keeps_focus_while_numbers_change(serve, browse):
    page = browse(serve(HOSTILE), 1920)
    count(page, "#people tr", 50)
    rows = page.locator("#people tr")
    button = rows.first.get_by_role("button")
    button.focus()
    speed = rows.nth(9).locator("td").nth(4)
    expect(speed).not_to_have_text(speed.text_content())
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    see(page, "#dialog-title", "Remove <img src=x")
    page.locator("#dialog-do").click()
    read(page, "#dialog-answer", json.dumps({"peer": f"Qm0{'Y' * 44}"}))


def test_run_messages_are_never_markup(watch, browse, tmp_path):
    now = time.time()
    markup = "<img src=x onerror=alert(1)>"
    texts = [markup, "\u202ethgir", "word " * 2000, "x" * 10_000, "a\u0000b"]
    story = [ready(now) | {"run_id": markup * 9}, joined(now, 0), event(now, "constructor", step=1)]
    for number, text in enumerate(texts, 1):
        story.append(event(now, "warning", code=text, message=text, hint=text))
        story.append(event(now, "sample", step=number, prompt=text, text=text))
        taken = step(now, number, 2.0, [OWN, FIRST])
        taken["round"] |= {"left_out": {FIRST: text}, "reason": text}
        story.append(taken)
    page = browse(watch(write(tmp_path / "run", story)), 360)
    for rows in ("#notices li.warning", "#rounds tr"):
        count(page, rows, len(texts))
    read(page, "#now", "a�b")
    assert page.locator("img").count() == 0
    require_readable(page)


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


@pytest.fixture
def peer(serve, trained):
    """A process whose page has buttons."""
    return serve(DEEDS, trained)


@pytest.fixture
def page(browse, peer):
    return browse(peer)


def test_refused_button_shows_reason(page):
    press(page, "Pause")
    expect(page.get_by_role("alert")).to_have_text("It does not run. start it")


def test_finish_asks_first(peer, page):
    press(page, "Finish…")
    require_readable(page)
    press(page, "Cancel")
    press(page, "Finish…")
    press(page, "Finish")
    assert peer.wait_for("finish", timeout=5)["wanted"] == {}
    press(page, "Close")
    assert len(peer.events) == 2


def test_invitation_has_chosen_terms(peer, page):
    press(page, "Invite…")
    page.locator("#role").select_option("look on only")
    expect(page.get_by_label("for one peer only")).to_be_disabled()
    press(page, "Make a line")
    assert peer.wait_for("invite", timeout=5)["wanted"] == {"watch": True, "once": False, "hours": 24}
    expect(page.get_by_label("The line to send")).to_have_value("trahiv join --peer trahiv1-secret")
    require_readable(page)


def test_recording_plays_back_any_moment(workplace, browse, tmp_path):
    ends_at = time.time() - 3600
    mine = write(tmp_path / "mine", run(20, ends_at))
    full = event(ends_at - 100, "warning", code="x", message="The disk is full.", hint="free some")
    theirs = write(tmp_path / "theirs", [ready(ends_at - 400) | {"peer_id": FIRST}, full])
    peer = workplace.start("replay", mine, theirs, is_cold=True)
    peer.wait_for("watching", timeout=30)
    page = browse(peer)
    see(page, "h1", "step 20 of 1,000")
    see(page, "#notices", re.compile("theirs.*The disk is full", re.DOTALL))
    see(page, "#people", "theirs")
    require_readable(page)
    page.get_by_role("slider", name="Time").focus()
    page.keyboard.press("Home")
    read(page, "h1", "Waiting for the first word of this run.")
    page.get_by_label("Speed").select_option("100×")
    press(page, "Play")
    see(page, "h1", "step 20 of 1,000", 6 * MOMENT)
    expect(page.get_by_role("button", name="Play")).to_be_visible()


@pytest.mark.swarm
@pytest.mark.story
def test_training_peer_appears_within_seconds(workplace, watch, browse, tmp_path):
    recipe = write_tiny(tmp_path, training__max_steps=100_000)
    peer = workplace.start("init", recipe, "--output-dir", "run", pace_s=0.3)
    ready = peer.wait_for("ready", timeout=90)
    peer.wait_for("step", timeout=90)
    page = browse(watch("run"))
    see(page, "h1", "Training alone, step", 3 * MOMENT)
    read(page, "#people bdi", f"…{ready['peer_id'][-6:]}")

    def shown():
        return int(page.locator("#figures dd").first.text_content())

    late = []
    for number in range(shown() + 1, shown() + 6):
        taken = peer.wait_for("step", timeout=60, step=number)
        wait_until(lambda number=number: shown() >= number, seconds=10)
        late.append(time.time() - taken["t"])
    assert min(late) < 1

    press(page, "Invite…")
    press(page, "Make a line")
    line = page.get_by_label("The line to send")
    expect(line).to_have_value(re.compile("^trahiv join --peer trahiv"), timeout=30_000)
    press(page, "Close")
    for button, state in (("Pause", "Paused"), ("Resume", "Training alone"), ("Finish…", "Stopped")):
        press(page, button)
        if button == "Finish…":
            press(page, "Finish")
        read(page, "#said", state, 30_000)
    assert peer.exit_code(timeout=30) == 0


@pytest.mark.swarm
@pytest.mark.story
def test_page_shows_return_of_killed_peer(workplace, watch, browse, tmp_path):
    opt = {"target_batch_size": 24, "tracker_opts": {"metadata_expiration": 8.0}}
    recipe = write_tiny(tmp_path, training__max_steps=100_000, hivemind_config__opt=opt)

    def begin(name, *words):
        return workplace.start(*words, "--output-dir", name, "--name", f"{name}'s box", *LOOPBACK, pace_s=0.2)

    ann = begin("Ann", "init", recipe)
    join = ("join", recipe, "--peer", ann.address, "--yes")
    begin("Bob", *join)
    cem = begin("Cem", *join)
    ann.wait_for_group(3)
    page = browse(watch("Ann"))
    for name in ("Ann", "Bob", "Cem"):  # each is known by its status, which is read every 15 s
        see(page, "#people", f"{name}'s box", 60_000)
    see(page, "h1", "Training")
    cem.kill()
    peers = page.locator("#figures div", has_text="Peers").locator("dd").first
    expect(peers).to_have_text("2", timeout=60_000)
    see(page, "#legend", "left")
    begin("Cem", *join).wait_for_group(3)
    expect(peers).to_have_text("3", timeout=60_000)
    count(page, "#people tr", 3)


def test_chart_library_has_its_licence():
    assert "MIT" in (PAGE / "uplot" / "LICENSE").read_text()


def test_scripts_make_no_markup():
    code = "".join(script.read_text() for script in PAGE.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", code)


def test_page_loads_nothing_from_elsewhere():
    assert not re.search(r"https?://|style=|onclick", (PAGE / "index.html").read_text())
