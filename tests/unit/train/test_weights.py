"""What a batch counts for, and that its gradient enters the swarm's mean with just that weight."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainingArguments
from trahiv_cli.train.weights import weigh, zero_loss

torch.set_num_threads(1)

SWARM = {"opt": {"run_id": "run-1", "target_batch_size": 64}}


# -- what a batch counts for ----------------------------------------------------------------------


def labels(*rows):
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("batch", "is_shifted", "samples", "weight"),
    [
        ({"labels": labels([5, 6, 7, -100], [5, -100, -100, -100])}, True, 2, 2.0),
        ({"labels": labels([5, 6, 7, -100], [5, -100, -100, -100])}, False, 2, 4.0),
        ({"labels": labels([-100, -100, 7, 8])}, True, 1, 2.0),
        ({"labels": labels([-100, -100])}, True, 1, 0.0),
        ({"labels": torch.tensor([0, 1, 1])}, False, 3, 3.0),
        ({"labels": torch.tensor([0.5, 1.5])}, False, 2, 2.0),
        ({"input_ids": labels([1, 2], [1, 3], [1, 4], [1, 5])}, True, 4, 4.0),
    ],
    ids=["clm", "mlm", "sft", "no trained token", "classes", "scores", "pairs"],
)
def test_tokens_count_where_each_has_a_label_and_samples_elsewhere(batch, is_shifted, samples, weight):
    counted = weigh(batch, batch_size=4, is_shifted=is_shifted)
    assert (counted.samples, counted.weight) == (samples, weight)


def test_samples_in_one_row_are_as_many_as_the_collator_took():
    row = {
        "input_ids": labels([5, 6, 7, 8, 9]),
        "labels": labels([-100, 6, 7, -100, 9]),
        "position_ids": labels([0, 1, 2, 0, 1]),
    }
    counted = weigh(row, batch_size=2, is_shifted=True)
    assert (counted.samples, counted.weight) == (2, 3.0)


def test_labels_that_are_shifted_already_count_as_they_are():
    row = {"labels": labels([5, 6, 7]), "shift_labels": labels([6, 7, -100])}
    assert weigh(row, batch_size=1, is_shifted=True).weight == 2.0


def test_a_loss_that_trains_nothing_has_a_gradient_of_zero_everywhere():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    with torch.no_grad():
        model[1].bias.fill_(torch.inf)
    zero_loss(model, torch.device("cpu")).backward()
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == 3 and all(torch.equal(p.grad, torch.zeros_like(p)) for p in trained)
    assert model[0].bias.grad is None


# -- what becomes of its gradient -----------------------------------------------------------------


class Announced:
    """Answers as the swarm's optimizer does, without a swarm, and notes what it was told."""

    def __init__(self):
        self.batches, self.lent, self.anchor = [], [], 0.0
        self.local_epoch, self.max_steps = 0, 1

    agreed_weights = staticmethod(contextlib.nullcontext)

    def expect_batch(self, samples, weight, *, lend, positions=()):
        assert not positions  # the data is not divided here
        self.anchor = self.anchor or weight
        self.batches.append((samples, weight))
        self.lent.append(lend)
        return weight / self.anchor if self.anchor else 1.0


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def bert(cls):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return cls(BertConfig(**sizes, **no_dropout, num_attention_heads=2, num_labels=3))


def rows(*lengths, seed=0):
    """A batch of rows of 9 tokens, of which the first so many have a label."""
    tokens = torch.randint(3, 30, (len(lengths), 9), generator=torch.Generator().manual_seed(seed))
    trained = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], tokens, -100)
    return {"input_ids": tokens, "labels": trained}


class Bench:
    """A plain Trainer and a swarm's of the same model, run by hand over the same window of batches."""

    def __init__(self, folder, model):
        quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "per_device_train_batch_size": 2}
        self.plain = Trainer(
            model=copy.deepcopy(model), args=TrainingArguments(output_dir=str(folder), max_steps=1, **quiet)
        )
        args = SwarmTrainingArguments(
            output_dir=str(folder), max_steps=1, **quiet, hivemind_config=SWARM, gradient_accumulation_steps=1
        )
        self.swarm = SwarmTrainer(model=copy.deepcopy(model), args=args)
        self.optimizer, self.losses = Announced(), []
        self.swarm.swarm_optimizer = self.optimizer
        self.swarm.swarm_callback = SimpleNamespace(
            add_loss=lambda loss, **counts: self.losses.append((float(loss), counts))
        )

    @staticmethod
    def train(trainer, batches):
        """Forward and backward over one window, as `Trainer` does it; its losses and the summed gradient."""
        trainer.model.zero_grad()
        taken, items = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
        trainer.current_gradient_accumulation_steps = len(taken)
        losses = [trainer.training_step(trainer.model, batch, items) for batch in taken]
        return torch.stack(losses), gradient(trainer.model)


def gradient(model):
    return torch.cat([param.grad.flatten() for param in model.parameters()])


@pytest.fixture
def bench(tmp_path):
    return lambda model: Bench(tmp_path, model)


