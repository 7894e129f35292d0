"""The status that a peer publishes, derived from its events."""

from types import SimpleNamespace

import pytest

from trahiv_cli.run import own_status as module
from trahiv_cli.run.own_status import NOTHING_GIVEN, Account, Given, device_in_use, given_in, shortened
from trahiv_cli.swarm.status import MAX_TEXT
from trahiv_cli.telemetry.events import EventFile, Events

ROUND = {"group": ["QmA", "QmB"], "seconds": 1.5, "committed": True, "reason": None}


@pytest.fixture
def account(monkeypatch, clock):
    clock.now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(module, "swarm_time", lambda: clock.now + 1e9)
    return Account("run-1", 3, 40, "Ann", Given(5, 600))


def step(number, *, loss=0.5, round=None, **given):
    fields = {"step": number, "loss": loss, "round": round, "samples_per_second": 2.5}
    return {"event": "step", "given": Given(**given)._asdict(), **fields}


def told(account, *names):
    return [getattr(account.status, name) for name in names]


def test_status_begins_with_earlier_work(account):
    assert told(account, "state", "step", "samples", "tokens", "name") == ["loading", 3, 5, 600, "Ann"]


def test_status_follows_steps(account, clock):
    clock.now += 60
    account({"event": "joined", "step": 4})
    assert told(account, "state", "step") == ["training", 4]
    assert told(account, "device", "memory_gib") == list(device_in_use())
    assert account.status.memory_gib > 0.5
    account(step(5, loss=float("nan"), samples=9, tokens=700))
    assert told(account, "step", "samples", "tokens", "loss") == [5, 9, 700, None]
    assert told(account, "since", "at", "round_at") == [1e9 + 1000, 1e9 + 1060, 0.0]
    account(step(6, loss=0.25, round=ROUND))
    assert told(account, "loss", "samples_per_second") == [0.25, 2.5]
    assert told(account, "round_at", "round_peers", "round_seconds") == [1e9 + 1060, 2, 1.5]


def test_urgent_changes_are_marked(account):
    def is_marked(event):
        account.has_changed.clear()
        account(event)
        return account.has_changed.is_set()

    waits = {"event": "waiting", "what": "a download"}
    events = waits, waits, waits | {"what": "votes"}, {"event": "reach"}, step(4), {"event": "paused"}
    assert list(map(is_marked, events)) == [True, False, True, True, False, True]


def test_pause_is_followed_by_loading(account):
    for event, state in (("paused", "paused"), ("resumed", "loading")):
        account({"event": event})
        assert account.status.state == state


def test_wait_ends_by_timeout_or_step(account, clock):
    for seconds, event in ((0, step(4)), (11, {"event": "peers"})):
        account({"event": "waiting", "what": "a download"})
        assert account.status.waits_for == "a download"
        clock.now += seconds
        account(event)
        assert account.status.waits_for == ""


def test_failed_round_is_trouble_until_commit(account):
    message = "The round for step 4 failed (nobody came)"
    account({"event": "warning", "code": "round", "message": f"{message}; no weights were changed"})
    account({"event": "warning", "code": "data", "message": "Something else."})
    assert account.status.trouble == message
    account(step(4, round=ROUND))
    assert account.status.trouble == ""


def test_text_is_cut_at_whole_characters():
    assert shortened("a" * 61) == "a" * 60
    assert shortened("ab" + "😀" * 20) == "ab" + "😀" * 14
    assert len(shortened("ä" * 100).encode()) == MAX_TEXT


def test_given_totals_survive_restart(tmp_path):
    assert given_in(tmp_path) == NOTHING_GIVEN
    path = tmp_path / "events.jsonl"
    record = EventFile(path)
    events = Events(record)
    for samples in (3, 8):
        events.emit(**step(1, samples=samples, tokens=10 * samples))
    events.emit("checkpoint", step=1, path="x" * 2000)
    record.close()
    with path.open("a") as file:
        file.write('{"event": "step", "my_samples": 3}\n{"event": "step", "giv')
    assert given_in(tmp_path) == Given(8, 80)
    path.rename(tmp_path / "events.jsonl.1")  # it was full
    path.touch()
    assert given_in(tmp_path) == Given(8, 80)
