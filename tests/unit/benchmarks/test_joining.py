"""How a peer joined, told from the news of two peers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from home_links import Adopted, Committed, Downloading, Told
from joining import result

STARTED, LIMIT = 100.0, 400.0
RECEIVED = [(100.0, 5), (110.0, 60), (120.0, 99), (130.0, 120), (400.0, 500)]


def step(at, key="a"):
    return {key: Committed(at, key, 100, False, (0.0,), 0)}


def donor(*calls, committed=None):
    return Told(calls=list(calls), committed=committed or {})


def joiner(*, bytes_at=(), adopted=(), calls=(), committed=None):
    return Told(
        calls=list(calls),
        committed=committed or {},
        downloading=[Downloading(at, num_bytes, 90) for at, num_bytes in bytes_at],
        adopted=[Adopted(at) for at in adopted],
    )


def joined(*told):
    return result("auto", 20.0, told, STARTED, LIMIT, RECEIVED)


def test_times_are_since_the_start_of_the_joiners_process():
    one = joined(
        donor((99.0, 50.0), (115.0, 0.5), (140.0, 30.0), committed=step(140.0)),
        joiner(
            bytes_at=[(108.0, 0), (109.0, 30), (118.0, 90)],
            adopted=[118.5],
            calls=[(119.0, 0.01), (119.5, 0.01)],
            committed=step(139.0),
        ),
    )

    assert (one.first_byte_s, one.last_byte_s, one.sample_s, one.joint_s) == (9.0, 18.0, 19.0, 40.0)
    assert (one.downloads, one.state_bytes, one.received_bytes) == (1, 90, 99 - 5)
    assert one.donor_stall_s == 0.5


def test_a_sample_that_is_lost_to_a_second_download_is_not_the_first():
    one = joined(
        donor((112.0, 0.1), committed=step(140.0)),
        joiner(
            adopted=[110.0, 125.0], calls=[(111.0, 0.1), (125.0, 9.0), (126.0, 0.1)], committed=step(140.0)
        ),
    )

    assert one.sample_s == pytest.approx(26.0)
    assert one.downloads == 2


def test_a_download_after_the_first_joint_step_has_nothing_to_do_with_joining():
    one = joined(
        donor((112.0, 0.1), committed=step(140.0)),
        joiner(adopted=[110.0, 150.0], calls=[(111.0, 0.1), (151.0, 0.1)], committed=step(140.0)),
    )

    assert (one.sample_s, one.downloads) == (11.0, 1)


def test_a_peer_without_the_state_trains_nothing_in_the_swarm():
    one = joined(donor((112.0, 0.1)), joiner(calls=[(111.0, 0.1), (112.0, 0.1)]))

    assert (one.first_byte_s, one.sample_s, one.joint_s, one.downloads) == (None, None, None, 0)
    assert one.received_bytes == 500 - 5
    assert "never" in str(one)
