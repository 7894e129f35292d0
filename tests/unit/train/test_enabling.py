"""Classes of transformers, and of its users, as `enable` lets them take `hivemind_config`."""

import pickle
from dataclasses import dataclass, replace

import pytest
from transformers import HfArgumentParser, Trainer, TrainingArguments

from tests.unit.conftest import refused
from tests.unit.train.conftest import SWARM
from trahiv_cli.errors import RecipeError
from trahiv_cli.train.settings import taking_config
from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainerMixin, in_swarm


class Distilling(Trainer):
    """Has an argument of its own before the Trainer's, as in HF's guide to distillation."""

    def __init__(self, teacher, *args, **kwargs):
        self.teacher = teacher
        super().__init__(*args, **kwargs)


class Preset(Trainer):
    """Makes the Trainer's arguments itself."""

    def __init__(self, model, args):
        super().__init__(model=model, args=args, train_dataset=[{"labels": [1]}] * 64)


class LateSwarm(Distilling, SwarmTrainerMixin, Trainer):
    """Has the mixin behind a class of its own."""


@dataclass
class OwnArguments(TrainingArguments):
    temperature: float = 1.0


class ReadyArguments(TrainingArguments):
    """Has a constructor of its own."""

    def __init__(self, folder, **kwargs):
        super().__init__(output_dir=folder, **kwargs)


@pytest.mark.parametrize("cls", [Distilling, LateSwarm])
def test_own_positional_arguments_stay_in_place(cls, arguments, llama, samples):
    model = llama()
    trainer = in_swarm(cls)("teacher", model, arguments(), train_dataset=samples, hivemind_config=SWARM)
    assert trainer.teacher == "teacher"
    assert trainer.model is model
    assert trainer.swarm_settings.opt.target_batch_size == 64


def test_config_reaches_arguments_made_inside(arguments, llama):
    args = arguments(taking_config(TrainingArguments), hivemind_config=SWARM)
    trainer = in_swarm(Preset)(llama(), args)
    assert trainer.swarm_config is SWARM
    assert type(trainer.args) is TrainingArguments
    assert args.hivemind_config is SWARM


@pytest.fixture
def usual(monkeypatch):
    monkeypatch.setattr(SwarmTrainerMixin, "usual_config", SWARM)
    monkeypatch.setattr(SwarmTrainerMixin, "usual_swarm", {"mode": "sync"})
    monkeypatch.setattr(SwarmTrainerMixin, "_of_usual_config", None)


def test_usual_config_serves_trainers_without_one(usual, arguments, llama):
    own = {"opt": {"run_id": "own", "target_batch_size": 64}}
    given = in_swarm(Preset)(llama(), arguments(), hivemind_config=own)
    usually = in_swarm(Preset)(llama(), arguments())
    assert given.swarm_config is own
    assert usually.swarm_config is SWARM
    assert usually.swarm_settings.swarm.mode == "sync"


def test_second_training_by_usual_config_is_refused(usual, arguments, llama):
    first, second = (in_swarm(Preset)(llama(), arguments()) for _ in range(2))
    first.plan_run()
    first.plan_run()
    with refused("Another trainer of this program", "run_id", RecipeError):
        second.plan_run()


def test_names_of_classes_are_kept(arguments, llama):
    trainer = in_swarm(Preset)(llama(), arguments())
    assert isinstance(trainer, Preset)
    assert (type(trainer).__name__, type(trainer).__module__) == ("Preset", __name__)


@pytest.mark.parametrize("cls", [Trainer, SwarmTrainer])
def test_trainer_without_config_is_plain(cls, arguments, llama, samples):
    args = arguments(taking_config(TrainingArguments), hivemind_config=None)
    trainer = in_swarm(cls)(llama(), args, train_dataset=samples)
    assert type(trainer) is cls
    assert trainer.args is args
    assert pickle.loads(pickle.dumps(args)).max_steps == 2
    assert trainer.train().global_step == 2


def test_made_class_is_made_once():
    assert in_swarm(Preset) is in_swarm(Preset) is in_swarm(in_swarm(Preset))
    assert taking_config(OwnArguments) is taking_config(taking_config(OwnArguments))


def test_swarm_without_arguments_is_refused(llama):
    with refused("needs `args`", "max_steps", RecipeError):
        in_swarm(Trainer)(llama(), hivemind_config=SWARM)


def test_arguments_keep_config_when_replaced(arguments):
    args = arguments(taking_config(OwnArguments), hivemind_config=SWARM, temperature=2.0)
    again = replace(args, max_steps=5)
    assert (again.hivemind_config, again.temperature, again.max_steps) == (SWARM, 2.0, 5)
    assert isinstance(again, OwnArguments)


def test_own_constructor_of_arguments_is_called(tmp_path):
    args = taking_config(ReadyArguments)(str(tmp_path), max_steps=7, hivemind_config=SWARM)
    assert (args.output_dir, args.max_steps, args.hivemind_config) == (str(tmp_path), 7, SWARM)


def test_command_line_has_no_config(tmp_path):
    [args] = HfArgumentParser(OwnArguments).parse_args_into_dataclasses(["--output_dir", str(tmp_path)])
    assert not hasattr(args, "hivemind_config")
