"""The weight of a batch, that its gradient enters the swarm's mean with just that weight, and batches that do
not fit into memory."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, Trainer

from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.batches import split, weigh
from trahiv_cli.train.hooks import put_in_swarm
from trahiv_cli.train.settings import SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer

SWARM = {"opt": {"run_id": "run-1", "target_batch_size": 64}}
LABELS = torch.tensor([[5, 6, 7, -100]])


@pytest.mark.parametrize(
    ("batch", "samples", "weight"),
    [
        ({"input_ids": torch.zeros(4, 2)}, 4, 4.0),
        ({"labels": LABELS, "position_ids": torch.tensor([[0, 1, 0, 1]])}, 4, 2.0),
        ({"labels": LABELS, "shift_labels": torch.tensor([[6, 7, -100]])}, 4, 2.0),
    ],
    ids=["pairs", "one row", "shifted already"],
)
def test_rows_may_differ_from_samples(batch, samples, weight):
    counted = weigh(batch, batch_size=4, is_shifted=True)
    assert (counted.samples, counted.weight) == (samples, weight)
    rows = weigh({"labels": LABELS}, batch_size=4, is_shifted=True, counts_rows=True)
    assert rows.samples == len(LABELS), "the size of a batch of a loader of the user's is not known"


class Announced:
    """Answers as the swarm's optimizer does, without a swarm, and notes its calls."""

    def __init__(self, trainer):
        self._model = trainer.model
        self.weights, self.lent, self.anchor = [], [], 0.0
        self.local_epoch, self.max_steps = 3, 9
        self.positions, self.started_over = [], []
        self.samples_in_time, self.stepped = math.inf, []
        self.parts = SimpleNamespace(work=SimpleNamespace(announce=self.positions.append))

    agreed_weights = staticmethod(contextlib.nullcontext)

    def step(self):
        self.stepped.append(len(self.weights))

    def expect_batch(self, samples, weight, *, lend):
        self.anchor = self.anchor or weight
        self.weights.append(weight)
        self.lent.append(lend)
        return weight / self.anchor if self.anchor else 1.0

    def start_batch_over(self, num_samples):
        self.weights, self.anchor = [], 0.0
        self.started_over.append(num_samples)
        self._model.zero_grad()


def rows(*lengths, labels=None):
    """A batch of rows of 9 tokens, of which the first `lengths` have a label; or with other labels."""
    tokens = torch.randint(3, 30, (len(lengths), 9), generator=torch.Generator().manual_seed(sum(lengths)))
    trained = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], tokens, -100)
    return {"input_ids": tokens, "labels": trained if labels is None else torch.tensor(labels)}


class Bench:
    """A plain Trainer and a swarm's of the same model, run by hand over the same window of batches."""

    def __init__(self, arguments, model, batch=2):
        sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": 8}
        self.told, self.losses = [], []
        self.plain = Trainer(model=copy.deepcopy(model), args=arguments(**sizes))
        args = arguments(SwarmTrainingArguments, hivemind_config=SWARM, **sizes)
        self.swarm = SwarmTrainer(model=copy.deepcopy(model), args=args, events=Events(self.told.append))
        put_in_swarm(self.swarm)
        self.optimizer = self.swarm.swarm_optimizer = Announced(self.swarm)
        self.swarm.swarm_callback = SimpleNamespace(
            add_loss=lambda loss, batch: self.losses.append((float(loss), batch)),
            on_step_end=lambda *_: None,
        )

    def limit_memory(self, num_rows, failure=torch.OutOfMemoryError):
        """Have the swarm's trainer fail with more than this number of rows."""

        def run_out(_, args, inputs):
            if len(inputs["input_ids"]) > num_rows:
                raise failure("it fails")

        self.swarm.model.register_forward_pre_hook(run_out, with_kwargs=True)

    @staticmethod
    def train(trainer, batches):
        """Forward and backward over one window, as `Trainer` does it; losses and summed gradient."""
        trainer.model.zero_grad()
        taken, items = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
        trainer.current_gradient_accumulation_steps = len(taken)
        losses = [trainer.training_step(trainer.model, batch, items) for batch in taken]
        gradients = [param.grad.flatten() for param in trainer.model.parameters() if param.grad is not None]
        return torch.stack(losses), torch.cat([torch.empty(0), *gradients])


@pytest.fixture
def bench(arguments):
    return lambda model, **more: Bench(arguments, model, **more)


