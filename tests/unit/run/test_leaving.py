"""The wish to leave, and budgets; with real commands in `tests/swarm/test_leaving.py`."""

import os
import signal

import pytest

from trahiv_cli.run.leaving import ENDLESS_BUDGET, OVERTIME_S, Budget, Leaving, Left

EXIT_CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "code"), EXIT_CODES)
def test_signal_ends_interruptible_phase_at_once(number, code):
    leaving = Leaving()
    reached = []
    with leaving.installed(), pytest.raises(Left), leaving.interruptible():
        reached.append("begin")
        signal.raise_signal(number)
        reached.append("end")
    assert reached == ["begin"]
    assert leaving.exit_code == code
    with pytest.raises(Left), leaving.interruptible():
        pytest.fail("a phase was begun after a signal")


def test_except_exception_passes_leaving_on():
    assert not issubclass(Left, Exception)


def test_signal_outside_phase_waits_for_second(monkeypatch):
    ended = []
    given_back = []

    def at_once():
        given_back.append(True)
        raise RuntimeError("a line was being written")

    before = [signal.getsignal(number) for number, _ in EXIT_CODES]
    monkeypatch.setattr(os, "_exit", ended.append)
    leaving = Leaving(at_once)
    with pytest.raises(ZeroDivisionError), leaving.installed():
        with pytest.raises(KeyError), leaving.interruptible():
            raise KeyError
        signal.raise_signal(signal.SIGINT)
        assert leaving()
        assert given_back == ended == []
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert given_back == [True]
    assert ended == [143]
    assert [signal.getsignal(number) for number, _ in EXIT_CODES] == before


def test_wish_waits_for_end_of_phase():
    leaving = Leaving()
    with leaving.installed():
        with leaving.interruptible():
            leaving.leave("pause")
        assert (leaving.reason, leaving.exit_code) == ("pause", 0)
        leaving.leave("finish")
        assert leaving.reason == "pause"
        with pytest.raises(Left), leaving.interruptible():
            pytest.fail("a phase was begun after the wish to leave")
        signal.raise_signal(signal.SIGINT)
    assert (leaving.reason, leaving.exit_code) == ("signal", 130)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("2h", {"seconds": 7200}),
        ("1d2h3m4s", {"seconds": 93784}),
        ("500 samples", {"samples": 500}),
        ("20steps", {"steps": 20}),
    ],
)
def test_budget_is_parsed(text, fields):
    assert Budget.parse(text) == Budget(**fields)


@pytest.mark.parametrize("text", ["", "h", "2", "2 h", "-2h", "30m2h", "0h", "0 steps", "many", "2.5h"])
def test_unreadable_budget_is_refused(text):
    with pytest.raises(ValueError, match="neither a time"):
        Budget.parse(text)


def test_time_budget_ends_without_border_after_overtime():
    budget = Budget(seconds=60)
    late = 60 + OVERTIME_S
    assert not budget.is_exhausted_by(Budget(late - 1, 10**9, 10**9), is_border=False)
    assert budget.is_exhausted_by(Budget(late, 10**9, 10**9), is_border=False)
    assert not ENDLESS_BUDGET.is_exhausted_by(Budget(1e9, 10**9, 10**9), is_border=True)
