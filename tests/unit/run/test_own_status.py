"""The status that a peer publishes, derived from its events."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from trahiv_cli.run import own_status as module
from trahiv_cli.run.own_status import Contribution, OwnStatus, contribution_in, device_in_use, shortened
from trahiv_cli.telemetry.events import EventFile

ROUND = {"group": ["QmA", "QmB"], "seconds": 1.5, "committed": True, "reason": None}


@pytest.fixture
def own_status(monkeypatch, clock):
    clock.now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(module, "swarm_time", lambda: clock.now + 1e9)
    return OwnStatus("run-1", 3, 40, Contribution(5, 600), "Ann")


def step(number, *, loss=0.5, round=None, **given):
    fields = {"step": number, "loss": loss, "round": round, "samples_per_second": 2.5}
    return {"event": "step", "given": Contribution(**given)._asdict(), **fields}


def told(own_status, *names):
    return [getattr(own_status.current, name) for name in names]


def test_status_begins_with_earlier_work(own_status):
    assert told(own_status, "state", "step", "samples", "tokens", "name") == ["loading", 3, 5, 600, "Ann"]


def test_status_follows_steps(own_status, clock):
    clock.now += 60
    own_status({"event": "joined", "step": 4})
    assert told(own_status, "state", "step") == ["training", 4]
    assert told(own_status, "device", "memory_gib") == list(device_in_use())
    assert own_status.current.memory_gib > 0.5
    own_status(step(5, loss=float("nan"), samples=9, tokens=700))
    assert told(own_status, "step", "samples", "tokens", "loss") == [5, 9, 700, None]
    assert told(own_status, "since", "at", "round_at") == [1e9 + 1000, 1e9 + 1060, 0.0]
    own_status(step(6, loss=0.25, round=ROUND))
    assert told(own_status, "loss", "samples_per_second") == [0.25, 2.5]
    assert told(own_status, "round_at", "round_peers", "round_seconds") == [1e9 + 1060, 2, 1.5]


def test_urgent_changes_are_marked(own_status):
    waits = {"event": "waiting", "what": "a download"}
    for event, is_marked in (
        (waits, True),
        (waits, False),
        (waits | {"what": "votes"}, True),
        ({"event": "reach"}, True),
        (step(4), False),
        ({"event": "paused"}, True),
    ):
        own_status.has_changed.clear()
        own_status(event)
        assert own_status.has_changed.is_set() == is_marked


def test_pause_is_followed_by_loading(own_status):
    for event, state in (("paused", "paused"), ("resumed", "loading")):
        own_status({"event": event})
        assert own_status.current.state == state


def test_wait_ends_by_timeout_or_step(own_status, clock):
    for seconds, event in ((0, step(4)), (11, {"event": "peers"})):
        own_status({"event": "waiting", "what": "a download"})
        assert own_status.current.waits_for == "a download"
        clock.now += seconds
        own_status(event)
        assert own_status.current.waits_for == ""


def test_failed_round_is_trouble_until_commit(own_status):
    message = "The round for step 4 failed (nobody came)"
    own_status({"event": "warning", "code": "round", "message": f"{message}; no weights were changed"})
    own_status({"event": "warning", "code": "data", "message": "Something else."})
    assert own_status.current.trouble == message
    own_status(step(4, round=ROUND))
    assert own_status.current.trouble == ""


@pytest.mark.parametrize("text", ["a" * 60, "ab" + "😀" * 14, "ä" * 30])
def test_text_is_cut_at_whole_characters(text):
    assert shortened(text + 9 * text[-1]) == text


def test_given_totals_survive_restart(tmp_path):
    assert contribution_in(tmp_path) == Contribution()
    path = tmp_path / "events.jsonl"
    with closing(EventFile(path)) as record:
        for samples in (3, 8):
            record(step(1, samples=samples, tokens=10 * samples))
        record({"event": "checkpoint", "path": "x" * 2000})
    with path.open("a") as file:
        file.write('{"event": "step", "my_samples": 3}\n{"event": "step", "giv')
    assert contribution_in(tmp_path) == Contribution(8, 80)
    path.rename(tmp_path / "events.jsonl.1")  # it was full
    path.touch()
    assert contribution_in(tmp_path) == Contribution(8, 80)
