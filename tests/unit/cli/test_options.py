"""Invitations that were pasted, and those on a command line, which every user of the machine can read."""

import os
import shlex
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
    """`typed("join ...")`: the words that this process keeps, and the command that would replace it."""
    begun = []
    monkeypatch.setattr(os, "execv", lambda *command: begun.append(command))

    def typed(line):
        words = shlex.split(line)
        monkeypatch.setattr(sys, "argv", ["trahiv", *words])
        monkeypatch.setattr(sys, "orig_argv", [*PYTHON, *words])
        hide_invitations()
        return sys.argv[1:], begun

    return typed


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (f"join --peer {ONE}", "join"),
        (f"join --peer={ONE}", "join"),
        (f"join --yes {ONE}", "join --yes"),
        (f"join {ONE} recipe.yaml", "join recipe.yaml"),
        (f"join --peer '{LINE}' --yes", "join --yes"),
        (f"join {LINE}", "join"),
        (f"'{LINE}'", "join"),
        (ONE, "join"),
        (f"join —peer {ONE}", "join"),
        (f"join --peer {ADDRESS} --peer={ONE}", f"join --peer {ADDRESS}"),
        *((f"{name} --peer {ONE}", name) for name in ("members", "status", "doctor", "watch")),
    ],
)
def test_invitation_moves_into_environment(typed, monkeypatch, line, meant):
    monkeypatch.setenv(PEER_VARIABLE, "trahiv join --peer trahiv1:xyz")
    words = meant.split()
    assert typed(line) == (words, [(sys.executable, [*PYTHON, *words])])
    assert taken_peers() == ["trahiv1:xyz", ONE], "what was there before stays"
    assert taken_peers() == []


UNCHANGED = (f"join --peer {ADDRESS} --peer @file", "join --peer", "--help", "", "join trahiv")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        *((line, line) for line in UNCHANGED),
        ("trahiv init quickstart", "init quickstart"),
        (f"join trahiv join --peer {ADDRESS}", f"join --peer {ADDRESS}"),
        # A command that takes no invitation must not repeat it.
        (f"kick --peer {ONE} in={ONE}.", "kick --peer trahiv1:... in=trahiv1:...."),
    ],
)
def test_other_command_lines_stay_in_process(typed, line, meant):
    assert typed(line) == (meant.split(), [])