def same(one, other, tolerance=1e-6):
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def test_equal_batches_are_left_as_they_are_to_the_bit(bench):
    it = bench(llama())
    for batch in (rows(9, 9), rows(9, 9, seed=1), rows(9, 9, seed=2)):
        ours, theirs = it.train(it.swarm, [batch]), it.train(it.plain, [batch])
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert it.optimizer.batches == [(2, 16.0)] * 3 and all(it.optimizer.lent)


def test_a_batch_enters_with_its_tokens_over_the_first_ones(bench):
    it = bench(llama())
    it.train(it.swarm, [rows(9, 9)])
    short = rows(3, 2)
    ours, theirs = it.train(it.swarm, [short]), it.train(it.plain, [short])
    assert it.optimizer.batches == [(2, 16.0), (2, 3.0)]
    assert torch.equal(ours[0], theirs[0]), "the logged loss is the batch's own mean"
    assert same(ours[1], theirs[1] * 3 / 16)
    assert it.losses[1] == (float(theirs[0]), {"samples": 2, "weight": 3.0})


@pytest.mark.parametrize("lengths", [[(9, 9)] * 4, [(9, 9), (2, 3), (9, 4), (2, 2)]])
def test_a_window_of_batches_is_the_mean_over_all_its_tokens(bench, lengths):
    it = bench(llama())
    window = [rows(*pair, seed=seed) for seed, pair in enumerate(lengths)]
    ours, theirs = it.train(it.swarm, window), it.train(it.plain, window)
    tokens = sum(weight for _, weight in it.optimizer.batches)
    assert tokens == sum(first + second - 2 for first, second in lengths)
    assert same(ours[1] * it.optimizer.anchor / tokens, theirs[1])
    assert same(ours[0], theirs[0]), "each batch's share of the window's mean is logged"
    assert it.swarm.current_gradient_accumulation_steps == 4


def test_a_window_without_a_count_of_tokens_is_the_mean_over_its_batches(bench):
    it = bench(llama())
    it.plain.model_accepts_loss_kwargs = it.swarm.model_accepts_loss_kwargs = False
    window = [rows(9, 9, seed=seed) for seed in range(3)]
    ours, theirs = it.train(it.swarm, window), it.train(it.plain, window)
    assert it.optimizer.batches == [(2, 16.0)] * 3
    assert same(ours[1] / 3, theirs[1]) and same(ours[0], theirs[0])


@pytest.mark.parametrize(
    ("cls", "targets", "weights"),
    [
        (BertForMaskedLM, [rows(9, 9)["labels"], rows(1, 2)["labels"]], [18.0, 3.0]),
        (BertForSequenceClassification, [torch.tensor([0, 1]), torch.tensor([2, 1])], [2.0, 2.0]),
    ],
    ids=["mlm", "seq-cls"],
)
def test_a_window_equals_one_batch_of_all_also_where_a_model_is_deaf_to_the_count(
    bench, cls, targets, weights
):
    """BERT's losses are each batch's own mean, whatever they are told of the window."""
    it = bench(bert(cls))
    window = [rows(9, 9, seed=seed) | {"labels": target} for seed, target in enumerate(targets)]
    ours = it.train(it.swarm, window)
    assert it.optimizer.batches == [(2, weight) for weight in weights]
    theirs = it.train(it.plain, [{key: torch.cat([batch[key] for batch in window]) for key in window[0]}])
    assert same(ours[1] * weights[0] / sum(weights), theirs[1], tolerance=1e-5)
    assert same(ours[0].sum(), theirs[0][0])


@pytest.mark.parametrize("window", [[(0, 0)], [(9, 9), (0, 0)], [(0, 1), (9, 9)]])
def test_a_batch_without_a_trained_token_adds_nothing(bench, window):
    it = bench(llama())
    losses, ours = it.train(it.swarm, [rows(*pair) for pair in window])
    trained = [pair for pair in window if sum(pair) > 1]
    if not trained:
        assert torch.equal(ours, torch.zeros_like(ours))
        return
    theirs = it.train(it.plain, [rows(*pair) for pair in trained])
    assert same(ours, theirs[1]) and same(losses.sum(), theirs[0].sum())
    assert [counts["weight"] for _, counts in it.losses] == [float(max(0, sum(p) - 2)) for p in window]


def test_under_a_gradient_scaler_no_accumulators_are_lent(bench):
    it = bench(llama())
    it.swarm.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    _, scaled = it.train(it.swarm, [rows(9, 9)])
    it.swarm.accelerator.scaler = None
    _, unscaled = it.train(it.swarm, [rows(9, 9)])
    assert it.optimizer.lent == [False, True] and same(scaled, 4 * unscaled)


def test_an_evaluation_is_untouched(bench):
    it = bench(llama())
    it.train(it.swarm, [rows(9, 9)])
    it.train(it.swarm, [rows(3, 2)])
    for trainer in (it.swarm, it.plain):
        trainer.model.load_state_dict(it.plain.model.state_dict())
    samples = [{key: value[0] for key, value in rows(length).items()} for length in (9, 4, 2)]
    ours, theirs = (trainer.evaluate(samples)["eval_loss"] for trainer in (it.swarm, it.plain))
    assert ours == theirs and len(it.optimizer.batches) == 2 and len(it.losses) == 2
