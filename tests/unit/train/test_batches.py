"""What a batch counts for, that its gradient enters the swarm's mean with just that weight, and memory that
does not suffice for it."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, Trainer

from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.batches import split, weigh
from trahiv_cli.train.settings import SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer

SWARM = {"opt": {"run_id": "run-1", "target_batch_size": 64}}


LABELS = torch.tensor([[5, 6, 7, -100], [5, -100, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "is_shifted", "samples", "weight"),
    [
        ({"labels": LABELS}, True, 2, 2.0),
        ({"labels": LABELS}, False, 2, 4.0),
        ({"labels": torch.tensor([0, 1, 1])}, False, 3, 3.0),
        ({"input_ids": torch.zeros(4, 2)}, True, 4, 4.0),
        ({"labels": LABELS[:1], "position_ids": torch.tensor([[0, 1, 0, 1]])}, True, 4, 2.0),
        ({"labels": LABELS[:1], "shift_labels": torch.tensor([[6, 7, -100]])}, True, 1, 2.0),
    ],
    ids=["clm", "mlm", "classes", "pairs", "one row", "shifted already"],
)
def test_tokens_count_where_each_has_a_label_and_samples_elsewhere(batch, is_shifted, samples, weight):
    counted = weigh(batch, batch_size=4, is_shifted=is_shifted)
    assert (counted.samples, counted.weight) == (samples, weight)


# -- what becomes of its gradient -----------------------------------------------------------------


class Announced:
    """Answers as the swarm's optimizer does, without a swarm, and notes what it was told."""

    def __init__(self, trainer):
        self._model = trainer.model
        self.batches, self.lent, self.anchor = [], [], 0.0
        self.local_epoch, self.max_steps = 3, 9

    agreed_weights = staticmethod(contextlib.nullcontext)

    def expect_batch(self, samples, weight, *, lend, positions=()):
        assert not positions  # the data is not divided here
        self.anchor = self.anchor or weight
        self.batches.append((samples, weight))
        self.lent.append(lend)
        return weight / self.anchor if self.anchor else 1.0

    def start_batch_over(self, positions):
        assert not positions
        self.batches, self.anchor = [], 0.0
        self._model.zero_grad()


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

    def __init__(self, arguments, model, batch=2):
        sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": 8}
        self.told, self.losses = [], []
        self.plain = Trainer(model=copy.deepcopy(model), args=arguments(**sizes))
        args = arguments(SwarmTrainingArguments, hivemind_config=SWARM, **sizes)
        self.swarm = SwarmTrainer(model=copy.deepcopy(model), args=args, events=Events(self.told.append))
        self.optimizer = self.swarm.swarm_optimizer = Announced(self.swarm)
        self.swarm.swarm_callback = SimpleNamespace(
            add_loss=lambda loss, **counts: self.losses.append((float(loss), counts))
        )

    def limit_memory(self, num_rows):
        """Have the swarm's trainer run out of memory with more rows at a time."""

        def run_out(_, args, inputs):
            if len(inputs["input_ids"]) > num_rows:
                raise torch.OutOfMemoryError("out of memory")

        self.swarm.model.register_forward_pre_hook(run_out, with_kwargs=True)

    @staticmethod
    def train(trainer, batches):
        """Forward and backward over one window, as `Trainer` does it; its losses and the summed gradient."""
        trainer.model.zero_grad()
        taken, items = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
        trainer.current_gradient_accumulation_steps = len(taken)
        losses = [trainer.training_step(trainer.model, batch, items) for batch in taken]
        return torch.stack(losses), torch.cat([param.grad.flatten() for param in trainer.model.parameters()])


@pytest.fixture
def bench(arguments):
    return lambda model, **more: Bench(arguments, model, **more)


def same(one, other, tolerance=1e-6):
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def test_equal_batches_are_left_to_the_bit_and_a_shorter_one_enters_with_its_tokens(bench, llama):
    it = bench(llama())
    for seed in range(3):
        batch = rows(9, 9, seed=seed)
        ours, theirs = it.train(it.swarm, [batch]), it.train(it.plain, [batch])
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    ours, theirs = it.train(it.swarm, [rows(3, 2)]), it.train(it.plain, [rows(3, 2)])
    assert it.optimizer.batches == [(2, 16.0)] * 3 + [(2, 3.0)] and all(it.optimizer.lent)
    assert torch.equal(ours[0], theirs[0]), "the logged loss is the batch's own mean"
    assert same(ours[1], theirs[1] * 3 / 16)
    assert it.losses[3] == (float(theirs[0]), {"samples": 2, "weight": 3.0})


@pytest.mark.parametrize(
    ("lengths", "is_counted"),
    [([(9, 9)] * 4, True), ([(9, 9), (2, 3), (9, 4), (2, 2)], True), ([(9, 9)] * 4, False)],
)
def test_a_window_is_the_mean_over_all_its_tokens_and_uncounted_over_its_batches(
    bench, llama, lengths, is_counted
):
    it = bench(llama())
    it.plain.model_accepts_loss_kwargs = it.swarm.model_accepts_loss_kwargs = is_counted
    window = [rows(*pair, seed=seed) for seed, pair in enumerate(lengths)]
    ours, theirs = it.train(it.swarm, window), it.train(it.plain, window)
    tokens = sum(weight for _, weight in it.optimizer.batches)
    assert tokens == sum(first + second - 2 for first, second in lengths)
    assert same(ours[1] * it.optimizer.anchor / tokens, theirs[1])
    assert same(ours[0], theirs[0]), "each batch's share of the window's mean is logged"
    assert it.swarm.current_gradient_accumulation_steps == 4


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
def test_a_batch_without_a_trained_token_adds_nothing(bench, llama, window):
    it = bench(llama())
    losses, ours = it.train(it.swarm, [rows(*pair) for pair in window])
    trained = [pair for pair in window if sum(pair) > 1]
    if not trained:
        assert torch.equal(ours, torch.zeros_like(ours))
        return
    theirs = it.train(it.plain, [rows(*pair) for pair in trained])
    assert same(ours, theirs[1]) and same(losses.sum(), theirs[0].sum())
    assert [counts["weight"] for _, counts in it.losses] == [float(max(0, sum(p) - 2)) for p in window]


