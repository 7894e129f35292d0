"""What a run of many peers comes to, told from their news."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from home_links import Committed, Told, Window
from many_peers import encoded_bytes, result

PACE_S = 0.5
WINDOW = Window(10.0, 30.0, 150, 2)
USE = {"used_s": 16.0, "load": 0.5, "memory": 8 * 2**20}


def peer(sent, received, failures=()):
    """One that committed three steps, the first of which opens the window."""
    steps = [Committed(at, str(at), 80, False, (0.0,), 0, sent, received) for at in (10.0, 20.0, 29.0)]
    calls = [(10.5 + PACE_S * number, 0.002) for number in range(39)]
    return Told(calls=calls, committed={step.key: step for step in steps}, failures=list(failures))


@pytest.mark.parametrize("num_peers", [2, 4, 16])
def test_bytes_are_compared_with_what_a_butterfly_sends(num_peers):
    butterfly = 2 * (num_peers - 1) / num_peers * encoded_bytes("overlap-uniform8")
    told = [peer(butterfly * 1.5, butterfly * 0.7) for _ in range(num_peers)]

    assert result("overlap-uniform8", PACE_S, WINDOW, told, **USE).quotient == pytest.approx(1.1)


def test_utilisation_is_of_what_all_peers_could_have_computed():
    one = result("overlap-uniform8", PACE_S, WINDOW, [peer(1, 1)] * 4, **USE)

    assert one.utilisation == pytest.approx(150 / (4 * 20.0 / PACE_S))


def test_cpu_and_memory_are_of_one_peer():
    one = result("overlap-uniform8", PACE_S, WINDOW, [peer(1, 1)] * 4, **USE)

    assert one.cpu_s == pytest.approx(16.0 / 4 / 2)
    assert one.peer_bytes == 2 * 2**20


def test_bytes_that_the_kernel_does_not_tell_are_unknown():
    one = result("overlap-uniform8", PACE_S, WINDOW, [peer(None, None)] * 2, **USE)

    assert one.quotient != one.quotient


def test_a_codec_has_its_size():
    values = 2**20

    assert encoded_bytes("overlap-uniform8") == pytest.approx(values, rel=0.01)
    assert encoded_bytes("sync-float16") == pytest.approx(2 * values, rel=0.01)
    assert encoded_bytes("sync") == 4 * values
