"""Judges of runs and links in tests and benchmarks find errors: else all would pass for nothing."""

import json

import pytest

from tests.kit.figures import (
    LEARNING_RATE,
    Committed,
    Joint,
    Told,
    Window,
    find_joint,
    find_window,
    utilisation,
)
from tests.kit.verdicts import (
    back_after,
    find_broken_promises,
    find_falls,
    find_lost_steps,
    furthest_of,
    judge_data,
    losses_of,
    total_lost,
    worst_jump,
)
from tests.kit.wan import MIN_QUEUE_BYTES, QUEUE_S, Line
from trahiv_cli.progress.ledger import Ledger, Spans


def story(name, *steps):
    """What a peer tells: that it is ready, and its steps."""
    return [{"event": "ready", "peer": name, "step": 0, "samples": 0, "digest": "0", "weights": "w0"}, *steps]


def step(digest, parent, number, **changes):
    """A step of peers A and B, of 8 samples each, as A reports it."""
    return {
        "event": "step", "parent": parent, "left_out": {}, "step": number, "digest": digest,
        "weights": f"w{digest}", "samples": 16 * number, "step_samples": 16, "my_samples": 8, "held": 8,
        "contributed": {"A": 8, "B": 8}, **changes,
    }  # fmt: skip


FIRST, SECOND = step("1", "0", 1), step("2", "1", 2)


@pytest.mark.parametrize(
    ("peers", "last", "broken"),
    [
        ("ab", {}, ""),
        ("ab", {"weights": "x"}, "b holds"),
        ("ab", {"contributed": {"A": 16}, "left_out": {"B": "its gradient"}}, "b came to 2 by"),
        ("b", {"held": 16}, "b held 16 samples"),
        ("b", {"contributed": {"A": 16}}, "b held 8 samples"),
        ("b", {"contributed": {"A": 16}, "left_out": {"B": "it is not finite"}}, ""),
        ("b", {"step_samples": 24, "samples": 40}, "b counted 24 samples"),
        ("b", {"samples": 40}, "step 2 does not add 16"),
    ],
)
def test_broken_promise_is_found(peers, last, broken):
    everything = {"a": story("A", FIRST, SECOND), "b": story("B", FIRST, SECOND | last)}
    told = find_broken_promises({peer: everything[peer] for peer in peers})
    assert any(one.startswith(broken) for one in told) if broken else told == []


def taken(number, t=0.0, group=("a", "b"), lost=0):
    return {"event": "step", "step": number, "t": t, "round": {"group": group}, "data": {"lost": lost}}


def evaluated(step, loss):
    return {"event": "eval", "step": step, "eval_loss": loss}


FRESH, SWARM = ({"event": "joined", "source": source} for source in ("fresh", "swarm"))
OURS = story("A", FIRST, SECOND)
AFTER = [taken(1, 9), taken(2, 12, ["a"]), taken(3, 15)]


@pytest.mark.parametrize(
    ("judge", "told", "said"),
    [
        (find_lost_steps, [{"a": OURS, "b": story("B", FIRST, SECOND)}], {}),
        (find_lost_steps, [{"a": OURS, "b": story("B", step("x", "0", 1))}], {"x": ["b"]}),
        (find_falls, [[[FRESH, taken(1), SWARM, taken(2)], [taken(2), taken(4)]]], []),
        (find_falls, [[[taken(1)], [taken(2), SWARM, taken(2)]]], ["peer 1 takes step 2 after step 2"]),
        (find_falls, [[[taken(1), FRESH]]], ["peer 0 begins with a fresh model after step 1"]),
        (back_after, [AFTER, 10.0], 5.0),
        (back_after, [AFTER, 30.0], None),
        (total_lost, [[taken(1, lost=2), taken(2, lost=3), SWARM, taken(3, lost=1)]], 4),
        (losses_of, [[[evaluated(10, 2.0), evaluated(20, 1.0)]] * 2], ({10: 2.0, 20: 1.0}, [])),
        (
            losses_of,
            [[[evaluated(20, 1.0)], [evaluated(20, 1.001)]]],
            ({20: 1.0}, ["after step 20 peer 1 has a loss of 1.001000, peer 0 of 1.000000"]),
        ),
        (worst_jump, [{10: 2.0, 20: 1.0, 30: 1.04, 40: 0.9}], pytest.approx(1.04)),
        (judge_data, [Ledger(Spans(((0, 250),)), 3), 100, 3], []),
        (judge_data, [Ledger(Spans(((0, 190), (195, 250)))), 100, 3], []),
        (
            judge_data,
            [Ledger(Spans(((0, 50), (60, 250)))), 100, 3],
            ["0 passes are complete, and the 3th has begun"],
        ),
        (
            judge_data,
            [Ledger(Spans(((0, 250),)), 4), 100, 3],
            ["4 samples were trained twice, 3 leases were lost"],
        ),
        (utilisation, [Window(0.0, 10.0, 10, 1), [0.5, 0.5]], 0.25),
    ],
)
def test_judge_finds_errors(judge, told, said):
    assert judge(*told) == said


