"""Peers that read a stream by shards train each of its samples once in a pass, whoever stops half-way."""

from __future__ import annotations

import datasets
import pytest

from tests.unit.optim.test_leases import Board, Tracker
from trahiv_cli.assets.data import MOST_SHARDS, is_divisible, shards_of
from trahiv_cli.optim.leases import ShardLeases
from trahiv_cli.optim.ledger import SHARD, Spans
from trahiv_cli.train.division import DividedStream

SHARDS = 4
SAMPLES = 26
"""Shards of 6 and 7 samples."""

BATCH = 3


@pytest.fixture
def board():
    return Board()


def stream_of(num_samples=SAMPLES, num_shards=SHARDS):
    rows = datasets.Dataset.from_dict({"number": list(range(num_samples))})
    return rows.to_iterable_dataset(num_shards)


class Reader:
    """A peer that reads, and commits each batch before it reads on."""

    def __init__(self, board, name, rank=0, seed=7, stream=None):
        self.board, self.name = board, name
        self.stream = DividedStream(stream or stream_of(), BATCH, seed, lambda: False)
        self.leases = self.stream.leases = ShardLeases(
            Tracker(board, name, rank), lambda: board.ledger, self.stream.num_shards
        )
        self._samples = iter(self.stream)

    def read(self):
        batch = [next(self._samples)["number"] for _ in range(BATCH)]
        return batch, self.stream.delivery.next_batch()

    def commit(self, positions):
        mine = Spans.of_positions(positions)
        mine |= Spans.of_positions(self.leases.last_positions(mine))
        self.board.ledger = self.board.ledger.extend([mine])
        self.leases.settle(mine)

    def train(self):
        batch, positions = self.read()
        self.commit(positions)
        return batch

    def die(self):
        del self.board.reports[self.name]


def passes_of(board):
    return board.ledger.passes(SHARDS * SHARD)[0]


def test_a_lone_peer_reads_each_sample_once_in_a_pass_in_another_order_each_time(board):
    reader = Reader(board, "A")
    numbers = [number for _ in range(2 * SAMPLES // BATCH) for number in reader.train()]
    first, second = numbers[:SAMPLES], numbers[SAMPLES : 2 * SAMPLES]
    assert sorted(first) == list(range(SAMPLES)) and len(set(second)) == len(second)
    assert first[: len(second)] != second
    assert passes_of(board) >= 1 and board.ledger.duplicates == 0


def test_without_a_seed_the_order_is_that_of_the_stream(board):
    reader = Reader(board, "A", seed=None, stream=stream_of(12, 2))
    assert [number for _ in range(4) for number in reader.train()] == list(range(12))


def test_peers_read_different_shards(board):
    readers = [Reader(board, name, rank) for rank, name in enumerate("AB")]
    numbers = [number for _ in range(3) for reader in readers for number in reader.train()]
    assert len(set(numbers)) == len(numbers)


def test_what_a_dead_peer_had_begun_others_read_to_its_end(board):
    first, second = (Reader(board, name, rank) for rank, name in enumerate("AB"))
    trained = first.train() + second.train()
    first.read()  # never committed
    first.die()
    while not passes_of(board):
        trained += second.train()
    assert sorted(trained[:SAMPLES]) == list(range(SAMPLES))
    assert board.ledger.duplicates == 0


def test_a_peer_that_starts_again_goes_on_in_the_middle_of_its_shard(board):
    straight = Reader(Board(), "A")
    expected = [straight.train() for _ in range(6)]
    before = Reader(board, "A")
    trained = [before.train(), before.train()]
    before.die()
    again = Reader(board, "A")
    assert [*trained, *(again.train() for _ in range(4))] == expected


def test_samples_whose_gradients_were_dropped_are_read_again(board):
    reader = Reader(board, "A")
    dropped, positions = reader.read()
    reader.leases.give_back(positions)
    trained = []
    while not passes_of(board):
        trained += reader.train()
    assert sorted(trained[:SAMPLES]) == list(range(SAMPLES))
    assert set(dropped) <= set(trained)


def test_a_shard_that_another_peer_has_taken_over_is_left_to_it(board):
    first = Reader(board, "A")
    trained = first.train()
    first.die()  # its report has expired, as of one that was stopped for long
    second = Reader(board, "B")
    trained += second.train()
    _, positions = first.read()
    first.leases._reports.look()
    first.leases.settle(())
    assert first.leases.lost == 1
    assert not first.leases.has(positions[0] // SHARD * SHARD)
    for _ in range(2):
        trained += second.train() + first.train()
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize(
    ("samples", "workers", "is_divided"),
    [
        (stream_of(), 0, True),
        (stream_of(), 1, False),
        (stream_of(num_shards=1), 0, False),
        (datasets.Dataset.from_dict({"number": [1]}), 1, True),
    ],
    ids=["stream", "stream in other processes", "one shard", "data set"],
)
def test_what_has_no_shards_is_not_divided(samples, workers, is_divided):
    assert is_divisible(samples, workers) == is_divided


def test_many_files_are_divided_in_groups():
    assert shards_of(stream_of(2000, 1000)) == MOST_SHARDS
