"""One peer on a GPU: every precision trains in a swarm as it does alone; trained weights are float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig

from tests.kit.stand_ins import write_llama
from trahiv_cli import SwarmSFTTrainer
from trahiv_cli.train.tasks import CHECKPOINTING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and this machine has none"),
    pytest.mark.timeout(300),
]

SENTENCES = Dataset.from_list([{"text": f"the {word} fox is a fox"} for word in ("red", "old", "big") * 40])

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "bf16": False},
    "bf16-checkpointing": {"bf16": True, CHECKPOINTING: True},
    "bf16-compiled": {"bf16": True, "torch_compile": True},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), hidden_size=128)


def train(llama: Path, folder: Path, precision: dict[str, Any], *, qlora: bool = False) -> Any:
    options: dict[str, Any] = {}
    if qlora:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    trainer = SwarmSFTTrainer(
        AutoModelForCausalLM.from_pretrained(llama, **options),
        SFTConfig(
            output_dir=str(folder), max_steps=8, max_length=32, per_device_train_batch_size=8,
            learning_rate=3e-3, optim="paged_adamw_8bit" if qlora else "adamw_torch", logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True,
            **({CHECKPOINTING: False} | precision),
        ),
        train_dataset=SENTENCES,
        processing_class=AutoTokenizer.from_pretrained(llama),
        peft_config=LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM") if qlora else None,
        hivemind_config={"opt": {"run_id": "gpu", "target_batch_size": 16}},
    )  # fmt: skip
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision_trains(llama, tmp_path, name):
    trainer = train(llama, tmp_path, PRECISIONS[name])
    assert trainer.swarm_optimizer.local_epoch == 8
    assert losses(trainer)[-1] < losses(trainer)[0]
    for weight in trainer.model.parameters():
        assert weight.is_cuda
        assert weight.dtype == torch.float32 or not weight.requires_grad


def test_qlora_trains_with_paged_8bit_moments(llama, tmp_path):
    trainer = train(llama, tmp_path, {"bf16": True, CHECKPOINTING: True}, qlora=True)
    assert losses(trainer)[-1] < losses(trainer)[0]
    states = trainer.swarm_optimizer.opt.state.values()
    assert any(state["state1"].dtype == torch.uint8 for state in states), "large moments are 8-bit"