def same(one, other, tolerance=1e-5):
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def test_shorter_batch_is_weighted_by_tokens(bench, llama):
    it = bench(llama())
    for _ in range(2):
        ours, theirs = it.train(it.swarm, [rows(9, 9)]), it.train(it.plain, [rows(9, 9)])
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    ours, theirs = it.train(it.swarm, [rows(3, 2)]), it.train(it.plain, [rows(3, 2)])
    assert it.optimizer.weights == [16.0, 16.0, 3.0] and all(it.optimizer.lent)
    assert torch.equal(ours[0], theirs[0]), "the logged loss is the batch's own mean"
    assert same(ours[1], theirs[1] * 3 / 16)
    loss, batch = it.losses[2]
    assert (loss, batch.samples, batch.weight, batch.tokens) == (float(theirs[0]), 2, 3.0, 3)
    losses, gradients = it.train(it.swarm, [rows(0, 0)] * 2)
    assert not losses.any() and not gradients.any(), "a window that trains nothing"
    it.swarm.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    _, scaled = it.train(it.swarm, [rows(9, 9)])
    assert not it.optimizer.lent[-1] and same(scaled, 4 * it.train(it.plain, [rows(9, 9)])[1])


@pytest.mark.parametrize(
    ("cls", "window", "weights"),
    [
        (None, [rows(9, 9), rows(2, 3), rows(9, 4)], [16.0, 3.0, 11.0]),
        (None, [rows(9, 9), rows(0, 0)], [16.0, 0.0]),
        (None, [rows(0, 1), rows(9, 9)], [0.0, 16.0]),
        (BertForMaskedLM, [rows(9, 9), rows(1, 2)], [18.0, 3.0]),
        (BertForSequenceClassification, [rows(9, 9, labels=[0, 1]), rows(9, 9, labels=[2, 1])], [2.0, 2.0]),
    ],
    ids=["clm", "one trains nothing", "the first trains nothing", "mlm", "classes"],
)
def test_window_equals_one_large_batch(bench, llama, cls, window, weights):
    """BERT's losses are each batch's own mean, whatever the window."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_labels": 3}
    one = {"num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(**sizes, **one, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    it = bench(llama() if cls is None else cls(config))
    losses, ours = it.train(it.swarm, window)
    all_of_it = {key: torch.cat([batch[key] for batch in window]) for key in window[0]}
    loss, theirs = it.train(it.plain, [all_of_it])
    assert it.optimizer.weights == [batch.weight for _, batch in it.losses] == weights
    assert same(ours * it.optimizer.anchor / sum(weights), theirs) and same(losses.sum(), loss[0])
    assert it.swarm.current_gradient_accumulation_steps == len(window)


def test_window_without_token_count_is_mean(bench, llama):
    it = bench(llama())
    it.plain.model_accepts_loss_kwargs = it.swarm.model_accepts_loss_kwargs = False
    window = [rows(9, 9)] * 4
    ours, theirs = it.train(it.swarm, window), it.train(it.plain, window)
    assert same(ours[0], theirs[0]) and same(ours[1] / 4, theirs[1])
    assert not it.train(it.swarm, [rows(0, 0)])[1].any()


def test_oversized_batch_is_trained_in_parts(bench, llama):
    it = bench(llama(), batch=4)
    it.limit_memory(1)
    it.swarm._divided = SimpleNamespace(next_batch=iter(range(9)).__next__)
    batch = rows(9, 3, 0, 6)
    for _ in range(2):
        ours, theirs = it.train(it.swarm, [batch]), it.train(it.plain, [batch])
        assert same(ours[1] * it.optimizer.anchor / 15, theirs[1]) and same(ours[0], theirs[0])
    assert it.optimizer.weights == [8.0, 2.0, 0.0, 5.0] * 2
    assert it.optimizer.positions == [0, 1], "each batch once, also one that was begun three times"
    assert [event["code"] for event in it.told] == ["memory"] * 2, "the second batch begins in parts"
    assert "per_device_train_batch_size: 1" in it.told[-1]["hint"]
    assert same(it.train(it.swarm, [rows(8)])[0], it.train(it.plain, [rows(8)])[0]), "one row has no parts"
    it.limit_memory(0)
    with pytest.raises(torch.OutOfMemoryError):
        it.train(it.swarm, [batch])


def test_slow_batch_is_stepped_in_parts(bench, llama):
    it, batch = bench(llama(), batch=4), rows(8, 2, 0, 5)
    it.optimizer.samples_in_time = 1
    it.train(it.swarm, [batch])
    assert it.optimizer.weights == [7.0, 1.0, 0.0, 4.0] and it.optimizer.stepped == [1, 2, 3]
    assert [batch.weight for _, batch in it.losses] == it.optimizer.weights, "each loss counts once"
    it.swarm.accelerator.scaler = torch.amp.GradScaler("cpu")
    it.train(it.swarm, [batch])
    assert it.optimizer.stepped == [1, 2, 3], "scaled gradients are not stepped in between"


def test_slow_window_steps_after_each_batch(bench, llama, monkeypatch):
    it = bench(llama(), batch=1)
    it.optimizer.samples_in_time = 2
    monkeypatch.setattr(type(it.swarm.accelerator), "sync_gradients", False)
    it.train(it.swarm, [rows(9), rows(9), rows(9)])
    assert it.optimizer.stepped == [1, 2, 3] and len(it.losses) == 3


def test_out_of_memory_between_steps_repeats_rest(bench, llama):
    it = bench(llama(), batch=4)
    it.optimizer.samples_in_time = 2
    step = it.optimizer.step

    def step_and_fail():
        step()
        it.limit_memory(1)

    it.optimizer.step = step_and_fail
    (loss,), _ = it.train(it.swarm, [rows(8, 2, 2, 5)])
    mean = sum(one * batch.weight for one, batch in it.losses) / sum(it.optimizer.weights, 8.0)
    assert float(loss) == pytest.approx(mean), "the parts before count in the logged loss"
    assert it.optimizer.started_over == [2] and it.optimizer.weights == [1.0, 4.0]
    assert [batch.weight for _, batch in it.losses] == [8.0, 1.0, 4.0]


def evaluated(trainer, *lengths):
    dataset = [{key: value[0] for key, value in rows(one).items()} for one in lengths]
    return trainer.evaluate(dataset)["eval_loss"]


def test_evaluation_continues_with_smaller_batches(bench, llama):
    it, equal = bench(llama()), [9] * 8
    assert evaluated(it.swarm, 9, 4, 2) == evaluated(it.plain, 9, 4, 2)
    assert not it.optimizer.weights and not it.losses
    it.limit_memory(2)
    result = evaluated(it.swarm, *equal)
    assert [event["code"] for event in it.told] == ["memory"] * 2
    assert "per_device_eval_batch_size: 2" in it.told[-1]["hint"]
    assert evaluated(it.swarm, *equal) == result and len(it.told) == 2, "later ones begin so"
    assert result == pytest.approx(evaluated(it.plain, *equal), rel=1e-6)
    assert {entry["step"] for entry in it.swarm.state.log_history} == {3}
    other = bench(llama())
    for which, failure, told in ((it, torch.OutOfMemoryError, 3), (other, RuntimeError, 0)):
        which.limit_memory(0, failure)
        with pytest.raises(failure, match="it fails"):
            evaluated(which.swarm, 9)
        assert len(which.told) == told, "only for memory it tries with fewer, down to one"


def test_parts_hold_each_sample_once():
    numbers, names = torch.arange(10).reshape(5, 2), list("abcde")
    batch = {"input_ids": numbers, "names": names, "return_loss": True, "scale": torch.tensor(2.0)}
    (two, first), (three, second) = split(batch, 5, 2)
    assert (two, three) == (2, 3) and first["names"] == ["a", "b"] and second["names"] == ["c", "d", "e"]
    assert torch.equal(torch.cat([first["input_ids"], second["input_ids"]]), numbers)
    assert first["input_ids"].untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()
    assert all(part["return_loss"] is True and part["scale"] == 2 for part in (first, second))
    pairs = {"input_ids": torch.tensor([1, 2, -1, -2]), "texts": list("abxy"), "p": torch.tensor([3, 4])}
    (_, first), (_, second) = split(pairs, 2, 2)
    assert first["input_ids"].tolist() == [1, -1] and second["input_ids"].tolist() == [2, -2]
    assert (first["texts"], second["texts"], second["p"]) == (["a", "x"], ["b", "y"], torch.tensor([4]))


def test_indivisible_batch_is_one_part():
    for size, batch in (
        (1, {"labels": torch.arange(1)}),
        (4, {"input_ids": torch.zeros(1, 64), "position_ids": torch.zeros(1, 64)}),  # packed into one row
        (2, {"input_ids": torch.zeros(2, 8), "pixel_values": torch.zeros(7, 3)}),  # images of several pieces
        (4, {"return_loss": True}),
    ):
        assert split(batch, size, 2) is None and split(batch, size, 1) == [(size, batch)]
