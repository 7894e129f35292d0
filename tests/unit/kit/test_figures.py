"""The figures of paced peers: which steps are joint, what the window holds, how a peer joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.figures import (
    LEARNING_RATE,
    Adapted,
    Adopted,
    Committed,
    Downloading,
    Joint,
    Told,
    adaptation,
    find_joint,
    find_window,
    joining_of,
    utilisation,
)
from trahiv_cli.optim.pace import Pace

STEP = 20.0


def told(*steps, calls=(), is_share=False):
    """What a peer tells of steps: key, time, samples, weight, and (else 0) what it held then."""
    return Told(
        calls=list(calls),
        committed={
            key: Committed(at, key, samples, is_share, (weight,) * 3, *(held or (0,)))
            for key, at, samples, weight, *held in steps
        },
    )


def every(seconds, count):
    return [Joint(STEP + number * seconds, 100, 0, 0.0) for number in range(count)]


def overlapped(num_peers=2, pace_s=0.25, exchange_s=8.0, set_up_s=30.0, seconds=200.0, is_lossy=False):
    """What peers tell that compute all the time, while each round takes `exchange_s`.

    The first step is due when they have computed for `set_up_s`, the others as soon as they hold 100 samples
    and the last exchange is over. Lossy ones drop what they computed during an exchange, with the commit.
    """
    peers = [Told() for _ in range(num_peers)]
    held = aside = step = number = 0
    done_at = 0.0
    while number * pace_s < seconds:
        number += 1
        at = number * pace_s
        held += num_peers
        for peer in peers:
            peer.calls.append((at, 0.001))
        if aside and at >= done_at:
            for peer in peers:
                peer.committed[str(step)] = Committed(at, str(step), aside, False, (0.0,), held // num_peers)
            step, aside = step + 1, 0
            held = 0 if is_lossy else held
        if not aside and held >= 100 and at >= set_up_s:
            aside, held, done_at = held, 0, at + exchange_s
    return peers


def used(peers, seconds, pace_s=0.25):
    window, is_closed = find_window(find_joint(peers), seconds, 0.0, peers[0].calls[-1][0])
    assert is_closed
    return utilisation(window, [pace_s] * len(peers))


def test_a_step_counts_when_both_have_committed_it_and_from_then_on():
    both = find_joint([told(("a", 1.0, 100, 0.0)), told(("a", 1.5, 100, 0.0))])
    assert [(one.at, one.samples) for one in both] == [(1.5, 100)]
    assert find_joint([told(("a", 1.0, 100, 0.0)), told(("b", 1.0, 100, 0.0))]) == []


@pytest.mark.parametrize(("apart", "samples"), [(0.0, [99]), (2 * LEARNING_RATE, [])])
def test_shares_of_the_samples_add_up_unless_they_are_of_two_models(apart, samples):
    ours, theirs = told(("3", 1.0, 48, 0.0), is_share=True), told(("3", 1.0, 51, apart), is_share=True)
    assert [one.samples for one in find_joint([ours, theirs])] == samples


@pytest.mark.parametrize(
    ("joint", "is_closed", "window"),
    [
        (every(7.0, 10), True, (STEP, STEP + 21.0, 300, 3)),  # whole cycles, and the one that is under way
        (every(7.0, 2), False, (STEP, 100.0, 100, 1)),  # a swarm that stops committing pays for the time
        ([], False, (3.0, 100.0, 0, 0)),
    ],
)
def test_the_window_opens_with_a_joint_step_and_closes_with_one(joint, is_closed, window):
    found, is_over = find_window(joint, 20.0, 3.0, 100.0)
    assert is_over == is_closed
    assert (found.start, found.end, found.samples, found.steps) == window


def test_the_window_does_not_depend_on_what_comes_after_it():
    closed = find_window(every(7.0, 4), 20.0, 0.0, 50.0)
    assert closed == find_window(every(7.0, 9), 20.0, 0.0, 90.0)
    assert closed[0].samples / (closed[0].end - closed[0].start) == pytest.approx(100 / 7)


@pytest.mark.parametrize("seconds", [10.0, 20.0, 33.0, 120.0])
@pytest.mark.parametrize(("set_up_s", "exchange_s"), [(0.0, 8.0), (30.0, 8.0), (60.0, 8.0), (30.0, 19.0)])
def test_peers_that_never_wait_use_all_of_their_time(set_up_s, exchange_s, seconds):
    assert used(overlapped(set_up_s=set_up_s, exchange_s=exchange_s), seconds) == pytest.approx(1.0)


@pytest.mark.parametrize("seconds", [20.0, 33.0, 120.0])
def test_samples_that_are_dropped_are_missing(seconds):
    """8 s of every 20.5: an exchange, and until 100 samples are there again."""
    assert used(overlapped(is_lossy=True), seconds) == pytest.approx(12.5 / 20.5, abs=0.02)


def test_samples_computed_until_the_others_have_committed_are_held():
    early = told(("a", 1.0, 100, 0.0, 3), calls=[(1.0, 0.2), (1.2, 0.01), (1.4, 0.01), (1.6, 0.01)])
    late = told(("a", 1.5, 100, 0.0, 4), calls=[(1.5, 0.4)])
    assert find_joint([early, late])[0].held == 3 + 2 + 4
    # hivemind tells of its step within `step()`; the sample of that call is in the step.
    early = told(("3", 1.0, 50, 0.0), calls=[(1.3, 0.8), (1.5, 0.01)], is_share=True)
    late = told(("3", 1.5, 50, 0.0), calls=[(1.6, 0.8)], is_share=True)
    assert find_joint([early, late])[0].held == 1


def test_what_is_held_by_a_side_that_stops_committing_does_not_count():
    joint = [Joint(20.0, 100, 30, 0.0), Joint(27.0, 100, 40, 0.0)]
    assert find_window(joint, 20.0, 0.0, 100.0)[0].samples == 100 - 30
    assert find_window(joint[:1], 20.0, 0.0, 100.0)[0].samples == 0


def adapted(at, codec):
    """What mode auto says when it has gone over from `uniform8`, or `float16`, to a codec."""
    before = "float16" if codec == "uniform8" else "uniform8"
    return Adapted(at, 3, "why", Pace("overlap", before), Pace("overlap", codec))


def test_adaptation_is_counted_from_the_fall_by_the_peer_that_is_first_to_send_less():
    steps = [(key, at, 100, 0.0) for key, at in (("a", 10.0), ("b", 20.0), ("c", 30.0), ("d", 40.0))]
    first, second = told(*steps), told(*steps[:2])
    first.adapted = [adapted(12.0, "uniform8"), adapted(20.1, "float16"), adapted(40.1, "blockwise4")]
    second.adapted = [adapted(41.0, "blockwise4")]
    assert adaptation([first, second], 15.0) == (3, pytest.approx(25.1))
    assert adaptation([first, second], 50.0) is None


def test_local_steps_send_less_for_a_step():
    one = replace(adapted(12.0, "blockwise4"), after=Pace("streaming", "uniform8", local_steps=10))
    assert one.is_lighter
    assert not replace(one, after=one.before).is_lighter


# -- how a peer joined ----------------------------------------------------------------------------

STARTED, LIMIT = 100.0, 400.0
RECEIVED = [(100.0, 5), (110.0, 60), (120.0, 99), (130.0, 120), (400.0, 500)]
JOINT = ("a", 140.0, 100, 0.0)


def joined(donor_calls, calls, *, adopted=(), bytes_at=(), steps=(JOINT,)):
    donor, joiner = told(*steps, calls=donor_calls), told(*steps, calls=calls)
    joiner.adopted = [Adopted(at) for at in adopted]
    joiner.downloading = [Downloading(at, num_bytes, 90) for at, num_bytes in bytes_at]
    return joining_of("auto", "20", (donor, joiner), STARTED, LIMIT, RECEIVED)


def test_times_are_since_the_start_of_the_joiners_process():
    one = joined(
        [(99.0, 50.0), (115.0, 0.5), (140.0, 30.0)],
        [(119.0, 0.01), (119.5, 0.01)],
        adopted=[118.5],
        bytes_at=[(108.0, 0), (109.0, 30), (118.0, 90)],
    )
    assert (one.first_byte_s, one.last_byte_s, one.sample_s, one.joint_s) == (9.0, 18.0, 19.0, 40.0)
    assert (one.downloads, one.state_bytes, one.received_bytes) == (1, 90, 99 - 5)
    assert one.donor_stall_s == 0.5


@pytest.mark.parametrize(
    ("adopted", "calls", "sample_s", "downloads"),
    [
        ([110.0, 125.0], [(111.0, 0.1), (125.0, 9.0), (126.0, 0.1)], 26.0, 2),
        ([110.0, 150.0], [(111.0, 0.1), (151.0, 0.1)], 11.0, 1),
    ],
    ids=["a sample that is lost to a second download", "a download after the first joint step"],
)
def test_the_first_sample_is_the_one_that_stays(adopted, calls, sample_s, downloads):
    one = joined([(112.0, 0.1)], calls, adopted=adopted)
    assert (one.sample_s, one.downloads) == (pytest.approx(sample_s), downloads)


def test_a_peer_without_the_state_trains_nothing_in_the_swarm():
    one = joined([(112.0, 0.1)], [(111.0, 0.1), (112.0, 0.1)], steps=())
    assert (one.first_byte_s, one.sample_s, one.joint_s, one.downloads) == (None, None, None, 0)
    assert one.received_bytes == 500 - 5
    assert "never" in str(one)
