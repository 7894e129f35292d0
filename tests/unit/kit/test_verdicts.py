"""What the verdict on a run is, told from what its peers said and hold."""

from __future__ import annotations

import json

import pytest

from tests.kit.verdicts import (
    back_after,
    find_falls,
    furthest_of,
    judge_count,
    judge_data,
    longest_of,
    losses_of,
    rate_of,
    samples_in,
    total_lost,
    worst_jump,
)
from trahiv_cli.optim.ledger import SHARD, Ledger, Spans


def step(number, t=0.0, group=("a", "b"), lost=0):
    step = {"event": "step", "step": number, "t": t, "my_samples": 10}
    return step | {"round": {"group": list(group)}, "data": {"lost": lost}}


def evaluation(at, loss):
    return {"event": "eval", "step": at, "eval_loss": loss}


def joined(source):
    return {"event": "joined", "source": source}


def test_a_step_that_was_taken_before_and_a_fresh_model_after_a_step_are_falls():
    assert not find_falls([[joined("fresh"), step(1), joined("swarm"), step(2)], [step(2), step(4)]])
    falls = find_falls([[step(1)], [step(2), joined("checkpoint"), step(2)]])
    assert falls == ["peer 1 takes step 2 after step 2"]
    assert find_falls([[joined("fresh"), step(1), joined("fresh")]])


def test_a_peer_is_back_with_its_next_step_in_a_group():
    events = [step(1, 9), step(2, 12, group=["a"]), step(3, 15)]
    assert back_after(events, 10.0) == 5.0
    assert back_after(events, 30.0) is None


def test_a_rate_is_that_of_all_from_each_first_step_to_its_last():
    peers = [[step(1, t) for t in (0, 5, 10, 15)], [step(1, t) for t in (1, 6, 16, 21)]]
    assert rate_of(peers, 0, 16.5) == pytest.approx(30 / 15 + 20 / 15)
    assert longest_of(peers, 0, 30) == 10


def test_peers_that_evaluate_after_the_same_step_must_find_the_same():
    equal, different = [evaluation(10, 2.0), evaluation(20, 1.0)], [evaluation(20, 1.001)]
    assert losses_of([equal, equal]) == ({10: 2.0, 20: 1.0}, [])
    assert "after step 20 peer 1" in losses_of([equal, different])[1][0]
    assert worst_jump({10: 2.0, 20: 1.0, 30: 1.04, 40: 0.9}) == pytest.approx(1.04)


def test_checkpoints_of_the_furthest_step_must_say_the_same(tmp_path):
    for run, step_, spans in (("a", 9, ((0, 5),)), ("b", 10, ((0, 8),)), ("c", 10, ((0, 9),))):
        folder = tmp_path / run / "checkpoints" / f"step-{step_}"
        folder.mkdir(parents=True)
        state = {"samples": 7, "ledger": Ledger(Spans(spans)).to_wire()}
        (folder / "state.json").write_text(json.dumps(state))

    furthest, state, _, wrong = furthest_of([tmp_path / run for run in "abc"])
    assert (furthest, state["samples"], len(wrong)) == (10, 7, 1)
    assert furthest_of([tmp_path / run for run in "ab"])[3] == []


@pytest.mark.parametrize(
    ("spans", "duplicates", "wrong"),
    [
        (((0, 250),), 3, None),
        (((0, 190), (195, 250)), 0, None),
        (((0, 50), (60, 250)), 0, "0 passes are complete"),
        (((0, 50),), 0, "0 passes are complete"),
        (((0, 250),), 4, "4 samples were trained twice, 3 leases"),
    ],
)
def test_a_pass_must_be_whole_and_only_lost_leases_trained_twice(spans, duplicates, wrong):
    verdict = judge_data(Ledger(Spans(spans), duplicates), num_samples=100, leases_lost=3)
    assert len(verdict) == (wrong is not None)
    assert wrong is None or wrong in verdict[0]


def test_lost_leases_are_counted_over_all_lives_of_a_peer():
    assert total_lost([step(1, lost=2), step(2, lost=3), joined("swarm"), step(5, lost=1)]) == 4


@pytest.mark.parametrize(
    ("spans", "samples"),
    [
        ((), 0),
        (((0, 3 * SHARD),), 24),
        (((0, SHARD + 5),), 13),
        (((2, SHARD), (SHARD + 4, SHARD + 6)), 8),
    ],
)
def test_the_samples_of_a_shard_are_its_first_positions(spans, samples):
    assert samples_in(Spans(spans), 8) == samples


def test_samples_that_were_counted_and_not_trained_are_found():
    ledger = Ledger(Spans(((0, 2 * SHARD),)), duplicates=3)
    assert judge_count(ledger, 19, 8) == []
    assert judge_count(ledger, 20, 8) == ["20 samples were counted, 19 were trained"]
