"""Errors for unusable arguments, how a peer restarts itself, and the output of `kick`."""

import atexit
import os
import re
import sys
import time

import psutil
import pytest
from hivemind.p2p import PeerID

from tests.kit.recipes import write_tiny
from trahiv_cli.cli.options import SharedOptions
from trahiv_cli.cli.restarting import (
    RESTARTS_VARIABLE,
    SPENT_VARIABLE,
    restart,
    restarts,
    seconds_spent,
    spent_before,
)
from trahiv_cli.cli.swarm import live
from trahiv_cli.errors import PeerBroken, Unreachable
from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.members.invitation import Invitation, find_credentials, keep_invitation
from trahiv_cli.run.leaving import Budget
from trahiv_cli.run.peer_options import PeerOptions
from trahiv_cli.swarm import owner as owning
from trahiv_cli.swarm.member_list import write_down
from trahiv_cli.train import peer


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_starts, tmp_path):
    write_tiny(tmp_path)
    before = set(tmp_path.iterdir())
    yield
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("join tiny.yaml", "--peer: paste the line that `trahiv init` printed"),
        ("init --dry-run", "name the recipe whose run would be shown"),
        ("init --no-train --budget 5steps", "--budget: a peer that does not train takes a time"),
        ("init --wait 5steps", "'--wait': '5steps' is not a time; write one like 10m"),
        ("init --wait 0s", "'--wait': '0s' is not a time"),
        ("init --host-maddr x:80", "'--host-maddr': 'x:80' is not a multiaddr; write one like"),
        ("init --announce-maddr x:80", "'--announce-maddr': 'x:80' is not a multiaddr"),
        ("invite --watch --once", "--once: who watches leaves no trace: give a time, --expires 1d"),
    ],
)
def test_senseless_options_are_usage_errors(trahiv, line, said):
    out, err = trahiv(line, code=2)
    assert out == ""
    assert said in " ".join(err.split())


@pytest.mark.parametrize("answer", ["n", "", "what?"])
def test_init_without_recipe_asks_first(trahiv, monkeypatch, answer):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer + "\n", raising=False)
    out, err = trahiv("init")
    assert out == ""
    assert "starts a bootstrap node: others can join through it, but it trains nothing" in err
    assert "trahiv init quickstart" in err
    assert err.endswith("Start a bootstrap node? [y/N] ")


def test_help_fits_in_80_columns(trahiv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = trahiv("--help").out.partition("Commands:\n")[2].splitlines()
    for line in commands:
        assert re.fullmatch(r".{1,79}(?<!\.\.)\.", line)
        name = line.split()[0]
        assert trahiv(f"{name} -h").out.startswith(f"Usage: trahiv {name} ")


@pytest.fixture
def begun(monkeypatch):
    """The command that replaces this process."""
    begun = []

    def execv(path, command):
        begun.append((path, command))
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    return begun


def test_restart_notes_recent_ones(begun, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setenv(RESTARTS_VARIABLE, "300 600 700")
    with pytest.raises(SystemExit):
        restart("trahiv join --peer '@runs/a b/invited-by' --yes", PeerBroken("The DHT's process has ended."))
    words = ["-m", "trahiv_cli", "join", "--peer", "@runs/a b/invited-by", "--yes"]
    assert begun == [(sys.executable, [sys.executable, *words])]
    assert restarts() == [600.0, 700.0, 1000.0], "what was long ago does not count"


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "paused"])
def test_restart_carries_spent_budget(begun, monkeypatch, is_broken):
    def run_peer(run, options, events, leaving, text):
        leaving.spent = Budget(7.0, 40, 3)
        if is_broken:
            raise PeerBroken("A worker process of the data loader was killed.")
        return peer.Ended("pause")

    monkeypatch.setattr(peer, "run_peer", run_peer)
    monkeypatch.setenv(RESTARTS_VARIABLE, "")
    monkeypatch.setenv(SPENT_VARIABLE, "100 5")
    with pytest.raises(SystemExit):
        live(object(), PeerOptions(resume="trahiv init"), SharedOptions(), None)
    assert spent_before() == (140, 8)


@pytest.mark.parametrize("before", ["300", ""], ids=["broken", "paused"])
def test_time_before_restart_counts_for_budget(monkeypatch, before):
    monkeypatch.setattr(time, "time", lambda: psutil.Process().create_time() + 60.0)
    assert seconds_spent() == 0.0
    monkeypatch.setenv(RESTARTS_VARIABLE, before)
    assert seconds_spent() == pytest.approx(60.0)


KNOWN, UNKNOWN = (str(PeerID(b"\x12\x20" + one * 32)) for one in (b"k", b"u"))


@pytest.fixture
def run(tmp_path_factory, monkeypatch):
    """The folder of an owner whose swarm cannot be reached."""

    def refuse(*_):
        raise Unreachable("No peer could be reached.")

    monkeypatch.setattr(owning, "visiting", refuse)
    folder = tmp_path_factory.mktemp("run")
    membership = find_credentials(folder, Invitation()).membership
    keep_invitation(folder / INVITATION_FILE, Invitation(membership=membership))
    write_down(folder, {KNOWN: membership.grant})
    return folder


def test_closing_all_invitations_needs_swarm(trahiv, run):
    trahiv(f"invite --close all --output-dir {run}", code=4)  # it is not known which peer may stay


@pytest.mark.parametrize(
    ("peer", "words", "hint"),
    [
        (UNKNOWN, "is out. It is not known which invitation", "`trahiv invite --close all` keeps it"),
        (KNOWN, "is out, and the invitation that it joined with is closed", "`trahiv invite` makes"),
    ],
)
def test_kick_reports_closed_invitation(trahiv, run, peer, words, hint):
    out, err = trahiv(f"kick {peer} --output-dir {run}")
    assert f"{peer} {words}" in out
    assert hint in " ".join(err.split())
    assert "No peer of the swarm answers here" in err
