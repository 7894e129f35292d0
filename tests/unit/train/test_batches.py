"""The weight of a batch, that its gradient enters the swarm's mean with just that weight, and batches that do
not fit into memory."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, Trainer

from tests.unit.train.conftest import SWARM
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.batches import split, weigh
from trahiv_cli.train.hooks import put_in_swarm
from trahiv_cli.train.trainer import SwarmTrainer

LABELS = torch.tensor([[5, 6, 7, -100]])


@pytest.mark.parametrize(
    ("batch", "counts_rows", "samples", "weight"),
    [
        ({"input_ids": torch.zeros(4, 2)}, True, 4, 4.0),  # pairs
        ({"labels": LABELS, "position_ids": None}, True, 4, 2.0),  # packed into one row
        ({"labels": LABELS, "shift_labels": LABELS[:, 2:]}, False, 4, 1.0),
        ({"labels": LABELS}, True, 1, 2.0),  # from a loader of the user's, whose batch size is not known
    ],
)
def test_rows_may_differ_from_samples(batch, counts_rows, samples, weight):
    counted = weigh(batch, batch_size=4, is_shifted=True, counts_rows=counts_rows)
    assert (counted.samples, counted.weight) == (samples, weight)


@pytest.mark.parametrize(
    ("num_batches", "weight"),
    [(0, 4.0), (1, 18.0), (3, 6.0)],
    ids=["by completion", "by token", "by token of three batches"],
)
def test_completions_weigh_as_their_loss(num_batches, weight):
    mask = torch.ones(4, 3, dtype=torch.long)
    mask[0, 1:] = 0
    batch = {"completion_mask": mask, "advantages": torch.zeros(4), "num_items_in_batch": torch.tensor(18)}
    counting = {"is_shifted": True, "counts_rows": True, "num_batches": num_batches}
    counted = weigh(batch, batch_size=4, **counting)
    assert (counted.samples, counted.weight, counted.tokens) == (4, weight, 10)
    parts = [weigh(part, batch_size=size, **counting) for size, part in split(batch, 4, 2)]
    assert [part.weight for part in parts] == [weight / 2] * 2


def rows(*lengths, labels=None):
    """A batch of rows of 9 tokens, of which the first `lengths` have a label; or with other labels."""
    tokens = torch.randint(3, 30, (len(lengths), 9), generator=torch.Generator().manual_seed(sum(lengths)))
    trained = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], tokens, -100)
    return {"input_ids": tokens, "labels": trained if labels is None else torch.tensor(labels)}


class Bench:
    """A plain Trainer and a swarm's of the same model, run by hand over the same window of batches.

    It stands for the swarm's optimizer and callback, and notes their calls.
    """

    local_epoch = 3
    samples_in_time = math.inf
    anchor = 0.0
    agreed_weights = staticmethod(contextlib.nullcontext)

    def __init__(self, arguments, model, batch):
        self.weights = []
        self.lent = []
        self.positions = []
        self.started_over = []
        self.stepped = []
        self.told = []
        self.losses = []
        args = arguments(per_device_train_batch_size=batch, per_device_eval_batch_size=8)
        self.plain = Trainer(copy.deepcopy(model), args)
        self.swarm = SwarmTrainer(model, args, hivemind_config=SWARM, events=Events(self.told.append))
        put_in_swarm(self.swarm)
        self.swarm.swarm_optimizer = self.swarm.swarm_callback = self
        self.work = self
        self.announce = self.positions.append

    def add_loss(self, loss, batch):
        self.losses.append((float(loss), batch))

    def step(self):
        self.stepped.append(len(self.weights))

    def expect_batch(self, samples, weight, *, lend):
        self.anchor = self.anchor or weight
        self.weights.append(weight)
        self.lent.append(lend)
        return weight / self.anchor if self.anchor else 1.0

    def start_batch_over(self, num_samples):
        self.weights = []
        self.anchor = 0.0
        self.started_over.append(num_samples)
        self.swarm.model.zero_grad()

    def limit_memory(self, num_rows, failure=torch.OutOfMemoryError):
        """Have the swarm's trainer fail with more than this number of rows."""

        def run_out(_, args, inputs):
            if len(inputs["input_ids"]) > num_rows:
                raise failure("it fails")

        self.swarm.model.register_forward_pre_hook(run_out, with_kwargs=True)

    def train(self, batches, trainer=None):
        """Forward and backward over one window, as `Trainer` does it; losses and summed gradient."""
        trainer = trainer or self.swarm
        trainer.model.zero_grad()
        taken, items = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
        trainer.current_gradient_accumulation_steps = len(taken)
        losses = [trainer.training_step(trainer.model, batch, items) for batch in taken]
        gradients = [param.grad.flatten() for param in trainer.model.parameters() if param.grad is not None]
        return torch.stack(losses), torch.cat([torch.empty(0), *gradients])

    def train_both(self, batches):
        return self.train(batches), self.train(batches, self.plain)

    @property
    def weights_of_losses(self):
        return [batch.weight for _, batch in self.losses]


