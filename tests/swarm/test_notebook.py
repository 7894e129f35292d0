"""The drop-in in a notebook: a cell is interrupted, and run again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.kit.commands import left_by, wait_until
from tests.kit.stand_ins import DROP_IN

pytestmark = pytest.mark.timeout(180)


NOTEBOOK = (
    DROP_IN
    + """
import json, signal, psutil

def say(event, **fields):
    print(json.dumps({"v": 1, "event": event, **fields}), flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel does, whatever it was started from
args = SwarmTrainingArguments(
    output_dir="outputs",
    max_steps=100_000,
    per_device_train_batch_size=4,
    logging_steps=1,
    report_to=[],
    dataloader_pin_memory=False,
    hivemind_config={"dht": {"initial_peers": []}, "opt": {"run_id": "spanish", "target_batch_size": 8}},
)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
trainer = SwarmTrainer(model=model, args=args, train_dataset=Blocks())
for cell in range(3):
    say("cell", number=cell)
    if cell == 2:
        trainer.train()  # nobody catches what Ctrl-C raises
    try:
        trainer.train()
    except KeyboardInterrupt:
        state = trainer.state
        left = [child.name() for child in psutil.Process().children(recursive=True)]
        say(
            "interrupted",
            number=cell,
            first=state.log_history[0]["step"],
            steps=[state.global_step, state.max_steps],
            left=[name for name in left if name != "torch_shm_manager"],
            is_handler_back=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        )
"""
)


def test_a_notebook_is_interrupted_and_its_cell_run_again(workplace: Any) -> None:
    """A kernel's SIGINT is a KeyboardInterrupt in the cell, and the process lives on."""
    kernel = workplace.start_script(NOTEBOOK)
    stops: list[dict[str, Any]] = []
    for cell in range(2):
        kernel.wait_for("cell", timeout=60, number=cell)
        interrupt_training(kernel)
        stops.append(kernel.wait_for("interrupted", timeout=30, number=cell))
    for stop in stops:
        assert stop["steps"][1] == 100_000
        assert stop["left"] == [] and stop["is_handler_back"]
        assert (workplace.folder / "outputs" / "checkpoints" / f"step-{stop['steps'][0]}").is_dir()
        assert f"Stopped at step {stop['steps'][0]}. `train()` resumes from" in kernel.err
    assert stops[0]["first"] == 1 and stops[1]["first"] > stops[0]["steps"][0]
    assert "Traceback" not in kernel.err and "Task was destroyed" not in kernel.err

    kernel.wait_for("cell", timeout=60, number=2)  # as in a script, which ends with it
    interrupt_training(kernel)
    assert kernel.exit_code(timeout=30) == -signal.SIGINT
    assert kernel.err.rstrip().endswith("KeyboardInterrupt")
    assert left_by(kernel.pid) == []


def interrupt_training(kernel: Any) -> None:
    """Press Ctrl-C when a loss was logged since now."""
    said = len(kernel.noise)
    wait_until(lambda: any("'loss'" in line for line in kernel.noise[said:]), seconds=60)
    kernel.press_ctrl_c()


def test_a_second_interrupt_leaves_at_once_and_the_notebook_lives_on(workplace: Any) -> None:
    kernel = workplace.start_script(NOTEBOOK)
    interrupt_training(kernel)
    kernel.send_signal(signal.SIGTERM)  # two of a kind are one if they come before the first is heard
    stop = kernel.wait_for("interrupted", timeout=30, number=0)
    assert stop["left"] == [] and stop["is_handler_back"]
    kernel.wait_for("cell", timeout=10, number=1)
