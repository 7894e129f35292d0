"""What tests of the trainer share: a tiny model, its samples, arguments, and a callback."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from trahiv_cli.train.trainer import SwarmTrainer

torch.set_num_threads(1)

SWARM = {"opt": {"run_id": "run-1", "target_batch_size": 64}}


class Hearer(TrainerCallback):
    """Stands for a user's callback; notes each event with its step, and the settings that it saw."""

    def __init__(self):
        self.heard = []
        self.shown = set()
        for event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
            setattr(self, event, partial(self.note, event))

    def note(self, event, args, state, control, **_):
        self.heard.append((event, state.global_step))
        self.shown.add((state.max_steps, args.max_steps, args.save_strategy, args.max_grad_norm))

    def steps_of(self, event):
        return [step for name, step in self.heard if name == event]


@pytest.fixture
def llama():
    """Make a Llama of one layer, each time with the same weights."""

    def make():
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))

    return make


@pytest.fixture
def samples():
    rows = [[(7 * i + j) % 30 for j in range(8)] for i in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def arguments(tmp_path):
    """Make arguments: `arguments(SwarmTrainingArguments, hivemind_config=...)`."""

    def make(cls=TrainingArguments, **fields):
        usual = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 1}
        return cls(output_dir=str(tmp_path / "out"), **usual | {"max_steps": 2} | fields)

    return make


@pytest.fixture
def swarm_trainer(arguments, llama, samples):
    """Make a trainer for a swarm: `swarm_trainer(node=..., swarm=...)`."""

    def make(cls=SwarmTrainer, **keywords):
        usual = {"model": llama(), "args": arguments(), "train_dataset": samples, "hivemind_config": SWARM}
        return cls(**usual | keywords)

    return make
