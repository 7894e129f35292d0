"""What the verdict on a run is, told from what its peers said and hold."""

from __future__ import annotations

import json

import pytest

from tests.kit.verdicts import (
    back_after,
    find_falls,
    furthest_of,
    judge_data,
    losses_of,
    total_lost,
    worst_jump,
)
from trahiv_cli.optim.ledger import Ledger, Spans


def step(number, t=0.0, group=("a", "b"), lost=0):
    return {"event": "step", "step": number, "t": t, "round": {"group": list(group)}, "data": {"lost": lost}}


def joined(source):
    return {"event": "joined", "source": source}


def test_a_step_that_was_taken_before_and_a_fresh_model_after_a_step_are_falls():
    assert not find_falls([[joined("fresh"), step(1), joined("swarm"), step(2)], [step(2), step(4)]])
    falls = find_falls([[step(1)], [step(2), joined("checkpoint"), step(2)]])
    assert falls == ["peer 1 takes step 2 after step 2"]
    assert find_falls([[joined("fresh"), step(1), joined("fresh")]])


def test_a_peer_is_back_with_its_next_step_in_a_group_and_has_lost_leases_in_all_of_its_lives():
    events = [step(1, 9, lost=2), step(2, 12, ["a"], lost=3), joined("swarm"), step(3, 15, lost=1)]
    assert back_after(events, 10.0) == 5.0
    assert back_after(events, 30.0) is None
    assert total_lost(events) == 4


def test_peers_that_evaluate_after_the_same_step_must_find_the_same():
    def evaluations(losses):
        return [{"event": "eval", "step": at, "eval_loss": loss} for at, loss in losses.items()]

    equal, different = evaluations({10: 2.0, 20: 1.0}), evaluations({20: 1.001})
    assert losses_of([equal, equal]) == ({10: 2.0, 20: 1.0}, [])
    assert "after step 20 peer 1" in losses_of([equal, different])[1][0]
    assert worst_jump({10: 2.0, 20: 1.0, 30: 1.04, 40: 0.9}) == pytest.approx(1.04)


def test_checkpoints_of_the_furthest_step_must_say_the_same(tmp_path):
    for run, number, spans in (("a", 9, ((0, 5),)), ("b", 10, ((0, 8),)), ("c", 10, ((0, 9),))):
        folder = tmp_path / run / "checkpoints" / f"step-{number}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"ledger": Ledger(Spans(spans)).to_wire()}))

    ledger, wrong = furthest_of([tmp_path / run for run in "abc"])
    assert (ledger.covered, len(wrong)) == (Spans(((0, 8),)), 1)
    assert furthest_of([tmp_path / run for run in "ab"])[1] == []


@pytest.mark.parametrize(
    ("spans", "duplicates", "wrong"),
    [
        (((0, 250),), 3, ""),
        (((0, 190), (195, 250)), 0, ""),
        (((0, 50), (60, 250)), 0, "0 passes are complete"),
        (((0, 250),), 4, "4 samples were trained twice, 3 leases"),
    ],
)
def test_a_pass_must_be_whole_and_only_lost_leases_trained_twice(spans, duplicates, wrong):
    verdict = judge_data(Ledger(Spans(spans), duplicates), num_samples=100, leases_lost=3)
    assert len(verdict) == bool(wrong)
    assert all(wrong in one for one in verdict)
