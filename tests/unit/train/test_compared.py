"""Peers of a drop-in that differ in a setting are refused, unless each may choose it for itself."""

import random
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hivemind.compression import Float16Compression
from hivemind.utils import MSGPackSerializer
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch.optim.lr_scheduler import LambdaLR
from transformers import DataCollatorForLanguageModeling, TrainingArguments
from trl import DPOConfig, SFTConfig

from tests.kit.fakes import FakeNode
from tests.kit.stand_ins import bert_tokenizer
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.net.keys import MAX_RECORD_BYTES, likeness_key
from trahiv_cli.recipe.schema import marks_of
from trahiv_cli.recipe.section import OWN
from trahiv_cli.train.compared import ALWAYS, MAY_DIFFER, digest_of_samples, settings_of, text_of
from trahiv_cli.train.comparison import Comparison
from trahiv_cli.train.trainer import SwarmTrainer

COMPARED = dict(
    line.split()
    for line in """
    lr_scheduler_kwargs None
    optim_args None
    load_best_model_at_end False
    optim_target_modules None
    neftune_noise_alpha None
    accelerator_config None
    label_names None
    label_smoothing_factor 0
    average_tokens_across_devices True
    remove_unused_columns True
    train_sampling_strategy random
    length_column_name length
    dataset_text_field text
    dataset_kwargs None
    shuffle_dataset False
    max_length 1024
    truncation_mode keep_start
    packing False
    packing_strategy bfd
    eos_token None
    pad_token None
    completion_only_loss None
    assistant_only_loss False
    disable_dropout True
    beta 0.1
    label_smoothing 0
    loss_weights None
    ld_alpha None
    f_divergence_type reverse_kl
    f_alpha_divergence_coef 0.5
    use_weighting False
    discopop_tau 0.05
    sync_ref_model False
    ref_model_mixup_alpha 0.6
    ref_model_sync_steps 512
    """.strip().splitlines()
)
"""Arguments that are compared where they are not at this default, which may not depend on a version."""


@pytest.fixture
def make(swarm_trainer, llama):
    def planned(given=lambda model, value: {}, value=None, **keywords):
        """Plan a run with these keywords, and the ones that `given` makes of a model and a value."""
        model = llama()
        trainer = swarm_trainer(**{"model": model} | keywords | given(model, value))
        trainer.plan_run()
        return trainer

    return planned


@pytest.fixture
def trainer(make):
    return make()


def told(trainer, max_steps=2):
    return settings_of(trainer, max_steps, trainer._divided)


def refused(mine, theirs):
    """Names of the differing settings, in a joiner's error; none if it is accepted."""
    node = FakeNode("me")
    own = Comparison(node, "run", mine)
    other = Comparison(node.neighbour("one"), "run", theirs)
    try:
        own.require_alike([SimpleNamespace(peer_id="one")])
    except RecipeMismatch as error:
        assert own.schema != other.schema
        return {name for name, _, _ in error.differences}
    assert own.schema == other.schema, "they average if they are alike"
    return set()


def another(value):
    """Another value of about the same kind."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else {"another": str(value)}


@pytest.mark.parametrize("cls", [TrainingArguments, SFTConfig, DPOConfig])
def test_unlike_argument_is_refused_or_listed(arguments, trainer, cls):
    args = arguments(cls)
    trainer.args = copy(args)
    ours = told(trainer)
    for name in (one.name for one in fields(cls)):
        vars(trainer.args).update(vars(args) | {name: another(getattr(args, name))})
        theirs = told(trainer)
        assert refused(ours, theirs) == refused(theirs, ours) == {name} - MAY_DIFFER


@pytest.mark.parametrize("cls", [TrainingArguments, SFTConfig, DPOConfig])
def test_each_argument_is_decided(cls):
    """A library's new argument or default fails here: add it to `MAY_DIFFER`, or to `COMPARED` above."""
    for one in (one for one in fields(cls) if one.name not in MAY_DIFFER | ALWAYS):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        assert text_of(default) == COMPARED[one.name], one.name


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_steps": 3}, "max_steps"),
        ({"seed": 2}, "seed of the data's order"),
        ({"data_seed": 2}, "seed of the data's order"),
        ({"bf16": True}, "precision"),
    ],
)
def test_derived_settings_are_compared(arguments, make, trainer, changes, name):
    other = make(args=arguments(**changes))
    assert refused(told(trainer), told(other, other.args.max_steps)) == {name}


def test_passes_compare_by_resulting_steps(arguments, trainer, samples):
    ours = told(trainer)
    trainer.args = arguments(max_steps=-1, num_train_epochs=8)  # 8 x 16 samples, 64 a step
    steps = trainer.swarm_settings.max_steps(trainer.args, len(samples))
    assert refused(ours, told(trainer, steps)) == set()


