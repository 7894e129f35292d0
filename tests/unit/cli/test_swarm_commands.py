"""What `init` and `join` say of words that they can't use, before anything starts."""

import json
import re
import sys

import pytest

from tests.kit.recipes import write_tiny
from trahiv_cli.cli import swarm

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
JOIN = ("join", "--peer", ADDRESS)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of its own, in which nothing may be started."""

    def live(*_):
        raise AssertionError("a peer would have been started")

    monkeypatch.setattr(swarm, "live", live)
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left(here, tmp_path):
    before = set(tmp_path.iterdir())
    yield
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init", "--bogus"), "No such option: --bogus"),
        (("join",), "--peer: paste the line that `trahiv init` printed"),
        (("join", "tiny.yaml"), "--peer: paste the line that `trahiv init` printed"),
        (("init", "--dry-run"), "name the recipe whose run would be shown"),
        (("init", "--no-train", "--budget", "5 steps"), "--budget: a peer that does not train takes a time"),
        (("init", "tiny.yaml", "--budget", "soon"), "'--budget': 'soon' is neither a time (2h, 1h30m, 2d)"),
        *(
            (("init", "tiny.yaml", "--wait", text), f"'--wait': {text!r} is not a time; write one like 10m")
            for text in ("5 steps", "", "0s")
        ),
        *(
            (
                (*command, option, "127.0.0.1:80"),
                f"'{option}': '127.0.0.1:80' is not a multiaddr; write one like",
            )
            for option in ("--host-maddr", "--announce-maddr")
            for command in (("init", "quickstart"), JOIN)
        ),
        (("invite", "--watch", "--once"), "--once: who watches leaves no trace: give a time, --expires 1d"),
    ],
)
def test_words_that_make_no_sense_are_a_usage_error(trahiv, words, said):
    code, out, err = trahiv(*words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


@pytest.mark.parametrize("answer", ["n", "", "what?"])
def test_init_without_a_recipe_says_what_it_would_do_and_asks(trahiv, monkeypatch, answer):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer + "\n", raising=False)
    code, out, err = trahiv("init")
    assert (code, out) == (0, "")
    assert "starts a bootstrap node: others can join through it, but it trains nothing" in err
    assert "trahiv init quickstart" in err and err.endswith("Start a bootstrap node? [y/N] ")


def test_help_has_whole_lines_in_80_columns_and_is_asked_for_by_h_too(trahiv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = trahiv("--help")
    commands = out.partition("Commands:\n")[2].splitlines()
    assert code == 0 and all(line.endswith(".") and not line.endswith("...") for line in commands)
    assert max(map(len, commands)) <= 80
    for command in commands:
        code, out, _ = trahiv(command.split()[0], "-h")
        assert code == 0 and out.startswith(f"Usage: trahiv {command.split()[0]} ")


@pytest.mark.parametrize("command", [("init",), JOIN], ids=["init", "join"])
def test_a_recipe_that_is_wrong_or_not_there_is_said(trahiv, tmp_path, command):
    code, out, err = trahiv(*command, "tinny.yaml")
    assert (code, out) == (2, "")
    assert re.search("^error: there is no recipe 'tinny.yaml'\nhint: .*`tiny.yaml`", err)
    recipe = write_tiny(tmp_path, base_model="owner/model", sequence_len=512, training__num_epochs=3)
    code, out, err = trahiv(*command, recipe, "--format", "json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (2, "")
    assert {error["path"] for error in events} == {"base_model", "sequence_len", "training.num_epochs"}
    for error in events:
        assert (error["event"], error["v"], error["code"]) == ("error", 1, "recipe")
        assert error["file"] == str(recipe) and error["line"] > 0 and error["col"] > 0 and error["hint"]
