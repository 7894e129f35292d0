"""The figures of the benchmark of losses: when copies are taken, what is compared, and the schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from loss_over_time import (
    COPIES,
    SYNC,
    WARMUP_SHARE,
    Kept,
    Plan,
    Point,
    Run,
    Schedule,
    is_due,
    rate_after,
    seconds_to,
    table,
)

FALLING = [Point(0, 0.0, 3.0), Point(100, 10.0, 2.0), Point(200, 30.0, 1.0)]
PLAN = Plan(seed=0, steps=10, learning_rate=1e-3, base=None)


def run(side, seed, *losses, sent=0, reasons=(), late=0.0):
    """A run that took a copy each 100 samples and 10 s."""
    points = [Point(100 * number, 10.0 * number, loss) for number, loss in enumerate(losses)]
    return Run(side, seed, points, sent, list(reasons), late)


def cells(text, side):
    """What the table says of a side, by the names of the columns."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return dict(zip(head, next(row for row in rows if row[0] == side), strict=True))


def test_steps_of_any_length_leave_a_copy_for_each_part_of_the_run():
    for steps, copies in ((300, COPIES), (7, 7), (3, 3)):
        shares = [(number + 1) / steps for number in range(steps)]
        taken = [0.0]
        for share in shares:
            if is_due(share, taken[-1]):
                taken.append(share)
        assert len(taken) - 1 == copies
        assert taken[-1] == 1.0


def test_the_last_step_leaves_a_copy_when_it_has_too_many_samples():
    assert is_due(1.02, 0.97)


def test_a_run_is_over_with_its_samples_or_with_its_steps():
    schedule = Schedule(PLAN)
    assert schedule.share(0) == 0.0  # before there is an optimizer

    schedule.optimizer = SimpleNamespace(history=SimpleNamespace(samples=760))
    assert schedule.share(9) == pytest.approx(0.95)  # steps had more than 80
    assert schedule.share(10) == 1.0  # local steps that no round has committed are not in the history
    schedule.optimizer.history.samples = 805
    assert schedule.share(9) > 1.0


def test_the_learning_rate_rises_to_the_highest_and_falls_to_0():
    shares = [number / 100 for number in range(101)]
    rates = [rate_after(share) for share in shares]

    assert max(rates) == rate_after(WARMUP_SHARE) == 1.0
    assert rates[0] == 0.0
    assert rates[-1] == pytest.approx(0.0)
    assert rate_after(1.1) == pytest.approx(0.0)  # and does not rise again
    after = rates[round(100 * WARMUP_SHARE) :]
    assert after == sorted(after, reverse=True)


def test_the_time_to_a_loss_lies_on_a_straight_line():
    assert seconds_to(FALLING, 1.5) == pytest.approx(20.0)
    assert seconds_to(FALLING, 2.0) == pytest.approx(10.0)


def test_a_loss_that_was_there_from_the_start_took_no_time():
    assert seconds_to(FALLING, 3.5) == 0.0


def test_a_loss_that_was_not_reached_has_no_time():
    assert seconds_to(FALLING, 0.9) is None


def test_a_loss_counts_when_it_is_reached_first():
    rises_again = [Point(0, 0.0, 2.0), Point(1, 1.0, 1.0), Point(2, 2.0, 1.9), Point(3, 3.0, 1.0)]

    assert seconds_to(rises_again, 1.5) == pytest.approx(0.5)


def test_sides_are_compared_with_sync_of_the_same_seed():
    text = table(
        [
            run(SYNC, 0, 4.0, 2.0, sent=1_000_000),
            run(SYNC, 1, 4.0, 1.0, sent=1_000_000),
            run("diloco-50", 0, 4.0, 2.02, sent=10_000, reasons=["a groupmate left"]),
            run("diloco-50", 1, 4.0, 1.03, sent=10_000),
        ]
    )

    assert cells(text, SYNC)["against sync, %"] == "+0.00 (+0.00 to +0.00)"
    own = cells(text, "diloco-50")
    assert own["against sync, %"] == "+2.00 (+1.00 to +3.00)"
    assert own["final eval loss"] == "1.5250 (1.0300 to 2.0200)"
    assert (own["kB a sample"], own["times fewer than sync"]) == ("0.1", "100.0 (100.0 to 100.0)")
    assert own["to sync + 2 %, s"] == "never"  # one seed did not
    assert own["failed rounds"] == "0.5"


def test_without_sync_nothing_is_compared():
    own = cells(table([run("diloco-50", 0, 4.0, 2.0, sent=5000, late=0.25)]), "diloco-50")

    assert {own[name] for name in ("against sync, %", "to sync + 2 %, s", "times fewer than sync")} == {"-"}
    assert (own["final eval loss"], own["samples"], own["wall time, s"]) == ("2.0000", "100", "10")
    assert own["late"] == "0.250"


def test_runs_are_kept_from_one_call_to_the_next(tmp_path):
    path, about = tmp_path / "runs.json", {"steps": 10}
    first = Kept(path, about)
    first.add(run(SYNC, 1, 3.0, 2.0, sent=5, reasons=["why"], late=0.5))
    first.add(run(SYNC, 0, 3.0, 2.5))
    assert Kept(path, about).runs == first.runs
    assert len(first.runs) == 2


def test_runs_of_another_plan_are_neither_mixed_in_nor_overwritten(tmp_path):
    path = tmp_path / "runs.json"
    Kept(path, {"steps": 10}).add(run(SYNC, 0, 3.0))
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="20"):
        Kept(path, {"steps": 20})
    assert path.read_bytes() == before
