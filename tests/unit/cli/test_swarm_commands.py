"""Errors for unusable arguments, how a peer restarts itself, and the output of `kick`."""

import atexit
import os
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
from trahiv_cli.swarm import owning
from trahiv_cli.swarm.invitation import Invitation, find_standing, keep_invitation
from trahiv_cli.swarm.roll import write_down
from trahiv_cli.train import peer as peer_module
from trahiv_cli.train.leaving import Budget


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_starts, tmp_path):
    write_tiny(tmp_path)
    before = set(tmp_path.iterdir())
    yield
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("join", "tiny.yaml"), "--peer: paste the line that `trahiv init` printed"),
        (("init", "--dry-run"), "name the recipe whose run would be shown"),
        (("init", "--no-train", "--budget", "5 steps"), "--budget: a peer that does not train takes a time"),
        (("init", "tiny.yaml", "--budget", "soon"), "'--budget': 'soon' is neither a time (2h, 1h30m, 2d)"),
        (("init", "--wait", "5 steps"), "'--wait': '5 steps' is not a time; write one like 10m"),
        (("init", "--wait", "0s"), "'--wait': '0s' is not a time"),
        (("init", "--host-maddr", "x:80"), "'--host-maddr': 'x:80' is not a multiaddr; write one like"),
        (("init", "--announce-maddr", "x:80"), "'--announce-maddr': 'x:80' is not a multiaddr"),
        (("invite", "--watch", "--once"), "--once: who watches leaves no trace: give a time, --expires 1d"),
    ],
)
def test_senseless_options_are_usage_errors(trahiv, words, said):
    code, out, err = trahiv(*words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


@pytest.mark.parametrize("answer", ["n", "", "what?"])
def test_init_without_recipe_asks_first(trahiv, monkeypatch, answer):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer + "\n", raising=False)
    code, out, err = trahiv("init")
    assert (code, out) == (0, "")
    assert "starts a bootstrap node: others can join through it, but it trains nothing" in err
    assert "trahiv init quickstart" in err and err.endswith("Start a bootstrap node? [y/N] ")


def test_help_fits_in_80_columns(trahiv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = trahiv("--help")
    commands = out.partition("Commands:\n")[2].splitlines()
    assert code == 0 and all(line.endswith(".") and not line.endswith("...") for line in commands)
    assert max(map(len, commands)) <= 80
    for name in (command.split()[0] for command in commands):
        assert trahiv(name, "-h")[1].startswith(f"Usage: trahiv {name} ")


def test_restarts_are_limited_per_ten_minutes(monkeypatch):
    begun, failure = [], PeerBroken("The DHT's process has ended.", hint="look into the log")
    monkeypatch.setattr(os, "execv", lambda *command: begun.append(command))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setenv(RESTARTS_VARIABLE, "300 600 700")
    restart("trahiv join --peer '@runs/a b/invited-by' --yes", failure)
    words = ["-m", "trahiv_cli", "join", "--peer", "@runs/a b/invited-by", "--yes"]
    assert begun == [(sys.executable, [sys.executable, *words])]
    assert restarts() == [600.0, 700.0, 1000.0], "what was long ago does not count"
    with pytest.raises(PeerBroken, match="The DHT's process has ended. This peer had started again 3 times"):
        restart("trahiv init", failure)
    assert len(begun) == 1


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "paused"])
def test_restart_carries_spent_budget(monkeypatch, is_broken):
    def run_peer(run, options, events, leaving, text):
        leaving.spent = Budget(7.0, 40, 3)
        if is_broken:
            raise PeerBroken("A worker process of the data loader was killed.")
        return peer_module.Ended("pause")

    def execv(*_):
        raise SystemExit

    monkeypatch.setattr(peer_module, "run_peer", run_peer)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setenv(RESTARTS_VARIABLE, "")
    monkeypatch.setenv(SPENT_VARIABLE, "100 5")
    with pytest.raises(SystemExit):
        live(object(), peer_module.PeerOptions(resume="trahiv init"), SharedOptions(), None)
    assert spent_before() == (140, 8)


def test_time_before_restart_counts_for_budget(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: psutil.Process().create_time() + 60.0)
    for before, seconds in ((None, 0.0), ("300", 60.0), ("", 60.0)):  # the last one is a restart for a pause
        if before is not None:
            monkeypatch.setenv(RESTARTS_VARIABLE, before)
        assert seconds_spent() == pytest.approx(seconds)


def test_kick_reports_closed_invitation(trahiv, tmp_path_factory, monkeypatch):
    def nobody_answers(*_):
        raise Unreachable("No peer could be reached.")

    monkeypatch.setattr(owning, "visiting", nobody_answers)
    known, unknown = (str(PeerID(b"\x12\x20" + one * 32)) for one in (b"k", b"u"))
    membership = find_standing(run := tmp_path_factory.mktemp("run"), Invitation()).membership
    keep_invitation(run / INVITATION_FILE, Invitation(membership=membership))
    write_down(run, {known: membership.grant})
    assert trahiv("invite", "--close", "all", "--output-dir", run)[0] == 4, "it is not known who may stay"
    for peer, words, hint in (
        (unknown, "is out. It is not known which invitation", "`trahiv invite --close all` keeps it"),
        (known, "is out, and the invitation that it joined with is closed", "`trahiv invite` makes"),
    ):
        code, out, err = trahiv("kick", peer, "--output-dir", run)
        assert code == 0 and f"{peer} {words}" in out and hint in " ".join(err.split())
        assert "No peer of the swarm answers here" in err