@pytest.mark.parametrize(("kind", "place"), [("opt", ("hivemind_config", "opt")), ("swarm", ("swarm",))])
def test_unlike_swarm_field_is_refused_or_own(trainer, kind, place):
    ours = told(trainer)
    before = trainer.swarm_settings
    section = getattr(before, kind)
    for name, value in section:
        other = section.model_copy(update={name: another(value)})
        trainer.swarm_settings = replace(before, **{kind: other})
        expected = set() if OWN in marks_of((*place, name)) else {f"{kind}.{name}"}
        assert refused(ours, told(trainer)) == expected, name


def test_codecs_are_compared_by_name(trainer):
    usual = told(trainer)
    before = trainer.swarm_settings

    def settings(codec):
        opt = before.opt.model_copy(update={"grad_compression": codec})
        trainer.swarm_settings = replace(before, opt=opt)
        return told(trainer)

    assert refused(usual, settings("float16")) == {"opt.grad_compression"}
    assert refused(settings("float16"), settings(Float16Compression())) == set()


class OwnLoss(SwarmTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def own_optimizer(_, momentum):
    class Mine(SwarmTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum)
            return self.optimizer

    return {"cls": Mine}


def class_of_optimizer(_, momentum):
    return {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": momentum})}


def own_schedule(model, share):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"optimizers": (optimizer, LambdaLR(optimizer, lambda step: share**step))}


def masks(_, share):
    return {"data_collator": DataCollatorForLanguageModeling(bert_tokenizer(), mlm_probability=share)}


def heads(model, number):
    model.config.num_attention_heads = number
    model.config.use_cache = number > 1
    return {}


def adapter(model, alpha):
    lora = LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return {"model": get_peft_model(model, lora)}


@pytest.mark.parametrize(
    ("name", "given", "ours", "theirs"),
    [
        ("optimizer", own_optimizer, 0.5, 0.9),
        ("optimizer", class_of_optimizer, 0.5, 0.9),
        ("schedule", own_schedule, 0.5, 0.25),
        ("loss", lambda _, cls: {"cls": cls}, SwarmTrainer, OwnLoss),
        ("loss function", lambda _, function: {"compute_loss_func": function}, None, print),
        ("data collator", masks, 0.15, 0.4),
        ("config.num_attention_heads", heads, 2, 1),
        ("peft.lora_alpha", adapter, 16, 32),
    ],
)
def test_parts_of_trainer_are_compared(make, name, given, ours, theirs):
    """The number of heads and an adapter's scale change no shape."""
    own, same, other = (told(make(given, value)) for value in (ours, ours, theirs))
    assert refused(own, same) == set()
    assert refused(own, other) == {name}


@dataclass
class NewerArguments(TrainingArguments):
    """Arguments of a version that knows one more, and of a user whose files are elsewhere."""

    sharpness: float = 0.0
    cache_path: str = field(default="", metadata={"may_differ": True})


def test_new_argument_differs_only_when_set(arguments, trainer):
    ours = told(trainer)
    trainer.args = arguments(NewerArguments, cache_path="/elsewhere")
    assert refused(ours, told(trainer)) == set()
    trainer.args.sharpness = 1.0
    assert refused(ours, told(trainer)) == {"sharpness"}


def test_excess_settings_share_one_digest():
    many = {f"a_rather_long_argument_{number}": "another value" for number in range(200)}
    node = FakeNode("me")
    Comparison(node, "run", many)
    [(record, _)] = node.records[likeness_key("run")].values()
    assert len(MSGPackSerializer.dumps(record)) <= MAX_RECORD_BYTES
    assert len(record) > 50
    assert refused(many, many) == set()
    assert refused(many, many | {"a_rather_long_argument_199": "x"}) == {"other settings"}


def rows(make):
    return [make(number) for number in range(100)]


@pytest.mark.parametrize(
    "make",
    [
        lambda number: {"input_ids": [1, number], "label": number % 2},
        lambda number: {"x": torch.full((3,), float(number)), "y": np.int64(number)},
        lambda number: {"x": Image.new("L", (4, 4), number)},
        lambda number: {"x": bytes([number])},
        lambda number: (torch.tensor([number]), f"text {number}"),
        lambda number: {"x": torch.ones(2, dtype=torch.bfloat16) * number, "deep": [{"x": None}]},
        str,
    ],
)
def test_samples_of_any_kind_are_distinguished(make):
    data = rows(make)
    ours, same, *others = map(digest_of_samples, (data, rows(make), data[::-1], data[:50]))
    assert ours == same
    assert ours not in others


def test_sample_digest_is_machine_independent():
    def digest(home, noise):
        return digest_of_samples([{"x": torch.ones(9) * (1 + noise), "file": f"{home}/1.wav"}])

    assert digest("/home/a", 0) == digest("/mnt/b", 1e-6)


def test_random_samples_are_not_digested():
    class Augmented(list):
        def __getitem__(self, position):
            drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
            return {"x": super().__getitem__(position), "drawn": drawn[position % 3] > 0.5}

    def states():
        return random.getstate(), torch.get_rng_state().tolist()

    before = states()
    assert digest_of_samples(Augmented(range(64))) == "random"
    assert states() == before
