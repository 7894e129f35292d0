"""Output of `trahiv status` for a swarm whose records are a dict."""

import contextlib
import itertools
import json
import signal
import time
from types import SimpleNamespace
from typing import get_args

import pytest

from tests.kit.fakes import FakeNode
from tests.unit.cli.conftest import ADDRESS
from trahiv_cli import clock
from trahiv_cli.cli import status as module
from trahiv_cli.cli.status import REACHED
from trahiv_cli.errors import NotAdmitted
from trahiv_cli.net.keys import ADDRESSES_KEY, RUNS_KEY
from trahiv_cli.reach.reachability import Kind
from trahiv_cli.run.lock import owned
from trahiv_cli.swarm import owner as owning
from trahiv_cli.swarm.known_peers import FILE, KnownPeers
from trahiv_cli.swarm.status import PROTOCOL, Status, fields_of
from trahiv_cli.telemetry.events import PEERS_FILE

LOOK = f"status --peer {ADDRESS}"


@pytest.fixture
def swarm(here, monkeypatch):
    """`swarm(QmA=[...])` has peers publish their status; a peer without one is only present."""
    node = FakeNode("QmVisitor")
    monkeypatch.setattr(owning, "visiting", lambda *_: contextlib.nullcontext(node))
    monkeypatch.setattr(clock, "swarm_time", lambda: 1000.0)

    def swarm(**peers):
        for name, status in peers.items():
            peer = node.neighbour(name)
            peer.publish(ADDRESSES_KEY, [], 60.0)
            if status:
                peer.publish(RUNS_KEY, status, 60.0)

    return swarm


def status(step, **more):
    usual = {"version": "1.0", "max_steps": 40, "reached": "direct", "round_at": 988, "state": "training"}
    return Status(run_id="run-1", **usual).model_dump() | {"step": step, **more}


def test_status_lists_peers_by_progress(trahiv, swarm):
    paused = {"state": "paused", "name": "Dee \u202e", "waits_for": "a game to end"}
    swarm(
        QmA=status(6, reached="relayed"),
        QmB=status(7, reached="punched"),
        QmC=None,
        QmD=status(7, **paused),
        QmE=status(9, protocol=PROTOCOL + 1),
        QmF=["run-1", 3, 4, "direct", 0],
    )
    assert trahiv(LOOK) == (
        "run-1: step 6 of 40, 3 peers, the last round was 12 s ago\n"
        "  QmB  step 7, punched: met through both routers\n"
        "  QmD (Dee ?)  paused at step 7, direct: others dial it; waits for a game to end\n"
        "  QmA  step 6, relayed: met through a member\n"
        "  QmE  runs trahiv 1.0, of another protocol: it can't train along\n"
        "  QmF  runs an earlier version of trahiv, of another protocol: it can't train along\n"
        "  QmC  tells of no run\n",
        "",
    )


def test_every_reach_has_words():
    assert set(REACHED) == set(get_args(Kind))


def test_json_status_has_run_and_peers(events, swarm):
    lone = status(3, reached="alone", round_at=0)
    swarm(QmA=lone, QmB=None)
    run, peer, idle = events(LOOK)
    figures = {"run_id": "run-1", "step": 3, "max_steps": 40, "peers": 1, "seconds_since_round": None}
    assert run == run | figures | {"event": "run"}
    assert peer == peer | lone | {"event": "peer", "peer_id": "QmA"}
    assert idle == idle | {"event": "peer", "run_id": None, "peer_id": "QmB"}


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ({"QmA": status(0, round_at=0)}, "run-1: step 0 of 40, 1 peer, no round yet\n"),
        ({"QmA": status(5), "QmB": status(5), "QmC": status(2**30, max_steps=1)}, "run-1: step 5 of 40, 3"),
        ({"QmA": status(5, round_at=2**39)}, "the last round was 0 s ago\n"),
        ({"QmA": status(5), "QmB": status(9, run_id="run-2")}, "run-2: step 9 of 40, 1 peer"),
        ({"QmA": status(5, run_id="a\x1b[2J")}, "a?[2J: step 5"),
    ],
)
def test_status_ignores_outlier_reports(trahiv, swarm, peers, said):
    swarm(**peers)
    out, err = trahiv(LOOK)
    assert err == ""
    assert said in out


def test_idle_swarm_is_recognized(trahiv, swarm):
    swarm(QmA=None)
    out, err = trahiv(LOOK)
    assert out == "  QmA  tells of no run\n"
    assert "nothing is being trained in this swarm" in err


def test_status_without_run_needs_line(trahiv, here):
    assert "--output-dir" in trahiv("status", code=3).err


@pytest.fixture
def run(here):
    """The folder of a run whose peer has met another one."""
    folder = here / "runs" / "run-1"
    folder.mkdir(parents=True)
    met = KnownPeers(folder / FILE)
    met.meet(ADDRESS.rpartition("/")[2], [ADDRESS])
    met.save()
    return folder


@pytest.mark.parametrize("line", ["status", "status --output-dir runs/run-1"])
def test_status_without_line_uses_newest_run(trahiv, swarm, run, line):
    swarm(QmA=status(5))
    assert trahiv(line).out.startswith("run-1: step 5 of 40")


def test_run_without_acquaintances_is_unreachable(trahiv, swarm, run):
    (run / FILE).write_text("{}")
    trahiv("status", code=4)


@pytest.fixture
def refused(run, monkeypatch):
    """The folder of a peer that joined by a single-use invitation: a visitor has another identity."""

    def refuse(*_):
        raise NotAdmitted("The swarm does not take this peer for a member: its invitation was used before.")

    monkeypatch.setattr(owning, "visiting", refuse)
    return run


@pytest.fixture
def record(refused):
    """Write what the peer of the run saw at an age in seconds."""

    def record(age_s):
        there = {"QmA": Status(**status(5)), "QmB": Status(**status(6))}
        event = {"event": "peers", "t": time.time() - age_s, **fields_of(there)}
        (refused / PEERS_FILE).write_text(json.dumps(event))

    return record


def test_refused_visitor_uses_running_peers_record(trahiv, refused, record):
    record(290)
    trahiv("status", code=5)
    with owned(refused):
        assert trahiv("status").out.startswith("run-1: step 5 of 40, 2 peers,")


@pytest.mark.parametrize(("age_s", "line"), [(310, "status"), (0, LOOK)])
def test_only_fresh_record_of_named_run_counts(trahiv, refused, record, age_s, line):
    record(age_s)
    with owned(refused):
        trahiv(line, code=5)


def test_unreadable_record_is_ignored(trahiv, refused):
    with owned(refused):
        trahiv("status", code=5)
        (refused / PEERS_FILE).write_text("{")
        trahiv("status", code=5)


@pytest.fixture
def signals():
    """Give the process its handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("format", "look"),
    [("plain", "12:00:00\nrun-1: step 5 of 40, 1 peer"), ("json", '"peers": [{"peer_id": "QmA", "run_id"')],
)
def test_follow_repeats_until_signal(trahiv, swarm, monkeypatch, format, look):
    looks = itertools.count(1)

    def sleep(_):
        if next(looks) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(module, "time", SimpleNamespace(strftime=lambda _: "12:00:00", sleep=sleep))
    swarm(QmA=status(5))
    assert trahiv(f"{LOOK} --follow --format {format}").out.count(look) == 3
