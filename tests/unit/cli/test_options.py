"""Invitations on a command line: every user of the machine can read it."""

import os
import sys

import pytest

from trahiv_cli.cli.options import PEER_VARIABLE, hide_invitations, taken_peers, understood


class Replaced(BaseException):
    """In the place of a process that begins anew."""


@pytest.fixture
def typed(monkeypatch):
    """`typed("join", ...)`: what this process would go on with, and the one that replaces it."""
    begun = []

    def execv(path, arguments):
        begun.append((path, arguments))
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv(PEER_VARIABLE, "")

    def typed(*words, python=("python", "/bin/trahiv")):
        monkeypatch.setattr(sys, "argv", [python[-1], *words])
        monkeypatch.setattr(sys, "orig_argv", [*python, *words])
        try:
            hide_invitations()
        except Replaced:
            return None, begun.pop()
        return sys.argv[1:], None

    return typed


ONE = "trahiv1:abc-_1"
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmXk"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["join", "--peer", ONE], ["join"]),
        (["join", f"--peer={ONE}"], ["join"]),
        (["join", "--yes", ONE], ["join", "--yes"]),
        (["join", ONE, "recipe.yaml"], ["join", "recipe.yaml"]),
        (["join", f"<{ONE}>"], ["join"]),
        (["join", "--peer", f"“{ONE}”"], ["join"]),
        (["join", "--peer", f"trahiv join --peer {ONE}", "--yes"], ["join", "--yes"]),
        (["join", f"trahiv join\n--peer {ONE[:10]}\n{ONE[10:]}\n"], ["join"]),
        (["join", "trahiv", "join", "--peer", ONE], ["join"]),
        (["trahiv", "trahiv", "join", ONE], ["join"]),
        ([f"trahiv join --peer {ONE}"], ["join"]),
        ([ONE], ["join"]),
        (["join", "—peer", ONE], ["join"]),
        (["join", "--peer", ONE, "--peer", "@/my dir/file"], ["join", "--peer", "@/my dir/file"]),
        (["join", "--peer", ADDRESS, f"--peer={ONE}"], ["join", "--peer", ADDRESS]),
        (["members", "--peer", ONE], ["members"]),
    ],
)
def test_an_invitation_moves_into_the_environment(typed, words, meant):
    assert typed(*words) == (None, (sys.executable, ["python", "/bin/trahiv", *meant]))
    assert taken_peers() == [ONE]
    assert taken_peers() == []


def test_what_was_there_before_stays(typed, monkeypatch):
    monkeypatch.setenv(PEER_VARIABLE, "trahiv1:xyz")
    python = ["python", "-X", "dev", "-m", "trahiv_cli"]
    assert typed("join", f"--peer={ONE}", python=python) == (None, (sys.executable, [*python, "join"]))
    assert taken_peers() == [ONE, "trahiv1:xyz"]


@pytest.mark.parametrize("text", [f"trahiv join --peer {ONE}", f"“{ONE}”", f" {ONE}\n"])
def test_the_environment_may_hold_the_whole_line(monkeypatch, text):
    monkeypatch.setenv(PEER_VARIABLE, text)
    assert taken_peers() == [ONE]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        *((words, words) for words in (["join", "--peer", ADDRESS, "--peer", "@file"], ["join", "--peer"])),
        *((words, words) for words in (["--help"], [], ["join", "trahiv"])),
        (["trahiv", "init", "quickstart"], ["init", "quickstart"]),
        (["join", "trahiv", "join", "--peer", ADDRESS], ["join", "--peer", ADDRESS]),
        # A command that takes no invitation does not get to repeat it.
        (["kick", "--peer", ONE, f"in {ONE}."], ["kick", "--peer", "trahiv1:...", "in trahiv1:...."]),
    ],
)
def test_all_else_is_run_as_it_was_meant(typed, words, meant):
    assert typed(*words) == (meant, None)


def test_an_invitation_that_blanks_have_torn_is_put_together():
    words = ["join", "--peer", "trahiv1:AAAA", "BBBB", "C-C", "quickstart", "--yes"]
    assert understood(words) == (["join", "quickstart", "--yes"], ["trahiv1:AAAABBBBC-C"])
