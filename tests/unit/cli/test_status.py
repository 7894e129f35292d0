"""Output of `trahiv status` for a swarm whose records are a dict."""

import contextlib
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
from trahiv_cli.run.lock import owned
from trahiv_cli.swarm import owning
from trahiv_cli.swarm.acquaintances import FILE, Acquaintances
from trahiv_cli.swarm.node import ADDRESSES_KEY, RUNS_KEY
from trahiv_cli.swarm.reach import Kind
from trahiv_cli.swarm.status import PROTOCOL, Status, fields_of
from trahiv_cli.telemetry.events import PEERS_FILE


@pytest.fixture
def swarm(here, monkeypatch):
    """`swarm(QmA=[...])` has peers publish their status; a peer without one is only present."""
    node = FakeNode("QmVisitor")
    monkeypatch.setattr(owning, "visiting", lambda *_: contextlib.nullcontext(node))
    monkeypatch.setattr(clock, "swarm_time", lambda: 1000.0)

    def swarm(**peers):
        for peer, status in peers.items():
            node.neighbour(peer).publish(ADDRESSES_KEY, [f"/ip4/5.5.5.1/tcp/1/p2p/{peer}"], 60.0)
            if status:
                node.neighbour(peer).publish(RUNS_KEY, status, 60.0)

    return swarm


def status(step, reached="direct", round_at=988, run="run-1", max_steps=40, **more):
    return {"run_id": run, "protocol": PROTOCOL, "version": "1.0", "step": step, "max_steps": max_steps} | {
        "reached": reached,
        "round_at": round_at,
        "state": "training",
        **more,
    }


def test_status_lists_peers_by_progress(trahiv, swarm):
    paused = {"state": "paused", "name": "Dee \u202e", "waits_for": "a game to end"}
    swarm(QmC=None, QmA=status(6, "relayed"), QmB=status(7, "punched"), QmD=status(7, **paused))
    swarm(QmE={**status(9), "protocol": PROTOCOL + 1}, QmF=["run-1", 3, 4, "direct", 0])
    assert trahiv("status", "--peer", ADDRESS) == (
        0,
        "run-1: step 6 of 40, 3 peers, the last round was 12 s ago\n"
        "  QmB  step 7, punched: met through both routers\n"
        "  QmD (Dee ?)  paused at step 7, direct: others dial it; waits for a game to end\n"
        "  QmA  step 6, relayed: met through a member\n"
        "  QmE  runs trahiv 1.0, of another protocol: it can't train along\n"
        "  QmF  runs an earlier version of trahiv, of another protocol: it can't train along\n"
        "  QmC  tells of no run\n",
        "",
    )


def test_json_status_has_run_and_peers(events, swarm):
    swarm(QmA=status(3, "alone", round_at=0), QmB=None)
    _, told = events("status", "--peer", ADDRESS)
    assert [{key: event[key] for key in event.keys() - {"v", "t", "event"}} for event in told] == [
        {"run_id": "run-1", "step": 3, "max_steps": 40, "peers": 1, "seconds_since_round": None},
        {"peer_id": "QmA", **Status(**status(3, "alone", round_at=0)).model_dump()},
        {"run_id": None, "peer_id": "QmB"},
    ]
    assert [event["event"] for event in told] == ["run", "peer", "peer"]
    assert set(REACHED) == set(get_args(Kind))


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ({"QmA": status(0, round_at=0)}, "run-1: step 0 of 40, 1 peer, no round yet\n"),
        ({"QmA": status(5), "QmB": status(5), "QmC": status(2**30, max_steps=1)}, "run-1: step 5 of 40, 3"),
        ({"QmA": status(5, round_at=2**39)}, "the last round was 0 s ago\n"),
        ({"QmA": status(5), "QmB": status(9, run="run-2")}, "run-2: step 9 of 40, 1 peer"),
        ({"QmA": status(5, run="a\x1b[2J")}, "a?[2J: step 5"),
        ({"QmA": None}, "  QmA  tells of no run\n"),
        ({"QmA": status(5, "by magic")}, "  QmA  tells of no run\n"),
    ],
)
def test_status_ignores_outlier_reports(trahiv, swarm, peers, said):
    swarm(**peers)
    code, out, err = trahiv("status", "--peer", ADDRESS)
    assert code == 0 and said in out
    assert ("nothing is being trained in this swarm" in err) == out.startswith("  ")


def test_status_without_line_uses_newest_run(trahiv, swarm, here):
    swarm(QmA=status(5))
    code, out, err = trahiv("status")
    assert (code, out) == (3, "") and "no run of yours in runs/" in err and "--output-dir" in err
    (here / "runs" / "run-1").mkdir(parents=True)
    known = here / "runs" / "run-1" / FILE
    known.write_text("{}")
    assert trahiv("status")[0] == 4, "it knows nobody"
    met = Acquaintances(known)
    met.meet(ADDRESS.rpartition("/")[2], [ADDRESS])
    met.save()
    for more in ((), ("--output-dir", known.parent)):
        assert trahiv("status", *more)[1].startswith("run-1: step 5 of 40")


def test_refused_visitor_uses_own_peers_record(trahiv, swarm, here, monkeypatch):
    """As for a peer that joined by a single-use invitation: a visitor has another identity."""

    def refuse(*_):
        raise NotAdmitted("The swarm does not take this peer for a member: its invitation was used before.")

    run = here / "runs" / "run-1"
    run.mkdir(parents=True)
    met = Acquaintances(run / FILE)
    met.meet(ADDRESS.rpartition("/")[2], [ADDRESS])
    met.save()
    monkeypatch.setattr(owning, "visiting", refuse)
    there = {"QmA": Status(**status(5)), "QmB": Status(**status(6))}
    with owned(run):
        for seconds, code in ((None, 5), (10, 0), (1000, 5)):
            if seconds is not None:
                event = {"event": "peers", "t": time.time() - seconds, **fields_of(there)}
                (run / PEERS_FILE).write_text(json.dumps(event))
            assert trahiv("status")[0] == code, seconds
        event["t"] = time.time()
        (run / PEERS_FILE).write_text(json.dumps(event))
        assert trahiv("status")[1].startswith("run-1: step 5 of 40, 2 peers,")
        assert trahiv("status", "--peer", ADDRESS)[0] == 5
    assert trahiv("status")[0] == 5, "its peer is gone"
    (run / PEERS_FILE).write_text("{")
    with owned(run):
        assert trahiv("status")[0] == 5


def test_follow_repeats_until_signal(trahiv, events, swarm, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    swarm(QmA=status(5))
    looks = iter(2 * [None, None, signal.SIGTERM])
    monkeypatch.setattr(
        module, "time", SimpleNamespace(strftime=lambda _: "12:00:00", sleep=lambda _: sleep())
    )

    def sleep():
        if (number := next(looks)) is not None:
            signal.raise_signal(number)

    try:
        code, out, _ = trahiv("status", "--peer", ADDRESS, "--follow")
        assert code == 0 and out.count("12:00:00\nrun-1: step 5 of 40, 1 peer") == 3
        code, told = events("status", "--peer", ADDRESS, "--follow")
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert code == 0 and [event["event"] for event in told] == ["peers"] * 3
    assert [(one["peer_id"], one["step"]) for one in told[0]["peers"]] == [("QmA", 5)]
