"""What the verdict on a run full of faults is, told from what its peers said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trahiv_cli.optim.ledger import Ledger, Spans

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from chaos import NUM_PEERS, SHARES, Fault, find_falls, judge_data, losses_of, note_returns, plan, total_lost
from chaos import worst_jump as worst


def step(number, t=0.0, group=("a", "b"), lost=0):
    return {"event": "step", "step": number, "t": t, "round": {"group": list(group)}, "data": {"lost": lost}}


def evaluation(at, loss):
    return {"event": "eval", "step": at, "eval_loss": loss}


def joined(source):
    return {"event": "joined", "source": source}


def test_the_seed_draws_the_faults():
    assert plan(3, 66, 1800) == plan(3, 66, 1800) != plan(4, 66, 1800)


def test_faults_of_all_kinds_strike_all_peers_within_the_time():
    faults = plan(0, 200, 1800)

    assert {fault.kind for fault in faults} == set(SHARES)
    assert {fault.peer for fault in faults} == set(range(NUM_PEERS))
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert 0 <= faults[0].at_s and faults[-1].at_s <= 1800
    assert all(fault.peer not in fault.others for fault in faults)
    assert {fault.peer for fault in faults if fault.kind == "restart-first"} == {0}


def test_a_step_that_was_taken_before_is_a_fall():
    assert not find_falls([[step(1), joined("swarm"), step(2)], [step(2), step(4)]])
    assert find_falls([[step(1)], [step(2), joined("checkpoint"), step(2)]]) == [
        "peer 1 takes step 2 after step 2"
    ]


def test_a_fresh_model_after_a_step_is_a_fall():
    assert not find_falls([[joined("fresh"), step(1)]])
    assert find_falls([[joined("fresh"), step(1), joined("fresh")]])


def test_peers_that_evaluate_after_the_same_step_must_find_the_same():
    equal, different = [evaluation(10, 2.0), evaluation(20, 1.0)], [evaluation(20, 1.001)]

    assert losses_of([equal, equal]) == ({10: 2.0, 20: 1.0}, [])
    assert "after step 20 peer 1" in losses_of([equal, different])[1][0]


def test_the_worst_jump_is_between_two_evaluations():
    assert worst({10: 2.0, 20: 1.0, 30: 1.04, 40: 0.9}) == pytest.approx(1.04)


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


def test_a_peer_is_back_with_its_next_step_in_a_group():
    fault, other = Fault(0, "kill", 0, 0.5, t=10.0), Fault(0, "kill", 0, 0.5, t=30.0)
    note_returns([fault, other], [[step(1, 9), step(2, 12, group=["a"]), step(3, 15)]])

    assert (fault.back_s, other.back_s) == (5.0, None)
