"""What the verdict on a stream of small files is told by: the ledger, and the samples that were counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trahiv_cli.optim.ledger import SHARD, Ledger, Spans

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from small_files import judge_count, samples_in


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
