"""The commands of the README and the pages, by real processes, as `documented_commands.txt` lists them.

Commands that need no process of their own are in `tests/unit/cli/test_documented.py`.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import LOOPBACK, wait_until
from tests.kit.documented import ROOT, Script, blocks, looks_like, shown_in
from tests.kit.recipes import HUGE, write_tiny
from tests.kit.stand_ins import CHATML_MARKED, write_llama

pytestmark = pytest.mark.timeout(400)

FIRST = ROOT / "docs/first-recipe.md"
AS_A_PERSON = ("--format", "human")
PACE_S = 0.15  # as a larger model would take for a batch, so that there is time to look at the run
LEISURELY_S = 2.0  # for peers that only have to be there: they leave the cores to the commands

LOCAL = "{host_maddrs: [/ip4/127.0.0.1/tcp/0], nat_port_map: false, auto_nat: false}"


@pytest.fixture
def cached(workplace):
    """A small model in the hub's cache, under the name of the model that the page trains."""
    home = Path(workplace.environment()["HOME"])
    model = home / ".cache/huggingface/hub/models--Qwen--Qwen3-0.6B-Base"
    write_llama(model / "snapshots/1", chat_template=CHATML_MARKED)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("1")
    yield
    shutil.rmtree(model)


@pytest.fixture
def homes(tmp_path):
    """Alice's and Bob's folders with the files that the page on the first recipe has them save."""
    alice, bob = tmp_path / "alice", tmp_path / "bob"
    [chats], [recipe, *_], [talk] = (blocks(FIRST, language) for language in ("json", "yaml", "python"))
    for home in (alice, bob):
        home.mkdir()
        (home / "chats.jsonl").write_text(chats)
    for shown, used in {
        "learning_rate: 2e-4": "learning_rate: 1e-2",
        "hivemind_config:\n": f"hivemind_config:\n  dht: {LOCAL}\n",
    }.items():
        assert shown in recipe
        recipe = recipe.replace(shown, used)
    (alice / "parrot.yaml").write_text(recipe)
    (alice / "talk.py").write_text(talk)
    return alice, bob


def require_stops(page):
    page.press_ctrl_c()
    assert page.exit_code(10) == 0


@pytest.mark.usefixtures("cached")
def test_first_recipe_page_works_as_shown(workplace, homes):
    alice, bob = homes
    shown = {one.line: one.output for one in shown_in(FIRST)}
    script = Script("first recipe")

    def finished(line):
        peer = workplace.start(*script.words(line), *AS_A_PERSON, cwd=alice)
        assert peer.exit_code(60) == 0, peer.err
        assert looks_like(peer.out, shown[line]), peer.out

    finished("trahiv check parrot.yaml")
    finished("trahiv preview parrot.yaml -n 1")
    init, join = "trahiv init parrot.yaml", "trahiv join --peer trahiv1:... --files ."
    narrow = {"COLUMNS": "40"}  # too narrow for the live view: a person gets plain lines
    first = workplace.start(*script.words(init), *AS_A_PERSON, cwd=alice, env=narrow, pace_s=PACE_S)
    wait_until(lambda: "To join, type on another machine:" in first.out, 60)
    invitation = first.out.partition("trahiv join --peer ")[2].split()[0]
    words = script.words(join, **{"trahiv1:...": invitation})
    second = workplace.start(*words, *LOOPBACK, "--format", "plain", cwd=bob, pace_s=PACE_S)
    wait_until(lambda: "round of 2" in first.out, 90)
    finished("trahiv status")
    page = workplace.start(*script.words("trahiv watch"), "--no-browser", *AS_A_PERSON, cwd=alice)
    wait_until(lambda: "http://127.0.0.1:" in page.out, 30)
    require_stops(page)
    assert (first.exit_code(120), second.exit_code(30)) == (0, 0), first.err + second.err
    assert looks_like(first.out, shown[init])
    assert looks_like(second.err + second.out, shown[join])
    one, two = (next(home.glob("runs/*/final/adapter_model.safetensors")) for home in homes)
    assert one.read_bytes() == two.read_bytes()

    for line in ("ls runs/*/final", '"$(uv tool dir)/trahiv/bin/python" talk.py'):
        script.words(line)
        command = line.replace('"$(uv tool dir)/trahiv/bin/python"', sys.executable)
        options = {"shell": True, "text": True, "cwd": alice, "env": workplace.environment()}
        assert looks_like(subprocess.check_output(command, **options), shown[line])
    assert not script.left


