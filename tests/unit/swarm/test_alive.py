"""Which processes fail, and which are only slow; when a peer stops. Time and processor time are set here."""

import concurrent.futures
import os
import queue
import threading
from types import SimpleNamespace

import pytest

from trahiv_cli.errors import NotAdmitted, PeerBroken
from trahiv_cli.swarm import alive
from trahiv_cli.swarm.alive import (
    LOOK_EVERY_S,
    PULSE_EVERY_S,
    SLOW_AFTER_S,
    STILL_AFTER_LOOKS,
    Alive,
    effort_of,
)
from trahiv_cli.telemetry.events import Events


class Home:
    """A node whose process does as the test says; each look at it counts. Its owner has taken some `out`."""

    def __init__(self, answers=None, is_busy=False, is_stopped=False, runs=True, out=()):
        self.runs, self.answers, self.asked, self.is_out = runs, answers, 0, set(out).__contains__
        self.used_s, self.is_busy, self.is_stopped, self.pending = 0.0, is_busy, is_stopped, None
        self.is_alive, self.pids = lambda: self.runs, lambda: [self]

    def pulse(self):
        self.asked += 1
        if isinstance(self.answers, OSError):
            raise self.answers
        self.pending = concurrent.futures.Future()
        if self.answers != "nothing":
            self.pending.set_exception(self.answers) if self.answers else self.pending.set_result(None)
        return self.pending

    def effort(self):
        self.used_s += 0.3 * self.is_busy
        return self.used_s, self.is_stopped

    def require_membership(self):
        if self.is_out("QmMe"):
            raise NotAdmitted("The owner of this swarm has taken this peer out.")


@pytest.fixture(autouse=True)
def _time_and_processor_time_are_set(monkeypatch, clock):
    monkeypatch.setattr(alive, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(alive, "effort_of", lambda pids: pids[0].effort())


def watch(home, clock):
    """Watch a node; return `look(s)`, which looks for so long, and says how long and what is wrong."""
    watcher = Alive(home, Events(), bool)

    def look(seconds):
        began = clock.now
        while clock.now < began + seconds and not watcher.ailment:
            clock.now += LOOK_EVERY_S
            watcher.look()
        return clock.now - began, watcher.ailment

    return look


def test_a_process_that_answers_is_well_though_the_machine_sleeps_and_its_end_is_found_at_once(clock):
    look = watch(home := Home(), clock)
    look(600)
    assert 600 / PULSE_EVERY_S / 2 <= home.asked <= 600 / PULSE_EVERY_S
    home.answers = "nothing"
    look(PULSE_EVERY_S + LOOK_EVERY_S * (STILL_AFTER_LOOKS // 2))
    home.pending.set_result(None)
    clock.now += 7200  # a suspended machine: hours go by between two looks
    home.answers = None
    assert look(60)[1] == ""
    home.runs = False
    assert look(10) == (LOOK_EVERY_S, "This peer's DHT process, or its daemon p2pd, has ended")


@pytest.mark.parametrize(
    ("answers", "is_busy", "is_stopped", "least_s", "most_s", "said"),
    [
        ("nothing", False, False, 0.0, 10.0, "stands still"),
        ("nothing", True, False, SLOW_AFTER_S, SLOW_AFTER_S + 5, "did not answer"),
        # as p2pd beside the DHT's process: they answer together
        ("nothing", True, True, 0.0, 10.0, "stands still"),
        (ConnectionRefusedError("p2pd is gone"), False, False, 0.0, 2 * PULSE_EVERY_S, "p2pd is gone"),
        (ValueError("nonsense"), False, False, 0.0, 2 * PULSE_EVERY_S, "nonsense"),
    ],
)
def test_one_that_fails_is_found_and_a_busy_one_is_given_time(
    clock, answers, is_busy, is_stopped, least_s, most_s, said
):
    took_s, ailment = watch(Home(answers, is_busy, is_stopped), clock)(600)
    assert least_s <= took_s <= most_s and said in ailment


def test_a_process_that_is_gone_has_used_no_time_and_this_one_is_not_stopped():
    used_s, is_stopped = effort_of([os.getpid(), 2**22 + 1])
    assert used_s > 0 and not is_stopped and effort_of([2**22 + 1]) == (0.0, False)


def test_a_peer_whose_process_failed_or_that_was_taken_out_trains_no_further():
    told, wants_to_leave = queue.SimpleQueue(), []
    broken = Alive(Home(runs=False), Events(told.put), lambda: bool(wants_to_leave))
    broken.watch()
    assert told.get(timeout=10)["code"] == "broken"
    with pytest.raises(PeerBroken, match="has ended"):
        broken.require()
    assert broken.must_stop and told.empty()
    wants_to_leave.append(True)
    broken.require()  # it leaves in good order, whatever failed
    member, homeless = Alive(Home(out={"QmMe", "QmB"}), Events(), bool), Alive(None, Events(), bool)
    with pytest.raises(NotAdmitted):
        member.require()
    assert member.is_out("QmB") and not member.is_out("QmA") and not homeless.is_out("QmB")
    for one in (member, homeless):
        one.watch()
        assert not one.must_stop
    for one in (broken, member, homeless):
        assert one.close() and one.must_stop and not one.close()
    assert "alive" not in {thread.name for thread in threading.enumerate()}
