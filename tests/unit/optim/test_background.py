"""A call in a thread of its own: its result, or its error, is for who asks."""

import threading

import pytest

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.background import Background

LIMIT_S = 10.0


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_call_is_over_when_it_has_returned(gate):
    work = Background(lambda: gate.wait(LIMIT_S) and "average")
    assert not work.is_over and not work.wait(0.0)
    gate.set()
    assert work.wait(LIMIT_S) and work.is_over
    assert work.result() == work.result() == "average"


def test_the_result_is_waited_for(gate):
    def release():
        gate.set()
        return threading.current_thread()

    def work():
        assert gate.wait(LIMIT_S)
        return threading.current_thread()

    waiting, releasing = Background(work), Background(release)
    assert len({waiting.result(), releasing.result(), threading.current_thread()}) == 3


def test_nothing_is_a_result_too():
    assert Background(lambda: None).result() is None


@pytest.mark.parametrize("error", [RoundFailed("QmB sent nothing"), KeyboardInterrupt()])
def test_an_error_is_raised_where_the_result_is_asked_for(error):
    def fail():
        raise error

    work = Background(fail)
    assert work.wait(LIMIT_S) and work.is_over, "and not before"
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            work.result()
        assert raised.value is error


def test_a_process_may_end_before_it():
    assert Background(threading.current_thread).result().daemon
