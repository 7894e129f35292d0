"""What `init` and `join` say of words that they can't use, before anything starts."""

import sys

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", ["banana", "500 samples", "", "0m"])
def test_a_wait_that_is_no_time_is_refused(trahiv, text):
    code, out, err = trahiv("init", "quickstart", "--wait", text)
    assert (code, out) == (2, "")
    assert f"--wait: {text!r} is not a time; write one like 10m or 2h" in " ".join(err.split())


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
