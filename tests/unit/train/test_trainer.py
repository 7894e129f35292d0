"""What a trainer refuses, keeps and saves in a swarm; without one it is transformers' Trainer."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.unit.train.conftest import SWARM
from trahiv_cli.errors import FolderTaken, RecipeError
from trahiv_cli.run import peer_options
from trahiv_cli.run.leaving import Left
from trahiv_cli.run.lock import owned
from trahiv_cli.run.own_status import Contribution
from trahiv_cli.run.peer_options import PeerOptions
from trahiv_cli.train import trainer as trainer_module
from trahiv_cli.train.hooks import put_in_swarm
from trahiv_cli.train.settings import SwarmSettings, SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer, started


@pytest.fixture
def trainer(swarm_trainer):
    return swarm_trainer()


def test_chosen_checkpoint_is_refused(trainer):
    with pytest.raises(RecipeError, match="can't name a checkpoint"):
        trainer.train(resume_from_checkpoint="out/checkpoint-4")


def test_taken_folder_is_refused_before_node_starts(trainer, tmp_path):
    with owned(tmp_path / "out"), pytest.raises(FolderTaken, match="A peer runs in .*out already"):
        trainer.train()
    assert trainer.node is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


@pytest.fixture
def hub(monkeypatch):
    """Stands for the hub; maps each message to the names of the files that were uploaded with it."""
    uploads = {}

    def upload_folder(*, repo_id, folder_path, commit_message, run_as_future, **_):
        uploads[commit_message] = {path.name for path in Path(folder_path).rglob("*") if path.is_file()}
        assert repo_id == "me/out"
        return ThreadPoolExecutor().submit(bool) if run_as_future else None

    def create_repo(name, **_):
        return SimpleNamespace(repo_id=f"me/{name}")

    fake = SimpleNamespace(upload_folder=upload_folder, create_repo=create_repo)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: fake)
    return uploads


@pytest.mark.parametrize("blocking", [True, False])
def test_upload_has_model_and_no_keys(trainer, hub, tmp_path, blocking):
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out/identity.key").touch()
    trainer.push_to_hub(blocking=blocking)
    [files] = hub.values()
    assert {"model.safetensors", "config.json", "README.md"} <= files
    assert "identity.key" not in files
    assert Path(trainer.args.output_dir) == tmp_path / "out"


def test_checkpoints_are_uploaded_as_they_are_saved(swarm_trainer, arguments, hub):
    trainer = swarm_trainer(args=arguments(push_to_hub=True))
    put_in_swarm(trainer)
    saved = []
    trainer.swarm_callback = SimpleNamespace(save_checkpoint=lambda: saved.append(1))
    trainer.swarm_optimizer = SimpleNamespace(local_epoch=3, agreed_weights=nullcontext)
    trainer._save_checkpoint(trainer.model, None)
    assert saved == [1]
    assert list(hub) == ["Training in progress, step 3"]


@pytest.fixture
def entered(trainer):
    """A trainer in a swarm, at step 7 of 9."""
    put_in_swarm(trainer)
    trainer.swarm_optimizer = SimpleNamespace(local_epoch=7, max_steps=9, agreed_weights=nullcontext)
    return trainer


def test_evaluation_is_deterministic(entered, samples):
    collate = entered.data_collator
    before = torch.get_rng_state()
    drawn = []
    entered.data_collator = lambda rows: drawn.append(torch.rand(3).tolist()) or collate(rows)
    for _ in range(2):
        entered.evaluate(samples)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    assert torch.equal(torch.get_rng_state(), before), "training goes on with it"


def test_evaluation_is_logged_in_bounded_history(entered, samples):
    history = entered.state.log_history
    history[:] = [{"step": 0}] * 20_000
    metrics = entered.evaluate(samples)
    assert len(history) == 20_000
    assert history[-1] == metrics | {"step": 7}


class Ending:
    """Stands for a node, the swarm's optimizer, its callback and its checkpoints, and notes how they end."""

    is_torn = False

    def __init__(self):
        self.done = []
        self.checkpoints = self.state_averager = self.lock_state = self

    def __getattr__(self, name):
        return lambda: self.done.append(name)


def test_failure_ends_training_after_checkpoint(monkeypatch, trainer):
    ending = Ending()

    def train(self, **_):
        self.swarm_optimizer = self.swarm_callback = ending
        self.has_entered = True
        raise ValueError("of a callback")

    monkeypatch.setattr(trainer_module, "started", lambda *_: ending)
    monkeypatch.setattr(trainer_module, "announced", lambda *_: nullcontext(Contribution()))
    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(ValueError, match="of a callback"):
        trainer.train()
    assert ending.done == ["save_checkpoint", "finish", "finish", "shutdown", "close"]
    trainer.close()


def test_wish_to_leave_ends_one_evaluation(monkeypatch, entered, samples):
    def train(self, **_):
        self._leaving.leave("finish")
        return self.evaluate(samples)

    class Heeding(TrainerCallback):
        def on_prediction_step(self, *_, **__):
            if entered._should_leave():
                raise Left

    entered.add_callback(Heeding())
    monkeypatch.setattr(type(entered), "_train_in_swarm", train)
    assert entered.train() == {}
    assert "eval_loss" in entered.evaluate(samples)


@pytest.mark.parametrize("args_class", [TrainingArguments, SwarmTrainingArguments])
def test_without_swarm_equals_trainer_bitwise(arguments, llama, samples, args_class):
    def outcome(cls, args_class):
        args = arguments(args_class, logging_steps=1, learning_rate=0.01)
        it = cls(model=llama(), args=args, train_dataset=samples)
        it.train()
        weights = [weight.tolist() for weight in it.model.parameters()]
        losses = [log.get("loss") for log in it.state.log_history]
        with pytest.raises(ValueError, match="checkpoint"):
            it.train(resume_from_checkpoint=True)
        return it.state.global_step, type(it.optimizer), type(it.lr_scheduler), weights, losses

    assert outcome(SwarmTrainer, args_class) == outcome(Trainer, TrainingArguments)


def test_without_swarm_takes_given_optimizer(arguments, llama):
    optimizer = torch.optim.SGD(llama().parameters(), lr=0.1)
    SwarmTrainer(model=llama(), args=arguments(), optimizers=(optimizer, None)).close()


@pytest.mark.parametrize(
    ("option", "field", "is_public"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_option_or_field_opens_swarm(option, field, is_public, monkeypatch, tmp_path):
    start = mock.Mock()
    monkeypatch.setattr(peer_options, "start_node", start)
    settings = SwarmSettings.read(SWARM, {"public": field})
    started(settings, tmp_path, PeerOptions(is_public=option))
    assert start.call_args.kwargs["is_public"] is is_public