@pytest.fixture
def bench(arguments, llama):
    return lambda batch=2, model=None: Bench(arguments, model or llama(), batch)


@pytest.fixture
def it(bench):
    return bench()


def same(one, other):
    return (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_batches_are_weighted_by_tokens(it):
    ours, theirs = it.train_both([rows(9, 9)])
    assert all(map(torch.equal, ours, theirs))
    (loss, gradient), theirs = it.train_both([rows(3, 2)])
    assert torch.equal(loss, theirs[0]), "the logged loss is the batch's own mean"
    assert same(gradient, theirs[1] * 3 / 16)
    assert it.weights == [16.0, 3.0]
    assert it.lent == [True, True]
    told, batch = it.losses[1]
    assert (told, batch.samples, batch.weight, batch.tokens) == (float(loss), 2, 3.0, 3)


def test_window_without_trained_token_has_no_gradient(it):
    for values in it.train([rows(0, 0)] * 2):
        assert not values.any()


def test_scaled_gradients_are_not_lent(it):
    it.swarm.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ours, theirs = it.train_both([rows(9, 9)])
    assert it.lent == [False]
    assert same(ours[1], 4 * theirs[1])


@pytest.mark.parametrize(
    ("cls", "window", "weights"),
    [
        (None, [rows(9, 9), rows(2, 3), rows(9, 4)], [16.0, 3.0, 11.0]),
        (None, [rows(0, 1), rows(9, 9)], [0.0, 16.0]),
        # BERT's losses are each batch's own mean, whatever the window.
        (BertForMaskedLM, [rows(9, 9), rows(1, 2)], [18.0, 3.0]),
        (BertForSequenceClassification, [rows(9, 9, labels=[0, 1]), rows(9, 9, labels=[2, 1])], [2.0, 2.0]),
    ],
)
def test_window_equals_one_large_batch(bench, cls, window, weights):
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    it = bench(model=cls and cls(config))
    losses, ours = it.train(window)
    all_of_it = {key: torch.cat([batch[key] for batch in window]) for key in window[0]}
    loss, theirs = it.train([all_of_it], it.plain)
    assert it.weights == it.weights_of_losses == weights
    assert same(ours * it.anchor / sum(weights), theirs)
    assert same(losses.sum(), loss[0])
    assert it.swarm.current_gradient_accumulation_steps == len(window)


def test_window_without_token_count_is_mean(it):
    it.plain.model_accepts_loss_kwargs = it.swarm.model_accepts_loss_kwargs = False
    ours, theirs = it.train_both([rows(9, 9)] * 4)
    assert same(ours[0], theirs[0])
    assert same(ours[1] / 4, theirs[1])
    assert not it.train([rows(0, 0)])[1].any()


def test_oversized_batch_is_trained_in_parts(bench):
    it = bench(4)
    it.limit_memory(1)
    it.swarm._divided = SimpleNamespace(next_batch=iter(range(9)).__next__)
    for _ in range(2):
        ours, theirs = it.train_both([rows(9, 3, 0, 6)])
        assert same(ours[1] * it.anchor / 15, theirs[1])
        assert same(ours[0], theirs[0])
    assert it.weights == [8.0, 2.0, 0.0, 5.0] * 2
    assert it.positions == [0, 1], "each batch once, also one that was begun three times"
    assert [event["code"] for event in it.told] == ["memory"] * 2, "the second batch begins in parts"
    assert "per_device_train_batch_size: 1" in it.told[1]["hint"]
    ours, theirs = it.train_both([rows(8)])
    assert same(ours[0], theirs[0]), "one row has no parts"


def test_one_row_too_large_for_memory_raises(bench):
    it = bench(4)
    it.limit_memory(0)
    with pytest.raises(torch.OutOfMemoryError):
        it.train([rows(9, 3, 0, 6)])


@pytest.mark.parametrize(
    ("scaler", "weights", "stepped"),
    [(None, [7.0, 1.0, 0.0, 4.0], [1, 2, 3]), (torch.amp.GradScaler("cpu"), [12.0], [])],
)
def test_slow_batch_is_stepped_in_parts_unless_scaled(bench, scaler, weights, stepped):
    it = bench(4)
    it.samples_in_time = 1
    it.swarm.accelerator.scaler = scaler
    it.train([rows(8, 2, 0, 5)])
    assert it.weights == it.weights_of_losses == weights
    assert it.stepped == stepped


def test_slow_window_steps_after_each_batch(bench, monkeypatch):
    it = bench(1)
    it.samples_in_time = 2
    monkeypatch.setattr(type(it.swarm.accelerator), "sync_gradients", False)
    it.train([rows(9)] * 3)
    assert it.stepped == [1, 2, 3]
    assert len(it.losses) == 3


def test_out_of_memory_between_steps_repeats_rest(bench):
    it = bench(4)
    it.samples_in_time = 2
    it.step = lambda: it.limit_memory(1)
    loss, _ = it.train([rows(8, 2, 2, 5)])
    mean = sum(one * batch.weight for one, batch in it.losses) / 13
    assert float(loss) == pytest.approx(mean), "the parts before count in the logged loss"
    assert it.started_over == [2]
    assert it.weights == [1.0, 4.0]
    assert it.weights_of_losses == [8.0, 1.0, 4.0]


def evaluated(trainer, *lengths):
    dataset = [{key: value[0] for key, value in rows(one).items()} for one in lengths]
    return trainer.evaluate(dataset)["eval_loss"]


def test_evaluation_continues_with_smaller_batches(it):
    it.limit_memory(2)
    result = evaluated(it.swarm, *[9] * 8)
    assert result == pytest.approx(evaluated(it.plain, *[9] * 8), rel=1e-6)
    assert evaluated(it.swarm, *[9] * 8) == result
    assert [event["code"] for event in it.told] == ["memory"] * 2, "later ones begin with fewer"
    assert "per_device_eval_batch_size: 2" in it.told[1]["hint"]


@pytest.mark.parametrize(("failure", "warnings"), [(torch.OutOfMemoryError, 3), (RuntimeError, 0)])
def test_only_lack_of_memory_shrinks_evaluation(it, failure, warnings):
    it.limit_memory(0, failure)
    with pytest.raises(failure, match="it fails"):
        evaluated(it.swarm, 9)
    assert len(it.told) == warnings, "with 4, 2 and 1"


def test_parts_hold_each_sample_once():
    numbers = torch.arange(5)
    batch = {"input_ids": numbers, "names": list("abcde"), "return_loss": True, "scale": torch.tensor(2.0)}
    parts = split(batch, 5, 2)
    listed = [(size, part["input_ids"].tolist(), part["names"]) for size, part in parts]
    assert listed == [(2, [0, 1], ["a", "b"]), (3, [2, 3, 4], ["c", "d", "e"])]
    assert all((part["return_loss"], part["scale"]) == (True, 2) for _, part in parts)
    assert parts[0][1]["input_ids"].data_ptr() == numbers.data_ptr(), "a view"


def test_pairs_are_divided_together():
    batch = {"input_ids": torch.tensor([1, 2, -1, -2]), "texts": list("abxy"), "p": torch.tensor([3, 4])}
    parts = [{name: list(rows) for name, rows in part.items()} for _, part in split(batch, 2, 2)]
    assert parts == [
        {"input_ids": [1, -1], "texts": ["a", "x"], "p": [3]},
        {"input_ids": [2, -2], "texts": ["b", "y"], "p": [4]},
    ]


def test_indivisible_batch_is_one_part():
    for size, batch in (
        (1, {"labels": torch.arange(1)}),
        (4, {"input_ids": torch.zeros(1, 64), "position_ids": torch.zeros(1, 64)}),  # packed into one row
        (2, {"input_ids": torch.zeros(2, 8), "pixel_values": torch.zeros(7, 3)}),  # images of several pieces
        (4, {"return_loss": True}),
    ):
        assert split(batch, size, 2) == []
        assert split(batch, size, 1) == [(size, batch)]
