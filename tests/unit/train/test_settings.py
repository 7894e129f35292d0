"""What can't work in a swarm is said before anything starts, and what can arrives at the optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from tests.kit.fakes import FakeNode
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.errors import RecipeError
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.agreement import with_run_id
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.train import trainer as trainer_module
from trahiv_cli.train.optimizers import REFUSED_OPTIMIZERS, inner_optimizer, param_groups
from trahiv_cli.train.settings import SwarmSettings, SwarmTrainingArguments
from trahiv_cli.train.tasks import build_trainer
from trahiv_cli.train.trainer import SwarmTrainer

SWARM = {"dht": {}, "opt": {"run_id": "run-1", "target_batch_size": 64}}


def with_(**attributes):
    """Change arguments that transformers itself would only take on another machine."""
    return lambda args: vars(args).update(attributes) or {}


TROUBLE = {
    "several GPUs": (with_(_n_gpu=2), "CUDA_VISIBLE_DEVICES"),
    "a device of type xpu": (with_(_setup_devices=torch.device("xpu")), "use_cpu=True"),
    "auto_find_batch_size": (with_(auto_find_batch_size=True), "per_device_train_batch_size"),
    "model_init": (lambda args: {"model_init": lambda: None}, "the model itself"),
    "FSDP": (with_(fsdp="full_shard"), "one peer per GPU"),
    "DeepSpeed": (with_(deepspeed="ds.json"), "one peer per GPU"),
    "push_to_hub": (with_(push_to_hub=True), "afterwards"),
    "load_best_model_at_end": (with_(load_best_model_at_end=True), "afterwards"),
    "optimizers=...": (lambda args: {"optimizers": (object(), None)}, "`optim`"),
    "optimizer_cls_and_kwargs": (
        lambda args: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        "`optim`",
    ),
    "looks at metrics": (with_(lr_scheduler_type="reduce_lr_on_plateau"), "cosine"),
}


@pytest.mark.parametrize("is_plain", [False, True], ids=["swarm's arguments", "plain arguments"])
@pytest.mark.parametrize("what", TROUBLE)
def test_what_cannot_work_in_a_swarm_is_refused(arguments, llama, what, is_plain):
    change, instead = TROUBLE[what]
    args = arguments() if is_plain else arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    extra = change(args) | ({"hivemind_config": SWARM} if is_plain else {})
    model = None if "model_init" in extra else llama()
    with pytest.raises(RecipeError) as refused:
        SwarmTrainer(model=model, args=args, **extra)
    assert what in refused.value.message and instead in refused.value.hint
    assert refused.value.exit_code == 2


def opt(**fields):
    return {"opt": SWARM["opt"] | fields}


@pytest.mark.parametrize(
    ("config", "swarm", "said"),
    [
        *((opt(run_id=name), {}, r"hivemind_config\.opt\.run_id") for name in ("", "dotted.name", 7)),
        *((config, {}, "run_id is missing") for config in (opt(run_id=None), {"dht": {}}, {"opt": None})),
        (
            opt(state_averaging_compression="blockwise4"),
            {},
            r"opt\.state_averaging_compression: 'blockwise4' can't work .* use `blockwise8`",
        ),
        (
            opt(load_state_compression="blockwise4"),
            {},
            r"opt\.load_state_compression: 'blockwise4' can't work .* use `blockwise8`",
        ),
        (SWARM | {"dht": {"client_mode": "perhaps"}}, {}, r"^hivemind_config\.dht\.client_mode"),
        (SWARM, {"solo": "300"}, r"^swarm\.solo: expected never, .* got '300': for example `after 300"),
        (SWARM, {"norm_limit": 0.5}, r"^swarm\.norm_limit: expected 0 or a number above 1, got 0\.5"),
        (SWARM, {"robust_mean": 1}, r"^swarm\.robust_mean: "),
        (SWARM, {"robust": True}, r"^swarm\.robust: "),
        (SWARM, {"local_steps": 9}, r"^swarm: has no effect in mode auto: it is for diloco and streaming"),
        (SWARM, {"solo": 1, "norm_limit": 1}, r"swarm\.solo: .*; swarm\.norm_limit: "),
    ],
)
def test_a_wrong_word_is_refused(config, swarm, said):
    with pytest.raises(RecipeError, match=said) as refused:
        SwarmSettings.read(config, swarm)
    assert refused.value.hint


def test_a_swarm_needs_arguments_and_each_of_them_once(arguments, llama):
    with pytest.raises(RecipeError, match="needs `args`"):
        SwarmTrainer(model=llama(), hivemind_config=SWARM)
    with pytest.raises(TypeError, match="one of them twice"):
        SwarmTrainer(llama(), arguments(), args=arguments())
    assert SwarmTrainer(llama(), arguments(), hivemind_config=SWARM).swarm_config == SWARM


def test_the_arguments_of_the_caller_are_not_changed_and_trackers_see_no_invitation(arguments, llama):
    config = SWARM | {"dht": {"initial_peers": ["trahiv1:abc"]}}
    args = arguments(SwarmTrainingArguments, hivemind_config=config, logging_strategy="steps", warmup_steps=1)
    it = SwarmTrainer(model=llama(), args=args)
    assert (args.max_steps, args.warmup_steps, args.max_grad_norm) == (2, 1, 1.0)
    assert args.logging_strategy == "steps"
    assert "trahiv1" not in it.args.to_json_string()


@pytest.mark.parametrize("peers", ["trahiv1:abc", ["trahiv1:abc"], ("/ip4/10.0.0.1/tcp/1/p2p/Qm", "@file")])
def test_initial_peers_are_taken_as_a_friend_pastes_them(peers):
    settings = SwarmSettings.read(SWARM | {"dht": {"initial_peers": peers}}, None)
    assert settings.initial_peers == ((peers,) if isinstance(peers, str) else tuple(peers))


def test_a_local_batch_may_be_all_of_the_target_and_not_more(arguments):
    settings = SwarmSettings.read(SWARM, None)
    args = arguments(per_device_train_batch_size=8, gradient_accumulation_steps=8)
    assert settings.samples_per_step(args) == 64
    args.per_device_train_batch_size = 9
    with pytest.raises(RecipeError, match="One local batch is 72 samples but target_batch_size is 64"):
        settings.samples_per_step(args)


def test_steps_are_counted_over_passes_of_a_dataset_with_a_length(arguments, samples):
    settings, args = SwarmSettings.read(SWARM, None), arguments(max_steps=-1)
    assert settings.max_steps(args, samples) == 1  # 3 epochs of 16 samples, 64 a step
    with pytest.raises(RecipeError, match="needs `max_steps`"):
        settings.max_steps(args, iter(samples))


# -- what arrives at the optimizer ----------------------------------------------------------------


class Built(Exception):
    """Carries what the optimizer would have been built with."""


@pytest.fixture
def built_with(arguments, llama, monkeypatch):
    """Return the keywords that a trainer would build the optimizer with: `built_with(swarm={...})`."""

    def build(*_, **keywords):
        raise Built(keywords)

    monkeypatch.setattr(trainer_module, "build_optimizer", build)
    node = FakeNode()
    node.dht = None

    def keywords_of(model=None, trainer=None, **swarm):
        if trainer is None:
            keywords = {"args": arguments(), "hivemind_config": SWARM, "node": node, **swarm}
            trainer = SwarmTrainer(model=llama() if model is None else model, **keywords)
        trainer.node = node
        with pytest.raises(Built) as built:
            trainer.create_optimizer()
        return built.value.args[0]

    return keywords_of


@pytest.mark.parametrize(
    ("swarm", "rules"),
    [
        (None, RoundRules()),
        ({}, RoundRules()),
        ({"solo": "never"}, RoundRules(solo_after_s=math.inf)),
        ({"solo": "always", "norm_limit": 0}, RoundRules(solo_after_s=0.0, norm_limit=0.0)),
        (SwarmSection(solo="after 1 second", robust_mean=True), RoundRules(1.0, robust_mean=True)),
    ],
)
def test_how_rounds_are_judged_arrives(built_with, swarm, rules):
    assert built_with(swarm=swarm)["rules"] == rules


@pytest.mark.parametrize(
    ("swarm", "mode", "share"),
    [
        ({}, "sync", 0.05),
        ({"communication_share": 0.2}, "sync", 0.2),
        ({"mode": "sync"}, "sync", None),
        ({"mode": "streaming"}, "streaming", None),
    ],
    ids=["default", "auto", "sync", "streaming"],
)
def test_the_mode_arrives_and_is_auto_unless_one_is_named(built_with, swarm, mode, share):
    keywords = built_with(swarm=swarm)
    assert (keywords["pace"].mode, keywords["auto_share"]) == (mode, share)


def test_what_a_recipe_says_arrives(built_with, tmp_path):
    sizes = ("hidden_size=12", "num_hidden_layers=1", "intermediate_size=8")
    said = [*(f"model.config.{size}" for size in sizes), "training.bf16=false", "swarm.norm_limit=3"]
    recipe = with_run_id(load_recipe("quickstart", said).recipe)
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3)
    trainer = build_trainer(recipe, tmp_path, build_tokenizer(recipe), Splits(rows, None))
    assert built_with(trainer=trainer)["rules"] == RoundRules(norm_limit=3.0)


def test_a_compiled_model_averages_with_one_that_is_not(built_with, llama):
    compiled = built_with(torch.compile(llama(), backend="eager"))
    assert compiled["schema"] == built_with()["schema"]


# -- the inner optimizer --------------------------------------------------------------------------


def registry(cls, keywords):
    """A trainer whose registry has this for any name, as if its package were installed."""
    return SimpleNamespace(get_optimizer_cls_and_kwargs=lambda args, model: (cls, keywords))


@pytest.mark.parametrize(
    ("name", "keywords"),
    [(f"{word}_adamw", {}) for word in REFUSED_OPTIMIZERS]
    + [("adamw", {key: object()}) for key in ("params", "model", "optimizer_dict")],
)
def test_an_optimizer_that_steps_elsewhere_is_refused(llama, name, keywords):
    args = SimpleNamespace(optim=name)
    with pytest.raises(RecipeError, match=f"optim={name} can't be used in a swarm: .* outside of"):
        inner_optimizer(registry(torch.optim.AdamW, keywords), args, llama())


@pytest.mark.parametrize(
    ("name", "cls"),
    [("adamw_torch", "AdamW"), ("adamw_torch_fused", "AdamW"), ("sgd", "SGD"), ("adagrad", "Adagrad")]
    + [("rmsprop", "RMSprop"), ("adafactor", "Adafactor"), ("adamw_bnb_8bit", "AdamW")],
)
def test_optimizers_that_step_once_are_taken_and_every_trained_weight_is_in_one_group(
    arguments, llama, name, cls
):
    trainer = SwarmTrainer(model=llama(), args=arguments(TrainingArguments, optim=name, weight_decay=0.1))
    model = trainer.model
    model.lm_head.requires_grad_(False)
    groups = param_groups(trainer, model, 0.1)
    grouped = [id(param) for group in groups for param in group["params"]]
    assert sorted(grouped) == sorted(id(param) for param in model.parameters() if param.requires_grad)
    assert {group["weight_decay"]: {param.dim() for param in group["params"]} for group in groups} == {
        0.1: {2},
        0.0: {1},
    }
    assert type(inner_optimizer(trainer, trainer.args, model)(groups)).__name__ == cls
