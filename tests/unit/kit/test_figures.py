"""The figures of paced peers: which steps are joint, and what the window holds."""

from __future__ import annotations

import pytest

from tests.kit.figures import LEARNING_RATE, Committed, Joint, Told, find_joint, find_window, utilisation

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


def utilisation_of(seconds, set_up_s=30.0, exchange_s=8.0, is_lossy=False):
    """That of two peers that compute all the time, a sample each 0.25 s, while each round takes `exchange_s`.

    The first step is due when they have computed for `set_up_s`, the others as soon as they hold 100 samples
    and the last exchange is over. Lossy ones drop what they computed during an exchange, with the commit.
    """
    peers, held, aside, step, done_at = [Told(), Told()], 0, 0, 0, 0.0
    for number in range(1, 800):
        at = number * 0.25
        held += 2
        for peer in peers:
            peer.calls.append((at, 0.001))
        if aside and at >= done_at:
            for peer in peers:
                peer.committed[str(step)] = Committed(at, str(step), aside, False, (0.0,), held // 2)
            step, aside = step + 1, 0
            held = 0 if is_lossy else held
        if not aside and held >= 100 and at >= set_up_s:
            aside, held, done_at = held, 0, at + exchange_s
    window, is_closed = find_window(find_joint(peers), seconds, 0.0, peers[0].calls[-1][0])
    assert is_closed
    return utilisation(window, [0.25, 0.25])


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
        (every(7.0, 4), True, (STEP, STEP + 21.0, 300, 3)),  # whatever comes after it
        (every(7.0, 2), False, (STEP, 100.0, 100, 1)),  # a swarm that stops committing pays for the time
        ([Joint(20.0, 100, 30, 0.0), Joint(27.0, 100, 40, 0.0)], False, (20.0, 100.0, 70, 1)),  # and loses
        ([], False, (3.0, 100.0, 0, 0)),
    ],
)
def test_the_window_opens_with_a_joint_step_and_closes_with_one(joint, is_closed, window):
    found, is_over = find_window(joint, 20.0, 3.0, 100.0)
    assert is_over == is_closed
    assert (found.start, found.end, found.samples, found.steps) == window


@pytest.mark.parametrize("seconds", [20.0, 33.0, 120.0])
@pytest.mark.parametrize(("set_up_s", "exchange_s"), [(0.0, 8.0), (60.0, 8.0), (30.0, 19.0)])
def test_peers_that_never_wait_use_all_of_their_time_but_for_samples_that_are_dropped(
    set_up_s, exchange_s, seconds
):
    assert utilisation_of(seconds, set_up_s, exchange_s) == pytest.approx(1.0)
    lossy = utilisation_of(seconds, set_up_s, is_lossy=True)
    assert lossy == pytest.approx(12.5 / 20.5, abs=0.02), "8 s of every 20.5: until 100 are there again"


def test_samples_computed_until_the_others_have_committed_are_held():
    early = told(("a", 1.0, 100, 0.0, 3), calls=[(1.0, 0.2), (1.2, 0.01), (1.4, 0.01), (1.6, 0.01)])
    late = told(("a", 1.5, 100, 0.0, 4), calls=[(1.5, 0.4)])
    assert find_joint([early, late])[0].held == 3 + 2 + 4
    # hivemind tells of its step within `step()`; the sample of that call is in the step.
    early = told(("3", 1.0, 50, 0.0), calls=[(1.3, 0.8), (1.5, 0.01)], is_share=True)
    late = told(("3", 1.5, 50, 0.0), calls=[(1.6, 0.8)], is_share=True)
    assert find_joint([early, late])[0].held == 1
