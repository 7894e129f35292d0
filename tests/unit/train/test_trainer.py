"""What a trainer refuses, keeps and saves in a swarm; without one it is transformers' Trainer."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from trahiv_cli.errors import FolderTaken, RecipeError, SwarmError
from trahiv_cli.run.lock import owned
from trahiv_cli.train import trainer as trainer_module
from trahiv_cli.train.account import NOTHING_GIVEN
from trahiv_cli.train.hooks import LOGS_KEPT, put_in_swarm
from trahiv_cli.train.leaving import Left
from trahiv_cli.train.settings import SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer

SWARM = {"dht": {}, "opt": {"run_id": "run-1", "target_batch_size": 64}}


@pytest.fixture
def trainer(arguments, llama, samples):
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    return SwarmTrainer(model=llama(), args=args, train_dataset=samples)


def test_misuse_is_refused_before_node_starts(trainer, tmp_path):
    with pytest.raises(RecipeError, match="no meaning in a swarm"):
        trainer.train(resume_from_checkpoint=True)
    with owned(tmp_path / "out"), pytest.raises(FolderTaken, match="A peer runs in .*out already"):
        trainer.train()
    assert trainer.node is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]
    with pytest.raises(RecipeError, match="nothing was uploaded"):
        trainer.push_to_hub()


def test_evaluation_is_deterministic_and_logged(trainer, samples):
    put_in_swarm(trainer)
    trainer.swarm_optimizer = SimpleNamespace(local_epoch=7, max_steps=9, agreed_weights=nullcontext)
    trainer.state.log_history[:] = [{"step": 0}] * LOGS_KEPT
    collate, before, drawn = trainer.data_collator, torch.get_rng_state(), []
    trainer.data_collator = lambda rows: drawn.append(torch.rand(3).tolist()) or collate(rows)
    for _ in range(2):
        trainer.evaluate(samples)
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]
    assert torch.equal(torch.get_rng_state(), before), "training goes on with it"
    *_, log = history = trainer.state.log_history
    assert len(history) == LOGS_KEPT and log["step"] == 7 and "eval_loss" in log


class Ending:
    """Stands for a node, the swarm's optimizer, its callback and its checkpoints, and notes how they end."""

    def __init__(self):
        self.done, self.checkpoints = [], self
        self.state_averager, self.lock_state, self.is_torn = self, self, False

    def __getattr__(self, name):
        return lambda: self.done.append(name)


@pytest.mark.parametrize("error", [SwarmError("lost"), ValueError("of a callback"), MemoryError()])
def test_failure_ends_training_after_checkpoint(monkeypatch, trainer, error):
    ending = Ending()

    def train(self, **_):
        self.swarm_optimizer = self.swarm_callback = ending
        self.has_entered = True
        raise error

    monkeypatch.setattr(trainer_module, "started", lambda *_: ending)
    monkeypatch.setattr(trainer_module, "told", lambda *_: nullcontext(NOTHING_GIVEN))
    monkeypatch.setattr(transformers.Trainer, "train", train)
    with pytest.raises(type(error)):
        trainer.train()
    assert ending.done == ["save_checkpoint", "finish", "finish", "shutdown", "close"]
    trainer.close()


def test_wish_to_leave_ends_one_evaluation(monkeypatch, trainer, samples):
    put_in_swarm(trainer)
    trainer.swarm_optimizer = SimpleNamespace(local_epoch=7, max_steps=9, agreed_weights=nullcontext)

    def train(self, **_):
        self._leaving.leave("finish")
        return self.evaluate(samples)

    class Heeding(transformers.TrainerCallback):
        def on_prediction_step(self, *_, **__):
            if trainer._should_leave():
                raise Left

    trainer.add_callback(Heeding())
    monkeypatch.setattr(type(trainer), "_train_in_swarm", train)
    assert trainer.train() == {}
    assert "eval_loss" in trainer.evaluate(samples)


@pytest.mark.parametrize("args_class", [TrainingArguments, SwarmTrainingArguments])
def test_without_swarm_equals_trainer_bitwise(arguments, llama, samples, args_class):
    def trained(cls, args_class):
        args = arguments(args_class, logging_steps=1, logging_strategy="steps", learning_rate=0.01)
        it = cls(model=llama(), args=args, train_dataset=samples)
        it.train()
        return it

    ours, theirs = trained(SwarmTrainer, args_class), trained(Trainer, TrainingArguments)
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    assert all(torch.equal(our, their) for our, their in pairs)
    assert type(ours.optimizer) is type(theirs.optimizer)
    assert type(ours.lr_scheduler) is type(theirs.lr_scheduler)
    assert ours.state.global_step == theirs.state.global_step == 2
    losses = [[log.get("loss") for log in it.state.log_history] for it in (ours, theirs)]
    assert losses[0] == losses[1] and losses[0][0]
    with pytest.raises(ValueError, match="checkpoint"):
        ours.train(resume_from_checkpoint=True)
    optimizer = torch.optim.SGD(llama().parameters(), lr=0.1)
    SwarmTrainer(model=llama(), args=arguments(), optimizers=(optimizer, None)).close()
