"""The wish to leave, with real signals."""

import os
import signal
import subprocess
import sys

import pytest

from trahiv_cli.train.leaving import ENDLESS_BUDGET, OVERTIME_S, Budget, Leaving, Left

PEER = """
import os, sys
from trahiv_cli.train.leaving import Leaving

def at_once():
    os.write(1, b"the terminal is given back\\n")
    if sys.argv[1:]:
        raise RuntimeError("reentrant call")

leaving = Leaving(at_once)
with leaving.installed():
    print("ready", flush=True)
    for _ in sys.stdin:
        print(leaving(), leaving.exit_code, flush=True)
sys.exit(leaving.exit_code)
"""
EXIT_CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
def peer(request):
    """A process that answers whether it wants to leave, once a line; with a parameter, its goodbye fails."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    arguments = [request.param] if hasattr(request, "param") else []
    with subprocess.Popen([sys.executable, "-c", PEER, *arguments], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def ask(process):
    process.stdin.write("\n")
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("number", "code"), EXIT_CODES)
def test_the_first_signal_is_remembered_and_work_goes_on(peer, number, code):
    assert ask(peer) == "False 0"
    peer.send_signal(number)
    assert ask(peer) == f"True {code}"
    assert ask(peer) == f"True {code}"
    peer.stdin.close()
    assert peer.wait(10) == code


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("second", "code"), EXIT_CODES)
def test_the_second_signal_ends_it_at_once(peer, first, second, code):
    peer.send_signal(first)
    assert ask(peer).startswith("True")
    peer.send_signal(second)
    assert peer.wait(10) == code
    assert peer.stdout.read() == "the terminal is given back\n"


@pytest.mark.parametrize("peer", ["a stream is written to"], indirect=True)
def test_the_second_signal_ends_it_in_the_middle_of_a_line_too(peer):
    test_the_second_signal_ends_it_at_once(peer, signal.SIGINT, signal.SIGINT, 130)


def test_nobody_asked_to_leave_at_first():
    leaving = Leaving()
    assert not leaving() and leaving.exit_code == 0 and leaving.signal is None


def test_handlers_are_given_back_even_after_an_error():
    before = [signal.getsignal(number) for number, _ in EXIT_CODES]
    with pytest.raises(KeyError), Leaving().installed():
        assert [signal.getsignal(number) for number, _ in EXIT_CODES] != before
        raise KeyError
    assert [signal.getsignal(number) for number, _ in EXIT_CODES] == before


@pytest.mark.parametrize(("number", "code"), EXIT_CODES)
def test_a_phase_with_nothing_to_finish_is_left_where_the_signal_arrives(number, code):
    leaving, reached = Leaving(), []
    with leaving.installed(), pytest.raises(Left), leaving.interruptible():
        reached.append("begin")
        signal.raise_signal(number)
        reached.append("end")
    assert reached == ["begin"] and leaving.exit_code == code


def test_a_phase_that_is_over_is_not_left():
    leaving = Leaving()
    with leaving.installed():
        with leaving.interruptible():
            pass
        signal.raise_signal(signal.SIGINT)
        assert leaving()


def test_a_phase_is_not_begun_after_a_signal():
    leaving, reached = Leaving(), []
    with leaving.installed():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Left), leaving.interruptible():
            reached.append("begin")
    assert reached == []


def test_a_phase_that_fails_is_not_interruptible_any_more():
    leaving = Leaving()
    with leaving.installed():
        with pytest.raises(KeyError), leaving.interruptible():
            raise KeyError
        signal.raise_signal(signal.SIGINT)
        assert leaving()


def test_leaving_is_not_mistaken_for_an_error():
    assert not issubclass(Left, Exception)


def test_a_terminal_is_given_back_only_by_the_second_signal(monkeypatch):
    ended, given_back = [], []
    monkeypatch.setattr(os, "_exit", ended.append)
    leaving = Leaving(at_once=lambda: given_back.append(True))
    with leaving.installed():
        signal.raise_signal(signal.SIGINT)
        assert not given_back and not ended
        signal.raise_signal(signal.SIGTERM)
    assert given_back == [True] and ended == [143]


# -- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2h", Budget(seconds=7200)),
        ("1h30m", Budget(seconds=5400)),
        ("90s", Budget(seconds=90)),
        ("2d", Budget(seconds=172800)),
        ("1d2h3m4s", Budget(seconds=93784)),
        ("500 samples", Budget(samples=500)),
        ("500samples", Budget(samples=500)),
        ("20 steps", Budget(steps=20)),
    ],
)
def test_a_budget_is_a_time_or_a_number(text, budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    "text", ["", "h", "2", "2x", "2 h", "-2h", "2h 30m", "30m2h", "0h", "0 steps", "many", "2.5h"]
)
def test_what_is_no_budget_is_said(text):
    with pytest.raises(ValueError, match="neither a time"):
        Budget.parse(text)


def test_a_peer_leaves_when_a_round_ends_after_its_time():
    budget = Budget(seconds=60)
    given = {"samples": 10**9, "steps": 10**6}
    assert not budget.is_spent(seconds=59, is_border=True, **given)
    assert not budget.is_spent(seconds=61, is_border=False, **given)
    assert budget.is_spent(seconds=61, is_border=True, **given)


def test_a_peer_whose_rounds_do_not_end_leaves_all_the_same():
    given = {"samples": 0, "steps": 0, "is_border": False}
    assert not Budget(seconds=60).is_spent(seconds=60 + OVERTIME_S - 1, **given)
    assert Budget(seconds=60).is_spent(seconds=60 + OVERTIME_S, **given)


@pytest.mark.parametrize("budget", [Budget(samples=100), Budget(steps=5)])
def test_a_number_is_spent_when_it_is_reached(budget):
    assert not budget.is_spent(seconds=1e9, samples=99, steps=4, is_border=True)
    assert budget.is_spent(seconds=0, samples=100, steps=5, is_border=True)


def test_who_said_nothing_stays():
    assert not ENDLESS_BUDGET.is_spent(seconds=1e9, samples=10**9, steps=10**9, is_border=True)
