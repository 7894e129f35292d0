"""Settings that can't work in a swarm are refused before anything starts; others reach the optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.trainer_utils import HubStrategy

from tests.kit.lone import lone_node
from tests.unit.conftest import refused
from tests.unit.train.conftest import SWARM
from trahiv_cli.errors import RecipeError
from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.train import hooks
from trahiv_cli.train.settings import SwarmSettings, SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer

OPT = SWARM["opt"]

STEPPED = torch.optim.SGD([torch.ones(1)], lr=0.1)
STEPPED.state["momentum"] = torch.ones(1)

TROUBLE = {  # by message: fields of the arguments as on another machine; keywords; what to do instead
    "several GPUs": ({"_n_gpu": 2}, {}, "CUDA_VISIBLE_DEVICES=1"),
    "with several processes": (
        {"_setup_devices": torch.device("cpu"), "distributed_state": SimpleNamespace(num_processes=2)},
        {},
        "CUDA_VISIBLE_DEVICES=1",
    ),
    "a device of type xpu": ({"_setup_devices": torch.device("xpu")}, {}, "use_cpu=True"),
    "hub_strategy=checkpoint": (
        {"push_to_hub": True, "hub_strategy": HubStrategy.CHECKPOINT},
        {},
        "every_save",
    ),
    "by epoch of data without a length": (
        {"save_strategy": "epoch"},
        {"train_dataset": iter(())},
        "by steps",
    ),
    "optim=lomo": ({"optim": "lomo"}, {}, "adamw_torch"),
    "that has taken steps": ({}, {"optimizers": (STEPPED, None)}, "a new one"),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_arguments_unusable_in_swarm_are_refused(arguments, swarm_trainer, what):
    """Fields that are always refused are in `test_arguments.py`."""
    fields, keywords, instead = TROUBLE[what]
    args = arguments()
    vars(args).update(fields)
    with refused(what, instead, RecipeError):
        swarm_trainer(args=args, **keywords)


@pytest.mark.parametrize(
    ("config", "swarm", "said"),
    [
        ({"opt": OPT | {"run_id": 7}}, {}, r"hivemind_config\.opt\.run_id"),
        ({"opt": None}, {}, "run_id is missing"),
        ({"opt": OPT | {"load_state_compression": "blockwise4"}}, {}, r"state_compression: .* 'blockwise8'"),
        ({"opt": OPT, "dht": {"client_mode": "perhaps"}}, {}, r"^hivemind_config\.dht\.client_mode"),
        (SWARM, {"solo": 1, "robust": True}, r"swarm\.solo: .*; swarm\.robust: "),
    ],
)
def test_wrong_setting_is_refused(config, swarm, said):
    with refused(said, "trahiv schema|my_run", RecipeError):
        SwarmSettings.read(config, swarm)


def test_trainer_needs_args_exactly_once(arguments, llama):
    with pytest.raises(RecipeError, match="needs `args`"):
        SwarmTrainer(model=llama(), hivemind_config=SWARM)
    for given in ((llama(), arguments()), (None,) * 40):
        with pytest.raises(TypeError, match=r"multiple values|too many"):
            SwarmTrainer(*given, args=arguments())


def test_config_in_arguments_is_hidden_from_trackers(arguments, llama):
    config = SWARM | {"dht": {"initial_peers": ["trahiv1:abc"]}}
    args = arguments(SwarmTrainingArguments, hivemind_config=config, warmup_steps=1)
    before = dict(vars(args))
    it = SwarmTrainer(llama(), args)
    assert it.swarm_config == config
    assert "trahiv1" not in it.args.to_json_string()
    assert vars(args) == before, "the caller's stay"


def test_initial_peer_may_be_single_text():
    settings = SwarmSettings.read(SWARM | {"dht": {"initial_peers": "trahiv1:abc"}}, None)
    assert settings.dht.initial_peers == ["trahiv1:abc"]


def test_local_batch_beyond_target_is_refused(arguments):
    settings = SwarmSettings.read(SWARM, None)
    args = arguments(gradient_accumulation_steps=8)
    assert settings.samples_per_step(args) == 64
    args.per_device_train_batch_size = 9
    with pytest.raises(RecipeError, match="One local batch is 72 samples but target_batch_size is 64"):
        settings.samples_per_step(args)


def test_passes_determine_steps_by_length(arguments):
    settings = SwarmSettings.read(SWARM, None)
    args = arguments(max_steps=-1)
    steps = [settings.max_steps(args, samples) for samples in (16, 22)]
    assert steps == [1, 2], "3 epochs, 64 samples a step"
    with pytest.raises(RecipeError, match="needs `max_steps`"):
        settings.max_steps(args, None)


@pytest.mark.parametrize(
    ("swarm", "rules", "mode", "share"),
    [
        ({"communication_share": 0.2, "solo": "never"}, RoundRules(solo_after_s=math.inf), "sync", 0.2),
        ({"mode": "streaming", "norm_limit": 0}, RoundRules(norm_limit=0.0), "streaming", None),
        (SwarmSection(solo="after 1 second"), RoundRules(1.0), "sync", 0.05),
    ],
)
def test_round_rules_and_mode_are_passed_on(arguments, swarm, rules, mode, share):
    run = SwarmSettings.read(SWARM, swarm).run_settings(arguments(), b"schema", 9)
    assert (run.rules, run.pace.mode, run.auto_share) == (rules, mode, share)


def test_swarm_settings_reach_optimizer(monkeypatch, swarm_trainer, llama):
    """A compiled model has the weights' own names, and so averages with one that is not compiled."""
    built = []
    monkeypatch.setattr(hooks, "build_optimizer", lambda _, run, **__: built.append(run))
    for model in (llama(), torch.compile(llama(), backend="eager")):
        trainer = swarm_trainer(model=model, node=lone_node(), swarm={"norm_limit": 3})
        trainer.plan_run()
        with pytest.raises(AttributeError):  # no optimizer was built to enter a swarm with
            trainer.create_optimizer()
    assert built[0].schema == built[1].schema
    assert built[0].rules == RoundRules(norm_limit=3.0)
