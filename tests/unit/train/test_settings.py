"""Settings that can't work in a swarm are refused before anything starts; others reach the optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from tests.kit.fakes import FakeNode
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.errors import RecipeError
from trahiv_cli.optim.pace import RoundRules
from trahiv_cli.recipe.agreement import AgreedRun
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.train import hooks
from trahiv_cli.train.hooks import put_in_swarm
from trahiv_cli.train.settings import SwarmSettings, SwarmTrainingArguments
from trahiv_cli.train.tasks import build_trainer, training_arguments
from trahiv_cli.train.trainer import SwarmTrainer

OPT = {"run_id": "run-1", "target_batch_size": 64}
SWARM = {"dht": {}, "opt": OPT}

STEPPED = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
STEPPED.param_groups[0]["params"][0].grad = torch.ones(1)
STEPPED.step()

TROUBLE = {  # by message: fields of the arguments as on another machine; keywords; what to do instead
    "several GPUs": ({"_n_gpu": 2}, {}, "CUDA_VISIBLE_DEVICES=1"),
    "with several processes": (
        {"_setup_devices": torch.device("cpu"), "distributed_state": SimpleNamespace(num_processes=2)},
        {},
        "CUDA_VISIBLE_DEVICES=1",
    ),
    "a device of type xpu": ({"_setup_devices": torch.device("xpu")}, {}, "use_cpu=True"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}, "per_device_train_batch_size"),
    "model_init": ({}, {"model_init": lambda: None, "model": None}, "the model itself"),
    "FSDP": ({"fsdp": "full_shard"}, {}, "one peer for each GPU"),
    "DeepSpeed": ({"deepspeed": "ds.json"}, {}, "one peer for each GPU"),
    "push_to_hub": ({"push_to_hub": True}, {}, "trainer.model.push_to_hub"),
    "load_best_model_at_end": ({"load_best_model_at_end": True}, {}, "afterwards"),
    "enable_jit_checkpoint": ({"enable_jit_checkpoint": True}, {}, "SIGTERM"),
    "dataloader_in_order=False": ({"dataloader_in_order": False}, {}, "True"),
    "by epoch of data without a length": (
        {"save_strategy": "epoch"},
        {"train_dataset": iter(())},
        "by steps",
    ),
    "optim=lomo": ({"optim": "lomo"}, {}, "adamw_torch"),
    "that has taken steps": ({}, {"optimizers": (STEPPED, None)}, "a new one"),
    "looks at metrics": ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, "cosine"),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_arguments_unusable_in_swarm_are_refused(arguments, llama, what):
    (fields, keywords, instead), args = TROUBLE[what], arguments()
    vars(args).update(fields)
    with pytest.raises(RecipeError) as refused:
        SwarmTrainer(args=args, hivemind_config=SWARM, **{"model": llama()} | keywords)
    assert what in refused.value.message and instead in refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "swarm", "said"),
    [
        ({"opt": OPT | {"run_id": 7}}, {}, r"hivemind_config\.opt\.run_id"),
        *((config, {}, "run_id is missing") for config in ({"dht": {}}, {"opt": None})),
        ({"opt": OPT | {"load_state_compression": "blockwise4"}}, {}, r"state_compression: .* 'blockwise8'"),
        (SWARM | {"dht": {"client_mode": "perhaps"}}, {}, r"^hivemind_config\.dht\.client_mode"),
        (SWARM, {"solo": 1, "robust": True}, r"swarm\.solo: .*; swarm\.robust: "),
    ],
)
def test_wrong_setting_is_refused(config, swarm, said):
    with pytest.raises(RecipeError, match=said) as refused:
        SwarmSettings.read(config, swarm)
    assert refused.value.hint


def test_trainer_needs_args_exactly_once(arguments, llama):
    with pytest.raises(RecipeError, match="needs `args`"):
        SwarmTrainer(model=llama(), hivemind_config=SWARM)
    for given in ((llama(), arguments()), (None,) * 40):
        with pytest.raises(TypeError, match=r"multiple values|too many"):
            SwarmTrainer(*given, args=arguments())
    config = SWARM | {"dht": {"initial_peers": ["trahiv1:abc"]}}
    args = arguments(SwarmTrainingArguments, hivemind_config=config, logging_strategy="steps", warmup_steps=1)
    it = SwarmTrainer(llama(), args)
    assert it.swarm_config == config and "trahiv1" not in it.args.to_json_string()
    assert (args.max_steps, args.warmup_steps, args.max_grad_norm) == (2, 1, 1.0), "the caller's stay"


def test_local_batch_beyond_target_is_refused(arguments, samples):
    settings = SwarmSettings.read(SWARM | {"dht": {"initial_peers": "trahiv1:abc"}}, None)
    assert settings.dht.initial_peers == ["trahiv1:abc"], "as a friend pastes it"
    args = arguments(per_device_train_batch_size=8, gradient_accumulation_steps=8, max_steps=-1)
    assert settings.samples_per_step(args) == 64
    args.per_device_train_batch_size = 9
    with pytest.raises(RecipeError, match="One local batch is 72 samples but target_batch_size is 64"):
        settings.samples_per_step(args)
    assert settings.max_steps(args, samples) == 1  # 3 epochs of 16 samples, 64 a step
    with pytest.raises(RecipeError, match="needs `max_steps`"):
        settings.max_steps(args, iter(samples))


@pytest.mark.parametrize(
    ("swarm", "rules", "mode", "share"),
    [
        ({"communication_share": 0.2, "solo": "never"}, RoundRules(solo_after_s=math.inf), "sync", 0.2),
        ({"mode": "streaming", "norm_limit": 0}, RoundRules(norm_limit=0.0), "streaming", None),
        (SwarmSection(solo="after 1 second"), RoundRules(1.0), "sync", 0.05),
    ],
)
def test_round_rules_and_mode_are_passed_on(swarm, rules, mode, share):
    run = SwarmSettings.read(SWARM, swarm).run_settings()
    assert (run.rules, run.pace.mode, run.auto_share) == (rules, mode, share)


def test_recipe_settings_reach_optimizer(monkeypatch, tmp_path):
    """A compiled model has the weights' own names, and so averages with one that is not compiled."""
    sizes = ("hidden_size=12", "num_hidden_layers=1", "intermediate_size=8")
    said = [*(f"model.config.{size}" for size in sizes), "training.bf16=false", "swarm.norm_limit=3"]
    run, built = AgreedRun.of(load_recipe("quickstart", said).recipe), []
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3)
    splits = Splits(rows, rows, build_tokenizer(run.recipe))
    trainer = build_trainer(run, training_arguments(run, tmp_path), splits, node=FakeNode())
    trainer.node.dht = None
    monkeypatch.setattr(hooks, "build_optimizer", lambda _, run, **__: built.append(run))
    put_in_swarm(trainer)
    trainer._max_steps = 9
    for model in (trainer.model, torch.compile(trainer.model, backend="eager")):
        trainer.model = model
        trainer.make_inner_optimizer()
        trainer.swarm_optimizer = None
        with pytest.raises(AttributeError):  # no optimizer was built to enter a swarm with
            trainer.create_optimizer()
    assert built[0].schema == built[1].schema and built[0].rules == RoundRules(norm_limit=3.0)
