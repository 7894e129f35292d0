"""A call in a thread of its own: its result, or its error, is for who asks."""

import threading

import pytest

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.background import Background

LIMIT_S = 10.0


@pytest.mark.parametrize("value", ["average", None])
def test_a_call_is_over_when_it_has_returned(value):
    gate, threads = threading.Event(), []

    def call():
        threads.append(threading.current_thread())
        gate.wait(LIMIT_S)
        return value

    work = Background(call)
    assert not work.is_over and not work.wait(0.0)
    gate.set()
    assert work.wait(LIMIT_S) and work.is_over and work.error is None
    assert work.result() is work.result() is value
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon, "a process may end before it"


@pytest.mark.parametrize("error", [RoundFailed("QmB sent nothing"), KeyboardInterrupt()])
def test_an_error_is_raised_where_the_result_is_asked_for(error):
    def fail():
        raise error

    work = Background(fail)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            work.result()
        assert raised.value is error is work.error and work.is_over
