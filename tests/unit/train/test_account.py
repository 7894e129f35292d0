"""The status that a peer publishes, derived from its events."""

import json

import pytest

from trahiv_cli.swarm.status import MAX_TEXT
from trahiv_cli.telemetry.events import EventFile, Events
from trahiv_cli.train import account as module
from trahiv_cli.train.account import NOTHING_GIVEN, Account, Given, device_in_use, given_in, shortened

ROUND = {"group": ["QmA", "QmB"], "seconds": 1.5, "committed": True, "reason": None}


@pytest.fixture
def clock(monkeypatch):
    """Monotonic and swarm time, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", type("", (), {"monotonic": staticmethod(lambda: now[0])}))
    monkeypatch.setattr(module, "swarm_time", lambda: now[0] + 1e9)
    return now


@pytest.fixture
def account(clock):
    return Account("run-1", 3, 40, "Ann", Given(5, 600))


def step(number, *, loss=0.5, round=None, **given):
    fields = {"step": number, "loss": loss, "round": round, "samples_per_second": 2.5}
    return {"event": "step", "given": Given(**given)._asdict(), **fields}


def test_status_follows_events(account, clock):
    told = account.status
    assert (told.state, told.step, told.samples, told.tokens, told.name) == ("loading", 3, 5, 600, "Ann")
    clock[0] += 60
    account({"event": "joined", "step": 4})
    account(step(5, loss=float("nan"), samples=9, tokens=700))
    told = account.status
    assert (told.state, told.step, told.samples, told.tokens, told.loss) == ("training", 5, 9, 700, None)
    assert (told.since, told.at, told.round_at) == (1e9 + 1000, 1e9 + 1060, 0.0)
    assert (told.device, told.memory_gib) == device_in_use() and told.memory_gib > 0.5
    clock[0] += 1
    account(step(6, loss=0.25, round=ROUND))
    told = account.status
    assert (told.loss, told.samples_per_second) == (0.25, 2.5)
    assert (told.round_at, told.round_peers, told.round_seconds) == (1e9 + 1061, 2, 1.5)


def test_urgent_changes_are_marked(account, clock):
    def is_marked(event):
        account.has_changed.clear()
        account(event)
        return account.has_changed.is_set()

    waits = {"event": "waiting", "what": "a download"}
    assert [is_marked(event) for event in (waits, waits, waits | {"what": "votes"})] == [True, False, True]
    assert is_marked({"event": "reach", "reached": "punched"}) and not is_marked(step(4))
    for event, state in (("paused", "paused"), ("resumed", "loading")):
        assert is_marked({"event": event}) and account.status.state == state


def test_wait_ends_by_timeout_or_step(account, clock):
    for over in (lambda: account(step(4)), lambda: clock.__setitem__(0, clock[0] + 11)):
        account({"event": "waiting", "what": "a download"})
        assert account.status.waits_for == "a download"
        over()
        assert account.status.waits_for == ""


def test_failed_round_is_trouble_until_commit(account):
    message = "The round for step 4 failed (nobody came); no weights were changed"
    account({"event": "warning", "code": "round", "message": message})
    account({"event": "warning", "code": "data", "message": "Something else."})
    assert account.status.trouble == "The round for step 4 failed (nobody came)"
    account(step(4, round=ROUND))
    assert account.status.trouble == ""


def test_text_is_cut_at_whole_characters():
    assert shortened("a" * 61) == "a" * 60 and shortened("ab" + "😀" * 20) == "ab" + "😀" * 14
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
    assert given_in(tmp_path) == Given(8, 80)
    with path.open("a") as file:
        file.write(json.dumps({"event": "step", "my_samples": 3}) + '\n{"event": "step", "giv')
    assert given_in(tmp_path) == Given(8, 80)
    path.rename(tmp_path / "events.jsonl.1")  # it was full
    path.write_text("")
    assert given_in(tmp_path) == Given(8, 80)
