"""The wish to leave, with real signals."""

import os
import signal
import subprocess
import sys

import pytest

from trahiv_cli.train.leaving import Leaving, Left

PEER = """
import sys
from trahiv_cli.train.leaving import Leaving

leaving = Leaving(at_once=lambda: print("the terminal is given back", flush=True))
with leaving.installed():
    print("ready", flush=True)
    for _ in sys.stdin:
        print(leaving(), leaving.exit_code, flush=True)
sys.exit(leaving.exit_code)
"""
EXIT_CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
def peer():
    """A process that answers whether it wants to leave, once a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", PEER], **pipes) as process:
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
