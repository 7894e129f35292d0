"""An evaluation that runs out of memory goes on with fewer samples at a time, as training does."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainingArguments

torch.set_num_threads(1)

ROWS = [[(7 * i + j) % 30 for j in range(8)] for i in range(12)]
SAMPLES = [{"input_ids": row, "labels": row} for row in ROWS]


def trainer_with_memory_for(rows, folder, told):
    """Make one that is in a swarm at step 3 and whose model takes so many rows at a time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))

    def run_out(_, args, inputs):
        if len(inputs["input_ids"]) > rows:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(run_out, with_kwargs=True)
    trainer = SwarmTrainer(
        model=model,
        args=SwarmTrainingArguments(
            output_dir=str(folder),
            max_steps=9,
            per_device_eval_batch_size=8,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            hivemind_config={"opt": {"run_id": "run-1", "target_batch_size": 64}},
        ),
        train_dataset=SAMPLES,
        eval_dataset=SAMPLES,
        events=Events(told.append),
    )
    trainer.swarm_optimizer = SimpleNamespace(
        agreed_weights=contextlib.nullcontext, local_epoch=3, max_steps=9
    )
    return trainer


def test_an_evaluation_goes_on_with_fewer_samples_at_a_time(tmp_path):
    told = []
    trainer = trainer_with_memory_for(2, tmp_path, told)
    result = trainer.evaluate()
    assert [(event["event"], event["code"]) for event in told] == [("warning", "memory")] * 2
    assert "per_device_eval_batch_size: 2" in told[-1]["hint"]
    assert trainer.evaluate()["eval_loss"] == result["eval_loss"] and len(told) == 2, "later ones begin so"
    expected = trainer_with_memory_for(8, tmp_path, told).evaluate()["eval_loss"]
    assert result["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert [entry["step"] for entry in trainer.state.log_history] == [3, 3]


def test_an_evaluation_ends_where_not_even_one_sample_fits(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        trainer_with_memory_for(0, tmp_path, []).evaluate()


def test_another_failure_of_an_evaluation_is_not_taken_for_one_of_memory(tmp_path):
    told = []
    trainer = trainer_with_memory_for(8, tmp_path, told)

    def fail(*_):
        raise RuntimeError("shapes do not match")

    trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.evaluate()
    assert told == []
