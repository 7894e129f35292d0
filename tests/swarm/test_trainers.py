"""Each trainer of docs/trainers.md in a swarm of one peer equals the same trainer alone."""

import pytest
import torch

from tests.kit.lone import lone_node, train_alone
from tests.kit.trainers import ROWS, STEPS, keywords_of
from trahiv_cli.train.trainer import in_swarm

torch.set_num_threads(1)

CONFIG = {"opt": {"run_id": "row", "target_batch_size": 4}}


def made(cls, keywords):
    """Call a class of trainers, or a partial of one, as a program does after `enable()`."""
    inner = getattr(cls, "func", cls)
    return in_swarm(inner)(*getattr(cls, "args", ()), **keywords)


def weights(trainer):
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("name", ROWS)
def test_one_peer_equals_trainer_alone(name, tmp_path, monkeypatch):
    cls, keywords = keywords_of(name, tmp_path / "alone")
    alone = cls(**keywords)
    before = None if alone.model is None else weights(alone)
    alone.train()
    cls, keywords = keywords_of(name, tmp_path / "swarm")
    ours = train_alone(monkeypatch, made(cls, keywords | {"hivemind_config": CONFIG, "node": lone_node()}))
    assert ours.swarm_optimizer.local_epoch == STEPS
    assert (weights(alone) - before).abs().max() > 1e-4, "the comparison would prove nothing"
    assert (weights(ours) - weights(alone)).abs().max() <= 1e-6
    losses, expected = (
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (ours, alone)
    )
    assert losses == pytest.approx(expected, abs=2e-4)
