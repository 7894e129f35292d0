"""Invitations on a command line: every user of the machine can read it."""

import os
import sys

import pytest

from trahiv_cli.cli import options
from trahiv_cli.cli.options import PEER_VARIABLE, hide_invitations, taken_peers


class Replaced(BaseException):
    """In the place of a process that begins anew."""


@pytest.fixture
def started(monkeypatch):
    """What this process would have been replaced by: program, arguments, invitations in the environment."""
    calls = []

    def execv(path, arguments):
        calls.append((path, arguments, os.environ.get(PEER_VARIABLE, "").split()))
        raise Replaced

    monkeypatch.setattr(options.os, "execv", execv)
    monkeypatch.setenv(PEER_VARIABLE, "")
    return calls


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["--peer", "trahiv1:abc"], []),
        (["--peer=trahiv1:abc"], []),
        (["--peer", "trahiv1:abc", "--peer", "@/my dir/file"], ["--peer", "@/my dir/file"]),
        (["--peer", "/ip4/x", "--peer=trahiv1:abc"], ["--peer", "/ip4/x"]),
    ],
)
def test_an_invitation_moves_into_the_environment(started, words, rest):
    with pytest.raises(Replaced):
        hide_invitations(["python", "trahiv", "join", *words, "--yes"])
    assert started == [(sys.executable, ["python", "trahiv", "join", *rest, "--yes"], ["trahiv1:abc"])]
    assert taken_peers() == ["trahiv1:abc"]
    assert taken_peers() == []


def test_those_that_were_there_before_stay(started, monkeypatch):
    monkeypatch.setenv(PEER_VARIABLE, "trahiv1:xyz")
    with pytest.raises(Replaced):
        hide_invitations(["python", "-m", "trahiv_cli", "join", "--peer=trahiv1:abc"])
    assert taken_peers() == ["trahiv1:abc", "trahiv1:xyz"]


@pytest.mark.parametrize(
    "words",
    [
        ["join", "--peer", "/ip4/x", "--peer", "@file"],
        ["join", "--peer"],
        ["join", "trahiv1:recipe.yaml", "--peer", "@file"],
        ["init", "recipe.yaml", "--peer", "trahiv1:abc"],
    ],
)
def test_all_else_stays_as_it_was_typed(started, words):
    hide_invitations(["python", "trahiv", *words])
    assert started == []
