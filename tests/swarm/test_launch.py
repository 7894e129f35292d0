"""`trahiv launch`: programs that know nothing of trahiv train in a swarm and end as other peers do."""

import json
import os
import signal
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.kit.commands import LOOPBACK, wait_until
from tests.kit.stand_ins import write_llama
from tests.kit.verdicts import group_of
from tests.swarm.conftest import above, told

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import os, sys, time
from pathlib import Path
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from tests.kit.stand_ins import Blocks, model_of_blocks

class Paced(Trainer):
    def training_step(self, *args, **kwargs):
        time.sleep(0.1)
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, *args):
        super()._save_checkpoint(*args)
        Path(self.args.output_dir, "own-checkpoint").touch()

output_dir, max_steps = sys.argv[1:]
args = TrainingArguments(
    output_dir=output_dir, max_steps=int(max_steps), per_device_train_batch_size=4, report_to=[],
    save_steps=10, dataloader_pin_memory=False,
)
trainer = Paced(model=model_of_blocks(), args=args, train_dataset=Blocks())
trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None)
trainer.save_model(output_dir + "/saved")
"""


@pytest.fixture
def launch(start, tmp_path):
    """Start `trahiv launch` of the program, or of another one: `launch("first", 40, "--peer", ...)`."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def start_program(folder, max_steps, *options, program=None):
        words = program or [script, folder, max_steps]
        usual = ("--format", "json", "--target-batch-size", 16, *LOOPBACK)
        return start("launch", *usual, *options, "--", *words, is_cold=True)

    return start_program


def test_two_launched_peers_end_equal(launch, tmp_path):
    first = launch("first", 60)
    first.wait_for("ready", 90)
    second = launch("second", 60, "--peer", f"@{tmp_path}/first/invitation", "--name", "Bob")
    assert [peer.exit_code(120) for peer in (first, second)] == [0, 0]
    [joined] = told(second.events, "joined")
    assert joined["source"] == "swarm"
    assert any(len(group_of(step)) == 2 for step in told(first.events, "step"))
    one, two = (load_file(tmp_path / name / "saved/model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "first/own-checkpoint").exists()
    last = load_file(tmp_path / "first/checkpoint-60/model.safetensors")
    assert all(torch.equal(one[name], last[name]) for name in one)


@pytest.fixture
def running(launch):
    peer = launch("first", 100_000)
    peer.wait_for("step", 90, step=above(10))
    return peer


def test_signal_leaves_checkpoint_and_its_code(running, launch, tmp_path):
    running.send_signal(signal.SIGTERM)
    assert running.exit_code(60) == 143
    [done] = told(running.events, "done")
    assert done["reason"] == "signal"
    assert done["resume"].startswith("trahiv launch")
    assert (tmp_path / done["path"]).is_dir()
    assert list((tmp_path / "first").glob("checkpoint-*"))  # the program names it when it starts again
    again = launch("first", done["step"] + 2)
    assert again.exit_code(90) == 0
    [joined] = told(again.events, "joined")
    assert (joined["source"], joined["step"]) == ("checkpoint", done["step"])


def test_signal_before_training_ends_program(launch, tmp_path):
    program = tmp_path / "slow.py"
    program.write_text(
        "import os, sys, time\nimport transformers.trainer\n"
        "open('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    peer = launch("", 0, program=["bash", "-c", f"{sys.executable} {program}; exit 1"])
    written = tmp_path / "pid"
    wait_until(lambda: written.exists() and written.read_text(), 90)
    peer.send_signal(signal.SIGTERM)
    assert peer.exit_code(60) == 143
    assert not psutil.pid_exists(int(written.read_text()))


def test_spent_budget_leaves_checkpoint(launch, tmp_path):
    peer = launch("first", 100_000, "--budget", "3steps")
    assert peer.exit_code(90) == 0
    [done] = told(peer.events, "done")
    assert (done["reason"], done["step"]) == ("budget", 3)
    assert (tmp_path / done["path"]).is_dir()


def test_paused_program_restarts_when_resumed(running, workplace):
    assert workplace.run("pause", "first").code == 0
    paused = running.wait_for("paused", 60)
    assert workplace.run("resume", "first").code == 0
    running.wait_for("resumed", 60)
    running.wait_for("step", 90, step=lambda step: step > paused["step"])
    assert running.is_running


def test_joiner_without_program_is_shown_it(running, workplace, tmp_path):
    seen = workplace.run("launch", "--peer", f"@{tmp_path}/first/invitation")
    assert seen.code == 0
    assert f"-- {tmp_path}/program.py first 100000" in seen.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "--target-batch-size", 32, "--peer", "LINE", "--", "program.py"), "differs in 1 of"),
        (("join", "--peer", "LINE"), "trains a program, not a recipe"),
    ],
)
def test_unlike_run_is_refused(running, workplace, tmp_path, words, said):
    line = f"@{tmp_path}/first/invitation"
    refused = workplace.run(*(line if word == "LINE" else word for word in words))
    assert refused.code == 5
    assert said in refused.err


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("print('hello')", 3, "no Trainer of transformers trained in it"),
        ("raise SystemExit(7)", 7, ""),
        ("from transformers import Trainer; Trainer(model=None)", 2, "A swarm needs `args`"),
        ("from transformers import Trainer; Trainer(no_such=None)", 1, "no_such"),
    ],
)
def test_program_that_does_not_train_is_reported(workplace, tmp_path, program, code, said):
    (tmp_path / "other.py").write_text(program)
    ended = workplace.run("launch", "--", tmp_path / "other.py")
    assert ended.code == code
    assert said in ended.err
    assert ended.left == ()


TEXT = [{"text": f"{n} and {n} are {2 * n}."} for n in range(64)]
PAIRS = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {n}"} for n in range(64)]
JUDGED = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}", "label": n % 2 == 0} for n in range(64)]


REWARD = """
def number_of_letters(completions, **_):
    return [float(sum(map(str.isalpha, text))) for text in completions]
"""
REWARDED = ["--reward_funcs", "rewards.number_of_letters", "--num_generations", 4]
REWARDED += ["--max_completion_length", 8, "--learning_rate", 1e-3]
COMMANDS = {
    "sft": (TEXT, ["--max_length", 32]),
    "dpo": (PAIRS, ["--max_length", 32]),
    "kto": (JUDGED, ["--max_length", 32]),
    "reward": (PAIRS, ["--max_length", 32]),
    "grpo": (PAIRS, REWARDED),
    "rloo": (PAIRS, REWARDED),
}


@pytest.mark.parametrize("command", COMMANDS if os.environ.get("TRAHIV_ALL_ROWS") else ["sft"])
def test_commands_of_trl_end_equal(launch, tmp_path, command):
    """`trl` starts accelerate, which starts the script that trains."""
    rows, more = COMMANDS[command]
    model = write_llama(tmp_path / "model", hidden_size=32)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start_peer(folder, *options):
        words = ["trl", command, "--model_name_or_path", model, "--dataset_name", tmp_path / "data"]
        words += ["--output_dir", folder, "--max_steps", 30, "--per_device_train_batch_size", 4, "--use_cpu"]
        words += ["--report_to", "none", "--bf16", "False", *more]
        return launch(folder, 0, *options, program=words)

    first = start_peer("first", "--swarm", "min_peers=2", "--swarm", "mode=sync")
    first.wait_for("ready", 120)
    second = start_peer("second", "--peer", f"@{tmp_path}/first/invitation")
    assert [peer.exit_code(150) for peer in (first, second)] == [0, 0]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(one[name], two[name]) for name in one)