class Swarm:
    """Alice's swarm, which trains the quickstart, and the lines of the pages that are typed in it."""

    def __init__(self, workplace):
        self.place, self.here = workplace, workplace.folder
        self.script = Script("swarm")
        self.shown = {one.line: one.output for one in shown_in(ROOT / "docs/exit-codes.md")}
        words = self.script.words("trahiv init quickstart")
        self.alice = workplace.start(*words, "--set", f"hivemind_config.dht={LOCAL}", pace_s=LEISURELY_S)
        ready = self.alice.wait_for("ready", 90)
        self.run_id, self.own = ready["run_id"], Path("runs", ready["run_id"])
        self.invitation = (self.here / ready["invitation"]).read_text().strip()
        self.homes = {name: self.here / name for name in ("bob", "carol", "dave")}
        for home in (self.here, *self.homes.values()):
            home.mkdir(exist_ok=True)
            (home / "friends-invitation").write_text(self.invitation)
            (home / "friends-invitation").chmod(0o600)

    def words(self, line, **replaced):
        """Take a line from the script, with the swarm's invitation filled in."""
        given = dict.fromkeys(("LINE", "trahiv1:..."), self.invitation)
        return self.script.words(line, **given, **replaced)

    def run(self, line, *more, code=0, shows=False, **replaced):
        """Run a line of the pages to its end, with this exit code and, if it `shows`, the page's output."""
        return self.require(self.place.run(*self.words(line, **replaced), *more), code, line if shows else "")

    def require(self, peer, code, line=""):
        """Require an exit code of a peer, and the output that a page shows below a line."""
        ended = peer.exit_code(60)
        said = peer.out + peer.err  # an error comes last
        assert ended == code, said
        assert "Traceback" not in said, said
        assert not line or looks_like(said, self.shown[line]), said
        return said

    def join(self, line, who, *more):
        """Start a peer in its own folder by a line of the pages."""
        words = *self.words(line), *LOOPBACK, *more, "--format", "plain"
        return self.place.start(*words, cwd=self.homes[who], pace_s=LEISURELY_S)

    def look(self, line, **replaced):
        """Open a page until it has printed its address."""
        page = self.place.start(*self.words(line, **replaced), "--no-browser")
        page.wait_for("watching", 30)
        require_stops(page)


def test_documented_commands_work_as_shown(workplace):
    swarm = Swarm(workplace)
    write_tiny(swarm.here, "recipe.yaml")
    write_tiny(swarm.here, "huge.yaml", model__config=HUGE)
    by_line, as_guest = "trahiv join --peer trahiv1:...", "trahiv join --peer @friends-invitation"
    bob = swarm.join(by_line, "bob", "--yes")
    dave = swarm.join('trahiv join LINE --only-when idle --only-when "not dota2"', "dave")
    swarm.run("trahiv init huge.yaml", code=6, shows=True)
    wait_until(lambda: "round of" in bob.out, 120)
    wait_until(lambda: re.search("joined at|paused at", dave.out) is not None, 120)
    dave.press_ctrl_c()
    swarm.require(dave, 130)
    carol = swarm.join(f"{as_guest} --yes", "carol")

    run_dir = {"runs/tiny": str(swarm.own), "runs/quickstart-4f0c1d2e": str(swarm.own)}
    swarm.run("trahiv doctor", *LOOPBACK)
    swarm.run("trahiv doctor --peer LINE", *LOOPBACK)
    swarm.run("trahiv doctor recipe.yaml --peer LINE", *LOOPBACK)
    swarm.look("trahiv watch runs/tiny", **run_dir)
    swarm.look("trahiv watch --peer LINE")
    words = swarm.words("TRAHIV_PEER=trahiv1:... trahiv join")
    guest = swarm.place.start(*words, "--dry-run", "--format", "plain", env={"TRAHIV_PEER": swarm.invitation})
    assert swarm.run_id in swarm.require(guest, 0)
    taken = "trahiv init quickstart --output-dir runs/quickstart-4f0c1d2e"
    swarm.run(taken, code=3, shows=True, **run_dir)
    other = "trahiv join quickstart --set training.learning_rate=0.5 --peer @friends-invitation"
    swarm.run(other, code=5, shows=True)
    wait_until(lambda: "joined at" in carol.out, 120)
    wait_until(lambda: swarm.run("trahiv members").count("  there") >= 3, 60)
    for line in ("trahiv invite", "trahiv invite --expires 2d", "trahiv invite --watch"):
        assert "trahiv join --peer" in swarm.run(line)
    [made] = re.findall(r"invitations/(\w+)", swarm.run("trahiv invite --once"))
    swarm.run("trahiv invite --close ID", ID=made)
    swarm.run("trahiv invite --close all")
    [carol_id] = re.findall(r", peer (Qm\w+)", carol.out)
    assert carol_id in swarm.run("trahiv kick PEER", PEER=carol_id[-6:])
    swarm.require(carol, 5, f"{as_guest} --yes")
    for name, said in (("pause", "paused at step"), ("resume", "goes on"), ("finish", "done at step")):
        assert said in swarm.run(f"trahiv {name}", shows=name == "finish")
    swarm.require(swarm.alice, 0)
    bob.press_ctrl_c()
    swarm.require(bob, 130, by_line)
    swarm.look("trahiv replay runs/a runs/b", **{"runs/a": str(swarm.own), "runs/b": f"bob/{swarm.own}"})
    swarm.run("trahiv report")
    swarm.run(as_guest, code=4, shows=True)
    assert not swarm.script.left
