"""Peers that read a stream by shards train each of its samples once in a pass, even if one stops half-way."""

from types import SimpleNamespace

import datasets
from trl.trainer.utils import RepeatSampler

from tests.unit.progress.test_leases import Board, Tracker
from trahiv_cli.assets.data import MOST_SHARDS
from trahiv_cli.progress.leases import Leases
from trahiv_cli.progress.ledger import SHARD, Spans
from trahiv_cli.train.division import DividedPrompts, DividedSampler, DividedStream, divide

SHARDS = 4
SAMPLES = 26
BATCH = 3


def stream_of(num_samples=SAMPLES, num_shards=SHARDS):
    rows = datasets.Dataset.from_dict({"number": list(range(num_samples))})
    return rows.to_iterable_dataset(num_shards)


def leases_of(board, number, unit):
    return Leases(Tracker(board, "A"), lambda: board.ledger, number, unit=unit)


class Reader:
    """A peer that reads, and commits each batch before it reads on."""

    def __init__(self, board, seed=7, stream=None):
        self.board = board
        self.stream = DividedStream(stream or stream_of(), BATCH, seed, lambda: False)
        self.stream.lease_from(SimpleNamespace(divide_data=self._divide))
        self._samples = iter(self.stream)

    def _divide(self, number, *, unit):
        self.leases = leases_of(self.board, number, unit)
        return self.leases

    def train(self):
        batch = [next(self._samples)["number"] for _ in range(BATCH)]
        mine = Spans.of_positions(self.stream.next_batch())
        mine |= self.leases.last_positions(mine)
        self.board.ledger = self.board.ledger.extend([mine])
        self.leases.settle(mine)
        return batch


def test_pass_reads_each_sample_once():
    board = Board()
    reader = Reader(board)
    numbers = [number for _ in range(2 * SAMPLES // BATCH) for number in reader.train()]
    second = numbers[SAMPLES:]
    assert sorted(numbers[:SAMPLES]) == list(range(SAMPLES))
    assert len(set(second)) == len(second)
    assert numbers[: len(second)] != second
    assert board.ledger.passes(SHARDS * SHARD)[0] >= 1
    assert board.ledger.duplicates == 0


def test_restarted_peer_reads_on_within_shard():
    straight = Reader(Board())
    expected = [straight.train() for _ in range(6)]
    board = Board()
    before = Reader(board)
    assert [before.train() for _ in range(2)] == expected[:2]
    board.reports.clear()
    after = Reader(board)
    assert [after.train() for _ in range(4)] == expected[2:]


def test_stream_without_seed_is_read_in_order():
    reader = Reader(Board(), seed=None, stream=stream_of(12, 2))
    assert [number for _ in range(4) for number in reader.train()] == list(range(12))


def test_prompt_belongs_to_one_peer():
    prompts = RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, repeat_count=4, seed=7)
    board = Board()
    sampler = DividedPrompts(prompts, BATCH, 7, lambda: False)
    sampler.lease_from(SimpleNamespace(divide_data=lambda number, unit: leases_of(board, number, unit)))
    assert sampler.unit == 4  # two completions, each trained twice
    read = iter(sampler)
    chunks = [[next(read) for _ in range(4 * 6)] for _ in range(2)]
    for chunk, starts in zip(chunks, ([0, 4, 8], [12, 16, 20]), strict=True):
        indices = [sampler.index(start // 4) for start in starts]
        assert chunk == 4 * [index for index in indices for _ in range(2)]
        positions = [position for _ in range(4) for position in sampler.next_batch()]
        assert positions == [
            start + copy for copies in ((0, 1), (2, 3)) for start in starts for copy in copies
        ]
        assert set(positions) < set(sampler.leases.held)
    assert len({index for chunk in chunks for index in chunk}) == 6
    assert len(sampler) == len(prompts)


def test_dataset_is_read_by_whole_batches():
    batches = [[0, 9, 4], [13, 2, 5]]  # of two passes
    given = iter([*batches[0], *batches[1], 8, None])  # None: it leaves
    sampler = DividedSampler(7, BATCH, 7, lambda: False)
    sampler.leases = SimpleNamespace(take=lambda should_leave: next(given))
    assert list(sampler) == [sampler.index(position) for batch in batches for position in batch]
    assert [sampler.next_batch() for _ in batches] == batches
    assert len(sampler) == 6
    assert sorted(map(sampler.index, range(7))) == list(range(7))
    assert list(sampler) == [sampler.index(8)]


def test_only_divisible_data_is_divided(arguments):
    one = datasets.Dataset.from_dict({"number": [1]})
    for samples, strategy, workers, size in (
        (stream_of(), "random", 0, {"number of shards": "4"}),
        (stream_of(2000, 1000), "random", 0, {"number of shards": str(MOST_SHARDS)}),
        (stream_of(), "random", 1, None),
        (one, "random", 1, {"number of samples": "1"}),
        (one, "group_by_length", 0, None),
    ):
        divided = divide(samples, arguments(dataloader_num_workers=workers), strategy, lambda: False)
        assert getattr(divided, "size", None) == size
