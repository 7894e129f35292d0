"""What a trainer refuses, keeps and saves in a swarm; without one it is transformers' Trainer."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from trahiv_cli.errors import FolderTaken, RecipeError, SwarmError
from trahiv_cli.train import trainer as trainer_module
from trahiv_cli.train.folder import owned
from trahiv_cli.train.settings import SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer

SWARM = {"dht": {}, "opt": {"run_id": "run-1", "target_batch_size": 64}}


@pytest.fixture
def trainer(arguments, llama, samples):
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    return SwarmTrainer(model=llama(), args=args, train_dataset=samples)


@pytest.mark.parametrize("checkpoint", [True, "out/checkpoint-1"])
def test_resuming_from_a_path_is_refused_before_a_node_is_started(trainer, checkpoint):
    with pytest.raises(RecipeError, match="no meaning in a swarm"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.node is None


def test_a_folder_that_another_peer_runs_in_is_refused_before_a_node_is_started(trainer, tmp_path):
    with owned(tmp_path / "out"), pytest.raises(FolderTaken, match="A peer runs in .*out already"):
        trainer.train()
    assert trainer.node is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


def test_the_folder_of_keys_is_not_uploaded(trainer):
    with pytest.raises(RecipeError, match="nothing was uploaded"):
        trainer.push_to_hub()


def test_a_run_without_an_end_keeps_its_newest_logs(trainer):
    trainer.swarm_optimizer = SimpleNamespace(local_epoch=7, max_steps=9)
    trainer.state.log_history[:] = [{"step": 0}] * trainer_module.LOGS_KEPT
    trainer.log({"eval_loss": 1.5})
    assert len(trainer.state.log_history) == trainer_module.LOGS_KEPT
    newest = trainer.state.log_history[-1]
    assert (newest["eval_loss"], newest["step"]) == (1.5, 7)


class Ending:
    """Stands for a node, the swarm's optimizer and its callback, and notes how they end."""

    def __init__(self):
        self.done = []

    def close(self):
        self.done.append("close")

    def shutdown(self):
        self.done.append("shutdown")

    def save_checkpoint(self):
        self.done.append("save")

    def finish_saving(self):
        self.done.append("finish")


@pytest.mark.parametrize(("error", "is_saved"), [(SwarmError("lost"), True), (ValueError("a bug"), False)])
def test_a_peer_that_its_swarm_leaves_no_way_on_saves_what_it_has(monkeypatch, trainer, error, is_saved):
    ending = Ending()

    def train(self, **_):
        self.optimizer = self.swarm_optimizer = self.swarm_callback = ending
        raise error

    monkeypatch.setattr(trainer_module, "start_node", lambda *_, **__: ending)
    monkeypatch.setattr(trainer_module, "log_how_to_join", lambda *_: None)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    with pytest.raises(type(error)):
        trainer.train()
    assert ending.done == ["save"] * is_saved + ["finish", "shutdown", "close"]
    trainer.close()


# -- without a swarm ------------------------------------------------------------------------------


@pytest.mark.parametrize("args_class", [TrainingArguments, SwarmTrainingArguments])
def test_without_a_swarm_it_trains_to_the_same_bits_as_trainer(arguments, llama, samples, args_class):
    def trained(cls, args_class):
        fields = {"logging_steps": 1, "logging_strategy": "steps", "learning_rate": 0.01}
        it = cls(model=llama(), args=arguments(args_class, **fields), train_dataset=samples)
        it.train()
        return it, it.model.state_dict()

    ours, our_weights = trained(SwarmTrainer, args_class)
    theirs, their_weights = trained(Trainer, TrainingArguments)
    start = llama().state_dict()
    assert all(torch.equal(our_weights[name], their_weights[name]) for name in their_weights)
    assert not all(torch.equal(our_weights[name], start[name]) for name in start)
    assert type(ours.optimizer) is type(theirs.optimizer)
    assert type(ours.lr_scheduler) is type(theirs.lr_scheduler)
    assert ours.state.global_step == theirs.state.global_step == 2
    unlike = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    logs = [
        [{k: v for k, v in log.items() if k not in unlike} for log in it.state.log_history]
        for it in (ours, theirs)
    ]
    assert logs[0] == logs[1] and "loss" in logs[0][0]


def test_without_a_swarm_nothing_is_refused(arguments, llama, samples):
    optimizer = torch.optim.SGD(llama().parameters(), lr=0.1)
    SwarmTrainer(model=llama(), args=arguments(), optimizers=(optimizer, None)).close()
    with pytest.raises(ValueError, match="checkpoint"):
        SwarmTrainer(model=llama(), args=arguments(), train_dataset=samples).train(
            resume_from_checkpoint=True
        )
