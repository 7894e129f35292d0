"""Peers of a drop-in that differ in a setting are refused, unless each may choose it for itself."""

import random
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hivemind.compression import Float16Compression
from hivemind.utils import MSGPackSerializer
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import DataCollatorForLanguageModeling, TrainingArguments
from trl import DPOConfig, SFTConfig

from tests.kit.fakes import FakeNode
from tests.kit.stand_ins import bert_tokenizer
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.recipe.schema import OWN, OptSection, SwarmSection, marks_of
from trahiv_cli.swarm.node import MAX_RECORD_BYTES, likeness_key
from trahiv_cli.train.compared import ALWAYS, MAY_DIFFER, digest_of_samples, settings_of, text_of
from trahiv_cli.train.comparison import Comparison
from trahiv_cli.train.trainer import SwarmTrainer

SWARM = {"opt": {"run_id": "run-1", "target_batch_size": 64}}
ONE = SimpleNamespace(peer_id="one")

COMPARED = dict(
    line.split()
    for line in """
    lr_scheduler_kwargs None
    optim_args None
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
def make(arguments, llama, samples):
    def planned(cls=SwarmTrainer, **keywords):
        args = {"model": llama(), "args": arguments(), "train_dataset": samples, "hivemind_config": SWARM}
        trainer = cls(**args | keywords)
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
    both = Comparison(node, "run", mine), Comparison(node.neighbour("one"), "run", theirs)
    try:
        both[0].require_alike([ONE])
    except RecipeMismatch as error:
        assert both[0].schema != both[1].schema, "they must not average either"
        return {name for name, _, _ in error.differences}
    assert both[0].schema == both[1].schema
    return set()


def another(value):
    """Another value of about the same kind."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else {"another": str(value)}


@pytest.mark.parametrize("cls", [TrainingArguments, SFTConfig, DPOConfig])
def test_unlike_argument_is_refused_or_listed(arguments, trainer, cls):
    trainer.swarm_args = args = arguments(cls)
    ours = settings_of(trainer, 2, None)
    assert refused(ours, settings_of(trainer, 2, None)) == set()
    for name in (one.name for one in fields(cls)):
        trainer.swarm_args = copy(args)
        setattr(trainer.swarm_args, name, another(getattr(args, name)))
        theirs = settings_of(trainer, 2, None)
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
def test_derived_settings_are_compared(arguments, make, samples, changes, name):
    both = []
    for more in ({}, changes):
        made = make(args=arguments(**more))
        both.append(told(made, made.swarm_settings.max_steps(made.swarm_args, samples)))
    assert refused(*both) == {name}


def test_passes_compare_by_resulting_steps(arguments, trainer, samples):
    args = arguments(max_steps=-1, num_train_epochs=8)  # 8 x 16 samples, 64 a step
    steps = trainer.swarm_settings.max_steps(args, samples)
    ours = told(trainer)
    trainer.swarm_args = args
    assert refused(ours, told(trainer, steps)) == set()


@pytest.mark.parametrize("section", [OptSection, SwarmSection])
def test_unlike_swarm_field_is_refused_or_own(trainer, section):
    ours, before = told(trainer), trainer.swarm_settings
    kind, place = ("opt", ("hivemind_config", "opt")) if section is OptSection else ("swarm", ("swarm",))
    for name in section.model_fields:
        held = getattr(before, kind)
        other = held.model_copy(update={name: another(getattr(held, name))})
        trainer.swarm_settings = replace(before, **{kind: other})
        expected = set() if OWN in marks_of((*place, name)) else {f"{kind}.{name}"}
        assert refused(ours, told(trainer)) == expected, name


def test_averager_options_are_compared(trainer):
    ours, before = told(trainer), trainer.swarm_settings
    for more in ({"averager_opts": {"part_size_bytes": 8192}}, {"averager_opts": {"min_vector_size": 9}}):
        trainer.swarm_settings = replace(before, opt=before.opt.model_copy(update=more))
        assert refused(ours, told(trainer)) == {"opt.averager_opts"}


def test_codecs_are_compared_by_name(trainer):
    ours, before, codecs = told(trainer), trainer.swarm_settings, []
    for codec in ("float16", Float16Compression()):
        opt = before.opt.model_copy(update={"grad_compression": codec})
        trainer.swarm_settings = replace(before, opt=opt)
        codecs.append(told(trainer))
    assert refused(*codecs) == set() and refused(ours, codecs[0]) == {"opt.grad_compression"}


class OwnLoss(SwarmTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OwnOptimizer(SwarmTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=self.momentum)
        return self.optimizer


def test_own_optimizer_is_compared(llama, make):
    settings = []
    for momentum in (0.5, 0.5, 0.9):
        OwnOptimizer.momentum = momentum
        settings.append(told(make(OwnOptimizer)))
    assert refused(*settings[:2]) == set() and refused(*settings[1:]) == {"optimizer"}


def test_given_schedule_is_compared(llama, make):
    settings = []
    for share in (0.5, 0.5, 0.25):
        model = llama()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step, share=share: share**step)
        settings.append(told(make(model=model, optimizers=(sgd, schedule))))
    assert refused(*settings[:2]) == set() and refused(*settings[1:]) == {"schedule"}


def test_losses_and_collators_are_compared(make, trainer):
    ours = told(trainer)

    def other(*args, **keywords):
        return told(make(*args, **keywords))

    assert refused(ours, other()) == set()
    assert refused(ours, other(OwnLoss)) == {"loss"}
    assert refused(ours, other(compute_loss_func=lambda *_, **__: 0)) == {"loss function"}
    tokenizer = bert_tokenizer()
    masks = [DataCollatorForLanguageModeling(tokenizer, mlm_probability=share) for share in (0.15, 0.15, 0.4)]
    first, same, more = (other(data_collator=mask) for mask in masks)
    assert refused(first, same) == set() and refused(first, more) == {"data collator"}


def test_model_and_adapter_configs_are_compared(llama, trainer):
    """The number of heads and an adapter's scale change no shape."""
    ours, alphas = told(trainer), []
    trainer.model.config.num_attention_heads, trainer.model.config.use_cache = 1, False
    assert refused(ours, told(trainer)) == {"config.num_attention_heads"}
    for alpha in (16, 32):
        lora = LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer.model = get_peft_model(llama(), lora)
        alphas.append(told(trainer))
    assert refused(*alphas) == {"peft.lora_alpha"}


@dataclass
class NewerArguments(TrainingArguments):
    """Arguments of a version that knows one more, and of a user whose files are elsewhere."""

    sharpness: float = 0.0
    cache_path: str = field(default="", metadata={"may_differ": True})


def test_new_argument_differs_only_when_set(arguments, trainer):
    ours = told(trainer)
    trainer.swarm_args = arguments(NewerArguments, cache_path="/elsewhere")
    assert refused(ours, told(trainer)) == set()
    trainer.swarm_args.sharpness = 1.0
    assert refused(ours, told(trainer)) == {"sharpness"}


def test_excess_settings_share_one_digest():
    many = {f"a_rather_long_argument_{number}": "another value" for number in range(200)}
    node = FakeNode("me")
    Comparison(node, "run", many)
    [(record, _)] = node.records[likeness_key("run")].values()
    assert len(MSGPackSerializer.dumps(record)) <= MAX_RECORD_BYTES and len(record) > 50
    last = list(many)[-1]
    assert refused(many, dict(many)) == set()
    assert refused(many, many | {last: "x"}) == {"other settings"}


def rows(make):
    return [make(number) for number in range(100)]


@pytest.mark.parametrize(
    "make",
    [
        lambda number: {"input_ids": [1, number], "label": number % 2},
        lambda number: {"x": torch.full((3,), float(number)), "y": np.int64(number)},
        lambda number: {"x": np.full((2, 2), number, dtype=np.uint8)},
        lambda number: (torch.tensor([number]), f"text {number}"),
        lambda number: {"x": torch.ones(2, dtype=torch.bfloat16) * number, "deep": [{"x": None}]},
        lambda number: str(number),
    ],
)
def test_samples_of_any_kind_are_distinguished(make):
    data = rows(make)
    assert digest_of_samples(data) == digest_of_samples(rows(make))
    assert digest_of_samples(data[::-1]) != digest_of_samples(data) != digest_of_samples(data[:50])


def test_sample_digest_is_machine_independent():
    def data(home, noise):
        return rows(
            lambda number: {"x": torch.ones(9) * (number + 1 + noise), "file": f"{home}/{number}.wav"}
        )

    assert digest_of_samples(data("/home/a", 0)) == digest_of_samples(data("/mnt/b", 1e-6))


def test_pictures_and_bytes_are_compared():
    pictures = rows(lambda number: {"x": Image.new("L", (4, 4), number)})
    darker = rows(lambda number: {"x": Image.new("L", (4, 4), number // 2)})
    assert digest_of_samples(pictures) != digest_of_samples(darker)
    assert digest_of_samples(rows(lambda n: {"x": b"a"})) != digest_of_samples(rows(lambda n: {"x": b"b"}))


def test_random_samples_are_not_digested():
    class Augmented(list):
        def __getitem__(self, position):
            drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
            return {"x": super().__getitem__(position), "drawn": drawn[position % 3] > 0.5}

    before = random.getstate(), torch.get_rng_state()
    assert digest_of_samples(Augmented(range(64))) == "random"
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
