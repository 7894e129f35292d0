"""When a loss was reached, and how sides are compared."""

from __future__ import annotations

import pytest

from tests.kit.losses import SYNC, Point, Run, seconds_to, table

FALLING = [Point(0, 0.0, 3.0), Point(100, 10.0, 2.0), Point(200, 30.0, 1.0)]
RISES_AGAIN = [Point(0, 0.0, 2.0), Point(1, 1.0, 1.0), Point(2, 2.0, 1.9), Point(3, 3.0, 1.0)]


@pytest.mark.parametrize(
    ("points", "loss", "seconds"),
    [
        (FALLING, 1.5, 20.0),
        (FALLING, 2.0, 10.0),
        (FALLING, 3.5, 0.0),
        (FALLING, 0.9, None),
        (RISES_AGAIN, 1.5, 0.5),
    ],
)
def test_the_time_to_a_loss_lies_on_a_straight_line_and_is_the_first(points, loss, seconds):
    assert seconds_to(points, loss) == (None if seconds is None else pytest.approx(seconds))


def run(side, seed, *losses, sent=0, reasons=(), late=0.0):
    """A run that took a copy each 100 samples and 10 s."""
    points = [Point(100 * number, 10.0 * number, loss) for number, loss in enumerate(losses)]
    return Run(side, seed, points, sent, list(reasons), late)


def cells(text, side):
    """What the table says of a side, by the names of the columns."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return dict(zip(head, next(row for row in rows if row[0] == side), strict=True))


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
