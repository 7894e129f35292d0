"""The drop-in as its users write it: no node, no command line, only `hivemind_config`."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trahiv_cli import SwarmTrainer, SwarmTrainerMixin, SwarmTrainingArguments

pytestmark = pytest.mark.timeout(120)


class Blocks(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 60, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class OwnTrainer(SwarmTrainerMixin, Trainer):
    """What a user makes of any other trainer."""


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        )
    )


@pytest.mark.parametrize("place", ["in the arguments", "as a keyword of a subclass"])
def test_hivemind_config_is_all_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    torch.set_num_threads(1)
    config = {"dht": {}, "opt": {"run_id": "spanish_qlora", "target_batch_size": 16, "verbose": True}}
    common = {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 4, "warmup_steps": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "dataloader_pin_memory": False,
        "save_strategy": "no",
    }  # fmt: skip
    if place == "in the arguments":
        args = SwarmTrainingArguments(**common, hivemind_config=config)
        trainer = SwarmTrainer(model=tiny_model(), args=args, train_dataset=Blocks())
    else:
        args = TrainingArguments(**common)
        trainer = OwnTrainer(model=tiny_model(), args=args, train_dataset=Blocks(), hivemind_config=config)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with caplog.at_level(logging.WARNING, logger="trahiv_cli"):
        trainer.train()
    assert "To join the training, use initial_peers = ['/ip4/" in caplog.text
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3], "the x axis is the swarm's step"
    assert [entry["learning_rate"] for entry in logged] == pytest.approx([0.0, 0.005, 0.01])
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child.name() for child in left if child.name() != "torch_shm_manager"] == []
    assert args.max_steps == 3, "the user's own arguments are as they were"
