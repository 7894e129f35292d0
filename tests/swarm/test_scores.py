"""Evaluations that decide: the best weights at the end, and learning rates that follow a metric."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.kit.commands import wait_until
from tests.swarm.conftest import LOCAL
from tests.swarm.test_exactness import build_model, collate, draw, weights
from trahiv_cli.swarm.node import Node
from trahiv_cli.train.trainer import SwarmTrainer

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_one_peer_ends_with_upstreams_best_weights(tmp_path, schedule):
    torch.set_num_threads(1)
    train, held_out = draw(range(4)), draw(range(64, 72))
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=2, learning_rate=3e-3,
        optim="adamw_torch", lr_scheduler_type=schedule, lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        train_sampling_strategy="sequential", remove_unused_columns=False, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, logging_steps=1,
    )  # fmt: skip
    given = {"args": args, "train_dataset": train, "eval_dataset": held_out, "data_collator": collate}
    plain = Trainer(model=build_model(), **given)
    plain.train()
    with Node(LOCAL, tmp_path / "identity.key") as node:
        config = {"opt": {"run_id": "best", "target_batch_size": 2}}
        swarm = SwarmTrainer(model=build_model(), **given, node=node, hivemind_config=config)
        swarm.train()
    assert 0 < plain.state.best_global_step < 12, "the comparison would prove nothing"
    assert swarm.state.best_global_step == plain.state.best_global_step
    assert swarm.state.best_metric == pytest.approx(plain.state.best_metric, abs=1e-6)
    assert (weights(swarm.model) - weights(plain.model)).abs().max() <= 1e-6
    rates = [
        [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (plain, swarm)
    ]
    assert len(set(rates[0])) > 2, "the schedule has looked at metrics"
    assert rates[1] == pytest.approx(rates[0])
    assert swarm.evaluate()["eval_loss"] == pytest.approx(plain.state.best_metric, abs=1e-6)


SCORED = """
import sys, time, torch
from tests.kit.stand_ins import Blocks, model_of_blocks
from trahiv_cli import SwarmTrainer, SwarmTrainingArguments

name, mode, *initial_peers = sys.argv[1:]


class Waiting(SwarmTrainer):
    first_step = None

    def training_step(self, model, *args, **kwargs):
        swarm = self.swarm_optimizer
        if self.first_step is None:
            self.first_step = swarm.local_epoch
        if name == "first":  # until there is one that comes late
            deadline = time.monotonic() + 60
            while swarm.local_epoch == 6 and not swarm.tracker.others and time.monotonic() < deadline:
                swarm.tracker.refresh()
                time.sleep(0.1)
        return super().training_step(model, *args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):  # the weights of step 4 are the best
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_distance"] = float(abs(self.state.global_step - 4))
        return output


config = {"dht": {"initial_peers": initial_peers}, "opt": {"run_id": "best", "target_batch_size": 16}}
args = SwarmTrainingArguments(
    output_dir=name, max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, optim="adamw_torch",
    lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
    eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    metric_for_best_model="distance", greater_is_better=False, logging_steps=1,
    dataloader_pin_memory=False, hivemind_config=config, report_to=[],
)
model = model_of_blocks()
swarm = {"mode": mode, "local_steps": 2} if mode == "diloco" else {"mode": mode}
trainer = Waiting(model=model, args=args, train_dataset=Blocks(), eval_dataset=Blocks(), swarm=swarm)
trainer.train()
rates = {one["step"]: one["learning_rate"] for one in trainer.state.log_history if "loss" in one}
torch.save(
    {
        "first step": trainer.first_step,
        "best step": trainer.state.best_global_step,
        "weights": model.state_dict(),
        "rates": rates,
    },
    f"{name}.pt",
)
"""


@pytest.mark.parametrize("mode", ["overlap", "diloco"])
def test_late_peer_ends_with_same_best_weights(workplace, mode):
    """It joins after the best step, and never had these weights; so does a peer that starts again."""

    def results(name):
        return torch.load(workplace.folder / f"{name}.pt")

    invitation = workplace.folder / "first/invitation"
    first = workplace.start_script(SCORED, "first", mode)
    wait_until(invitation.exists, seconds=60)
    late = workplace.start_script(SCORED, "late", mode, f"@{invitation}")
    assert [peer.exit_code(90) for peer in (first, late)] == [0, 0]
    of_first, of_late = results("first"), results("late")
    assert of_late["first step"] >= 6
    assert of_first["best step"] == of_late["best step"] == 4
    common = of_first["rates"].keys() & of_late["rates"].keys()
    assert {of_first["rates"][step] for step in common} == {of_late["rates"][step] for step in common}
    assert of_late["rates"][max(common)] < 1e-2
    for name, weight in of_first["weights"].items():
        assert torch.equal(weight, of_late["weights"][name])

    again = workplace.start_script(SCORED, "first", mode)
    assert again.exit_code(60) == 0
    assert "The model has the weights of step 4, with the best eval_distance: 0." in again.err
    for name, weight in of_first["weights"].items():
        assert torch.equal(weight, results("first")["weights"][name])