@pytest.mark.parametrize(("runs", "num_wrong"), [("ab", 0), ("abc", 1)])
def test_furthest_checkpoints_must_agree(tmp_path, runs, num_wrong):
    for run, number, end in (("a", 9, 5), ("b", 10, 8), ("c", 10, 9)):
        folder = tmp_path / run / "checkpoints" / f"step-{number}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"ledger": Ledger(Spans(((0, end),))).to_wire()}))
    ledger, wrong = furthest_of([tmp_path / run for run in runs])
    assert ledger.covered == Spans(((0, 8),))
    assert len(wrong) == num_wrong


def told(key, at, samples, weight=0.0, held=0, calls=(), is_share=False):
    """A peer's report of its only step."""
    return Told(calls=calls, committed={key: Committed(at, key, samples, is_share, held, (weight,) * 3)})


@pytest.mark.parametrize(
    ("others", "weight", "is_share", "joint"),
    [
        ("a", 0.0, False, [(1.5, 48)]),
        ("b", 0.0, False, []),
        ("a", 0.0, True, [(1.5, 99)]),
        ("a", 2 * LEARNING_RATE, True, []),  # of two models
    ],
)
def test_joint_step_needs_both_commits(others, weight, is_share, joint):
    ours, theirs = told("a", 1.0, 48, is_share=is_share), told(others, 1.5, 51, weight, is_share=is_share)
    assert [(one.at, one.samples) for one in find_joint([ours, theirs])] == joint


def test_samples_before_last_commit_are_held():
    early = told("a", 1.0, 100, held=3, calls=[(1.0, 0.2), (1.2, 0.01), (1.4, 0.01), (1.6, 0.01)])
    late = told("a", 1.5, 100, held=4, calls=[(1.5, 0.4)])
    assert find_joint([early, late])[0].held == 3 + 2 + 4
    # hivemind reports its step within `step()`; the sample of that call is in the step.
    early = told("3", 1.0, 50, calls=[(1.3, 0.8), (1.5, 0.01)], is_share=True)
    late = told("3", 1.5, 50, calls=[(1.6, 0.8)], is_share=True)
    assert find_joint([early, late])[0].held == 1


def every(seconds, count, held=0):
    """Steps of 100 samples, each with ten more held samples than the one before."""
    return [Joint(20.0 + number * seconds, 100, held + 10 * number) for number in range(count)]


@pytest.mark.parametrize(
    ("joint", "is_closed", "window"),
    [
        (every(7.0, 10), True, (20.0, 41.0, 330, 3)),  # whole cycles, and the one that is under way
        (every(7.0, 4), True, (20.0, 41.0, 330, 3)),  # whatever comes after it
        (every(7.0, 2, held=30), False, (20.0, 100.0, 70, 1)),  # a stop counts as time, and loses
        ([], False, (3.0, 100.0, 0, 0)),
    ],
)
def test_window_spans_whole_joint_steps(joint, is_closed, window):
    assert find_window(joint, 20.0, 3.0, 100.0) == (Window(*window), is_closed)


def test_line_delays_by_rate():
    line = Line(10)
    num_bytes = 1250  # such a packet takes a millisecond
    assert [line.take(at, num_bytes) for at in (5.0, 5.0, 7.0)] == pytest.approx([5.001, 5.002, 7.001])
    line.set_rate(5)
    assert line.take(7.0, num_bytes) == pytest.approx(7.003)


@pytest.mark.parametrize(
    ("rate_mbit", "limit_bytes"), [(1, MIN_QUEUE_BYTES), (100, int(QUEUE_S * 100e6 / 8))]
)
def test_full_line_drops_packets(rate_mbit, limit_bytes):
    line = Line(rate_mbit)
    room = limit_bytes // 1250
    taken = [line.take(0.0, 1250) is not None for _ in range(room + 3)]
    assert taken == [True] * room + [False] * 3
    assert line.take(60.0, 1250) is not None, "it is empty again"
