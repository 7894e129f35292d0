"""Invitations that were pasted, and those on a command line, which every user of the machine can read."""

import os
import sys

import pytest

from trahiv_cli.cli.options import PEER_VARIABLE, hide_invitations, taken_peers
from trahiv_cli.recipe.pasted import invitation_of, peers_in

ONE = invitation_of(b"\xef\xbe\xfb" * 12)  # "----" almost wherever it is wrapped
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmXk"
LINE = f"trahiv join --peer {ONE}"
AROUND = ("  {}\n", '"{}"', "“{}”", "<{}>", "\ufeff{}\u200b", "({}), please", "«\u00a0{}\u00a0»", "Come: {}.")
PYTHON = ["python", "-X", "dev", "-m", "trahiv_cli"]


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        *((form.format(text), [ONE]) for form in AROUND for text in (ONE, LINE, f"trahiv join —peer {ONE}")),
        ("trahiv1:\nmR0kZpKS", ["trahiv1:mR0kZpKS"]),
        (f"{LINE} --yes --output-dir there", [ONE]),
        (f"{ONE} is what you need", [ONE]),
        (f"{LINE} --peer={ADDRESS}", [ONE, ADDRESS]),
        (f"{ONE} {ONE}x", [ONE, f"{ONE}x"]),
        (f"@/one/file {ONE} @two", ["@/one/file", ONE, "@two"]),
        *((text, []) for text in ("", "./recipes/p2p/recipe.yaml", "trahiv join --peer")),
        ("/home/ip4/recipe.yaml by me@example.org", []),
    ],
)
def test_invitations_are_found_in_pasted_text(text, peers):
    assert peers_in(text) == peers


@pytest.mark.parametrize("gap", [" ", "\n", "\n> ", "\r\n  ", "\u200b"])
def test_wrapped_invitation_is_read(gap):
    for at in range(LINE.index(":") + 1, len(LINE)):
        assert peers_in(f"{LINE[:at]}{gap}{LINE[at : at + 9]}{gap}{LINE[at + 9 :]}{gap}--yes") == [ONE]


@pytest.fixture
def typed(monkeypatch):
    """`typed("join", ...)`: the arguments that this process keeps, and the command that would replace it."""
    monkeypatch.setenv(PEER_VARIABLE, "")

    def typed(*words):
        begun = []
        monkeypatch.setattr(os, "execv", lambda path, command: begun.append((path, command)))
        monkeypatch.setattr(sys, "argv", ["trahiv", *words])
        monkeypatch.setattr(sys, "orig_argv", [*PYTHON, *words])
        hide_invitations()
        return sys.argv[1:], begun

    return typed


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["join", "--peer", ONE], ["join"]),
        (["join", f"--peer={ONE}"], ["join"]),
        (["join", "--yes", ONE], ["join", "--yes"]),
        (["join", ONE, "recipe.yaml"], ["join", "recipe.yaml"]),
        (["join", "--peer", f"trahiv join --peer {ONE}", "--yes"], ["join", "--yes"]),
        (["join", "trahiv", "join", "--peer", ONE], ["join"]),
        ([f"trahiv join --peer {ONE}"], ["join"]),
        ([ONE], ["join"]),
        (["join", "—peer", ONE], ["join"]),
        (["join", "--peer", ADDRESS, f"--peer={ONE}"], ["join", "--peer", ADDRESS]),
        *(([name, "--peer", ONE], [name]) for name in ("members", "status", "doctor", "watch")),
    ],
)
def test_invitation_moves_into_environment(typed, monkeypatch, words, meant):
    monkeypatch.setenv(PEER_VARIABLE, "trahiv join --peer trahiv1:xyz")
    assert typed(*words) == (meant, [(sys.executable, [*PYTHON, *meant])])
    assert taken_peers() == ["trahiv1:xyz", ONE], "what was there before stays"
    assert taken_peers() == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        *((words, words) for words in (["join", "--peer", ADDRESS, "--peer", "@file"], ["join", "--peer"])),
        *((words, words) for words in (["--help"], [], ["join", "trahiv"])),
        (["trahiv", "init", "quickstart"], ["init", "quickstart"]),
        (["join", "trahiv", "join", "--peer", ADDRESS], ["join", "--peer", ADDRESS]),
        # A command that takes no invitation must not repeat it.
        (["kick", "--peer", ONE, f"in {ONE}."], ["kick", "--peer", "trahiv1:...", "in trahiv1:...."]),
    ],
)
def test_other_command_lines_stay_in_process(typed, words, meant):
    assert typed(*words) == (meant, [])