def test_under_a_gradient_scaler_no_accumulators_are_lent(bench, llama):
    it = bench(llama())
    it.swarm.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    _, scaled = it.train(it.swarm, [rows(9, 9)])
    it.swarm.accelerator.scaler = None
    _, unscaled = it.train(it.swarm, [rows(9, 9)])
    assert it.optimizer.lent == [False, True] and same(scaled, 4 * unscaled)


# -- memory that does not suffice -----------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_trained_in_parts_and_counts_as_before(bench, llama):
    it = bench(llama(), batch=4)
    it.limit_memory(1)
    batch = rows(9, 3, 0, 6)
    for _ in range(2):
        ours, theirs = it.train(it.swarm, [batch]), it.train(it.plain, [batch])
        assert same(ours[1] * it.optimizer.anchor / 15, theirs[1]) and same(ours[0], theirs[0])
    assert it.optimizer.batches == [(1, 8.0), (1, 2.0), (1, 0.0), (1, 5.0)] * 2
    assert [event["code"] for event in it.told] == ["memory"] * 2, "the second batch begins in parts"
    assert "per_device_train_batch_size: 1" in it.told[-1]["hint"]
    it.limit_memory(0)
    with pytest.raises(torch.OutOfMemoryError):
        it.train(it.swarm, [batch])


def evaluated(trainer, *lengths):
    return trainer.evaluate([{key: value[0] for key, value in rows(one).items()} for one in lengths])


def test_an_evaluation_is_that_of_the_trainer_and_goes_on_with_fewer_samples_at_a_time(bench, llama):
    it, equal = bench(llama()), [9] * 8
    unequal = [evaluated(trainer, 9, 4, 2)["eval_loss"] for trainer in (it.swarm, it.plain)]
    assert unequal[0] == unequal[1] and not it.optimizer.batches and not it.losses
    expected = evaluated(it.plain, *equal)["eval_loss"]
    it.limit_memory(2)
    result = evaluated(it.swarm, *equal)["eval_loss"]
    assert [(event["event"], event["code"]) for event in it.told] == [("warning", "memory")] * 2
    assert "per_device_eval_batch_size: 2" in it.told[-1]["hint"]
    assert evaluated(it.swarm, *equal)["eval_loss"] == result and len(it.told) == 2, "later ones begin so"
    assert result == pytest.approx(expected, rel=1e-6)
    assert {entry["step"] for entry in it.swarm.state.log_history} == {3}


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("not even one"), RuntimeError("other shapes")])
def test_an_evaluation_that_fails_otherwise_ends(bench, llama, failure):
    it = bench(llama())

    def fail(*_):
        raise failure

    it.swarm.model.register_forward_pre_hook(fail)
    it.swarm.args.per_device_eval_batch_size = 1 if "one" in str(failure) else 8
    with pytest.raises(type(failure), match=str(failure)):
        evaluated(it.swarm, 9)
    assert it.told == []


# -- parts ----------------------------------------------------------------------------------------


def test_each_sample_is_in_one_part_and_what_has_no_rows_in_each():
    numbers, names = torch.arange(10).reshape(5, 2), list("abcde")
    batch = {"input_ids": numbers, "names": names, "return_loss": True, "scale": torch.tensor(2.0)}
    (two, first), (three, second) = split(batch, 5, 2)
    assert (two, three) == (2, 3) and first["names"] == ["a", "b"] and second["names"] == ["c", "d", "e"]
    assert torch.equal(torch.cat([first["input_ids"], second["input_ids"]]), numbers)
    assert first["input_ids"].untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()
    assert all(part["return_loss"] is True and part["scale"] == 2 for part in (first, second))


def test_pairs_of_texts_stay_pairs():
    pairs, texts = torch.tensor([[1], [2], [3], [-1], [-2], [-3]]), list("abcxyz")
    batch = {"input_ids": pairs, "texts": texts, "ref_logps": torch.tensor([10.0, 20.0, 30.0])}
    sizes, parts = zip(*split(batch, 3, 3), strict=True)
    assert sizes == (1, 1, 1)
    assert [part["input_ids"].flatten().tolist() for part in parts] == [[1, -1], [2, -2], [3, -3]]
    assert [part["texts"] for part in parts] == [["a", "x"], ["b", "y"], ["c", "z"]]
    assert [part["ref_logps"].tolist() for part in parts] == [[10.0], [20.0], [30.0]]


@pytest.mark.parametrize(
    ("batch", "batch_size"),
    [
        ({"labels": torch.arange(1)}, 1),
        ({"input_ids": torch.zeros(1, 64), "position_ids": torch.zeros(1, 64)}, 4),
        ({"input_ids": torch.zeros(2, 8), "pixel_values": torch.zeros(7, 3)}, 2),
        ({"return_loss": True}, 4),
    ],
    ids=["one sample", "packed into one row", "images of several pieces", "nothing with rows"],
)
def test_what_cannot_be_divided_is_one_part(batch, batch_size):
    assert split(batch, batch_size, 2) is None
    assert split(batch, batch_size, 1) == [(batch_size, batch)]
