"""What `init` and `join` say of words that they can't use, before anything starts."""

import json
import re
import sys

import pytest

from tests.kit.recipes import write_tiny
from trahiv_cli.cli import swarm

STRANGER = "QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of its own, in which nothing may be started."""

    def live(*_):
        raise AssertionError("a peer would have been started")

    monkeypatch.setattr(swarm, "live", live)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["init", "join"])
def command(request):
    """The words before RECIPE, of each command that takes one."""
    return ("init",) if request.param == "init" else ("join", "--peer", ADDRESS)


def require_told(said, message, hint):
    """Check that there was one error with one hint, on stderr alone, and exit code 2."""
    code, out, err = said
    assert (code, out) == (2, ""), said
    (hinted,) = re.findall(r"^ *hint: .*", err, re.MULTILINE)
    assert len(re.findall("^error: ", err, re.MULTILINE)) == 1
    assert re.search(message, err), err
    assert re.search(hint, hinted), err


# -- options --------------------------------------------------------------------------------------


def test_an_option_that_does_not_exist_is_a_usage_error(trahiv, tmp_path):
    code, out, err = trahiv("init", "--bogus")
    assert (code, out) == (2, "")
    assert "No such option: --bogus" in err
    assert "trahiv init --help" in err
    assert list(tmp_path.iterdir()) == []


def test_join_without_a_peer_is_a_usage_error_that_says_what_to_paste(trahiv, tmp_path):
    for args in [(), (write_tiny(tmp_path),)]:
        code, out, err = trahiv("join", *args)
        assert (code, out) == (2, "")
        assert "--peer: paste the line that `trahiv init` printed" in " ".join(err.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "soon"), "--budget"),
        *(
            (("--wait", text), f"--wait: {text!r} is not a time; write one like 10m or 2h")
            for text in ("5 steps", "")
        ),
        (("--wait", "0s"), "--wait"),
    ],
)
def test_words_that_are_no_budget_or_time_are_a_usage_error(trahiv, tmp_path, words, said):
    code, out, err = trahiv("init", write_tiny(tmp_path), *words)
    assert (code, out, said in " ".join(err.split())) == (2, "", True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["--host-maddr", "--announce-maddr"])
@pytest.mark.parametrize("command", [("init", "quickstart"), ("join", "--peer", "/ip4/127.0.0.1/tcp/9")])
def test_an_address_that_is_none_is_refused_by_the_name_of_its_option(trahiv, tmp_path, command, option):
    code, out, err = trahiv(*command, option, "127.0.0.1:80")
    assert (code, out) == (2, "")
    said = " ".join(err.split())
    assert f"{option}: '127.0.0.1:80' is not a multiaddr; write one like /ip4/0.0.0.0/tcp/31337" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", ["n", "", "what?"])
def test_init_without_a_recipe_says_what_it_would_do_and_asks(trahiv, monkeypatch, tmp_path, answer):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer + "\n", raising=False)
    code, out, err = trahiv("init")
    assert (code, out) == (0, "")
    assert "starts a bootstrap node: others can join through it, but it trains nothing" in err
    assert "trahiv init quickstart" in err and err.endswith("Start a bootstrap node? [y/N] ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["init", "join", "new", "check", "show", "invite", "members", "kick"])
def test_h_is_help(trahiv, command):
    code, out, _ = trahiv(command, "-h")
    assert code == 0 and out.startswith(f"Usage: trahiv {command} ")


def test_no_line_of_the_help_is_cut_off_at_80_columns(trahiv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = trahiv("--help")
    commands = out.partition("Commands:\n")[2].splitlines()
    assert code == 0 and all(line.endswith(".") and not line.endswith("...") for line in commands)
    assert max(map(len, commands)) <= 80


# -- recipes --------------------------------------------------------------------------------------


def test_a_recipe_that_is_not_there_is_named_with_the_one_that_was_meant(trahiv, tmp_path, command):
    write_tiny(tmp_path)
    require_told(trahiv(*command, "tinny.yaml"), "there is no recipe 'tinny.yaml'", "`tiny.yaml`")
    assert not (tmp_path / "runs").exists()


def test_each_finding_is_one_json_event_and_stdout_has_nothing_else(trahiv, tmp_path, command):
    recipe = write_tiny(tmp_path, base_model="owner/model", sequence_len=512, training__num_epochs=3)
    code, out, err = trahiv(*command, recipe, "--format", "json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (2, "")
    assert {event["event"] for event in events} == {"error"}
    assert {error["path"] for error in events} == {"base_model", "sequence_len", "training.num_epochs"}
    for error in events:
        assert error["v"] == 1
        assert error["code"] == "recipe"
        assert error["file"] == str(recipe)
        assert error["line"] > 0
        assert error["col"] > 0
        assert error["hint"]
    assert not (tmp_path / "runs").exists()
