"""The swarm's step as the clock: when actions are due, and events about them."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from transformers import DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from tests.unit.train.conftest import Hearer
from trahiv_cli.rounds.claims import Round
from trahiv_cli.run.leaving import ENDLESS_BUDGET, Budget, Left
from trahiv_cli.run.own_status import Contribution
from trahiv_cli.step.method import OwnSteps
from trahiv_cli.step.round_runner import OVERTAKEN
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import callbacks
from trahiv_cli.train.batches import BatchWeight
from trahiv_cli.train.callbacks import SwarmCallback, SwarmEvents

ROUND = Round({"QmA": 16}, 0.12345, 10, 20, True, "QmC did not vote", {"QmB": "too large"}, 0.12345)
FAILED = Round({}, 3.0, 0, 0, False, "nobody came")


class Swarm:
    """Stands for a trainer, the swarm's optimizer and its checkpoints, around a real callback."""

    local_epoch = dropped_samples = step_samples = my_step_samples = save_minutes = 0
    step_taken = -1
    max_steps = 100
    last_learning_rates = (0.5, 0.5)
    plain_model = last_round = last_grad_norm = data_figures = None
    own_steps = OwnSteps()
    others = ()
    is_evaluating = True
    optimizer_step_was_skipped = False

    def __init__(self, clock, args, leave=bool, budget=ENDLESS_BUDGET, steps_per_pass=100, **changes):
        vars(self).update(changes)
        self.clock = clock
        self.args = args
        self.accelerator = self.swarm_settings = self.swarm = self.tracker = self
        self.told = []
        self.saved = []
        self.taken_back = []
        self.save_beside = self.saved.append
        self.forget_announced = lambda: self.taken_back.append(clock.now)
        self.events = Events(self.told.append)
        self.control = TrainerControl()
        self.state = TrainerState(max_steps=self.max_steps)
        self.state.compute_steps(args, self.max_steps)
        self.callback = SwarmCallback(self, self, self, leave, lambda: None, budget, Contribution())
        self.user = Hearer()
        before = CallbackHandler([DefaultFlowCallback(), self.user], None, None, None, None)
        self.handler = SwarmEvents(before, self.callback, steps_per_pass)

    def count_swarm_steps(self):
        self.state.global_step = self.local_epoch

    def call(self, event):
        self.control = getattr(self.handler, event)(self.args, self.state, self.control)

    def local_step(self, loss=1.0, seconds=1.0, weight=4.0, **changes):
        """One local step of the Trainer, which changes the optimizer."""
        self.callback.add_loss(torch.tensor(loss), BatchWeight(4, weight, None, tokens=40))
        vars(self).update(changes)
        self.clock.now += seconds
        self.control = TrainerControl()
        self.call("on_step_begin")
        self.state.global_step += 1  # as the Trainer does
        self.call("on_step_end")
        if self.control.should_save:
            self.callback.save_checkpoint()

    def swarm_step(self, step, **changes):
        self.local_step(local_epoch=step, step_taken=step, step_samples=64, my_step_samples=16, **changes)

    @property
    def due(self):
        return " ".join(name for name in ("log", "evaluate", "save") if vars(self.control)[f"should_{name}"])

    @property
    def names(self):
        return [event.get("code", event["event"]) for event in self.told]


def strategies(name):
    return {f"{kind}_strategy": name for kind in ("logging", "eval", "save")}


@pytest.fixture
def swarm(monkeypatch, clock, arguments):
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(callbacks.CheckpointData, "of", lambda _, optimizer: optimizer.local_epoch)
    return lambda fields={}, **more: Swarm(clock, arguments(**fields), **more)


@pytest.fixture
def it(swarm):
    return swarm()


def test_due_actions_survive_skipped_steps(swarm):
    steps = {"logging_steps": 2, "eval_steps": 3, "save_steps": 4, "eval_delay": 4}
    it = swarm(strategies("steps") | steps, max_steps=8)
    due = []
    for step in (1, 2, 3, 7, 7, 8):
        it.swarm_step(step)
        due.append(it.due)
    assert due == ["", "log", "", "log evaluate save", "", "log evaluate save"]


def test_checkpoint_is_due_by_clock(swarm):
    for strategy, due in (("steps", [3, 6]), ("no", [])):
        it = swarm({"save_strategy": strategy}, save_minutes=1)
        for step in range(1, 7):
            it.swarm_step(step, seconds=25.0)
        assert it.saved == due


def test_epoch_strategies_are_due_after_passes(swarm):
    it = swarm(strategies("epoch"), steps_per_pass=4, max_steps=10)
    due = []
    for step in (1, 3, 4, 5, 9, 10):
        it.call("on_epoch_begin")  # of this peer's data
        it.local_step()
        it.call("on_epoch_end")
        it.swarm_step(step)
        if it.due == "log evaluate save":
            due.append(step)
    assert due == it.user.steps_of("on_epoch_end") == [4, 9, 10]
    assert it.user.steps_of("on_epoch_begin") == [0, 4, 9]


def test_callbacks_hear_swarm_steps(it):
    for step in (1, 2):
        it.local_step()
        it.local_step()
        it.swarm_step(step)
    events = ["on_step_begin", "on_substep_end", "on_substep_end", "on_step_end"]
    assert it.user.heard == list(zip(events * 2, [0, 0, 0, 1, 1, 1, 1, 2], strict=True))


def test_on_save_follows_written_checkpoint(it):
    written, failed, replaced, late = saves = [Future() for _ in range(4)]
    for step, it.last in enumerate(saves, 1):
        it.swarm_step(step)
        it.call("on_save")
    it.user.heard.clear()
    written.set_result("checkpoints/step-1")
    failed.set_result(None)
    replaced.cancel()
    it.local_step()
    assert it.user.steps_of("on_save") == []
    late.set_result("checkpoints/step-4")
    it.swarm_step(5)
    assert it.user.heard[-3:] == [("on_save", 1), ("on_save", 4), ("on_step_end", 5)]


def test_second_training_keeps_callbacks(it, swarm):
    other = swarm().callback
    again = SwarmEvents(it.handler, other, 5)
    assert again.callbacks == [other, *it.handler.callbacks[1:]]


@pytest.mark.parametrize(("own", "saved"), [(OwnSteps((8.0,), 8), [1, 1]), (OwnSteps(), [1])])
def test_long_round_saves_own_steps(swarm, own, saved):
    it = swarm({"save_strategy": "steps"}, save_minutes=1)
    it.swarm_step(1, seconds=70.0, own_steps=own)
    it.local_step(seconds=75.0)
    assert it.saved == saved


def test_wish_to_leave_ends_evaluation(swarm):
    answers = iter([False, True])
    it = swarm(leave=lambda: next(answers))
    it.callback.on_prediction_step()
    with pytest.raises(Left):
        it.callback.on_prediction_step()
    it.is_evaluating = False
    it.callback.on_prediction_step()  # of `predict`, whose result is wanted


def test_training_ends_with_swarm(swarm):
    it = swarm(max_steps=9)
    it.local_step(last_round=ROUND)
    assert it.told == []
    assert not it.control.should_training_stop
    it.swarm_step(11)  # by a download
    assert it.control.should_training_stop


def test_training_ends_before_first_batch(swarm):
    it = swarm(max_steps=0)
    it.call("on_train_begin")
    assert it.control.should_training_stop


def test_wish_to_leave_ends_training(swarm):
    it = swarm(leave=lambda: True)
    it.local_step()
    assert it.control.should_training_stop


def test_budget_ends_training_at_round_border(swarm):
    for budget, steps in ((Budget(steps=3), 3), (Budget(samples=30), 2), (Budget(seconds=8), 4)):
        it = swarm(budget=budget)
        for step in range(1, steps + 1):
            assert not it.callback.has_spent_budget
            it.local_step()
            assert not it.control.should_training_stop
            it.swarm_step(step)
        assert it.control.should_training_stop
        assert it.callback.has_spent_budget


def test_budget_excludes_steps_of_others(swarm):
    it = swarm(budget=Budget(steps=10))
    it.local_step(local_epoch=7)
    it.swarm_step(16)  # of nine steps of its own
    assert not it.callback.has_spent_budget
    it.swarm_step(17)
    assert it.callback.has_spent_budget


@pytest.mark.parametrize(
    ("weights", "logged"),
    [([4.0, 4.0], 9.0), ([4.0, 0.0, 12.0], 2.5), ([0.0, 0.0], "nothing")],
)
def test_logged_loss_skips_untrained_batches(it, weights, logged):
    logs = {"loss": 9.0, "train_loss": 9.0}
    for number, weight in enumerate(weights):
        it.local_step(loss=1.0 + number, weight=weight)
    it.callback.complete(logs)
    assert [logs.get(name, "nothing") for name in ("loss", "train_loss")] == [logged, logged]
    assert logs["swarm/step"] == 0


def test_step_event_has_weighted_loss_and_round(it):
    it.others = (object(),)
    it.local_step(loss=1.0, weight=30.0)
    it.local_step(loss=torch.nan, weight=0.0)  # a mean over no tokens
    it.swarm_step(1, loss=5.0, weight=10.0, seconds=2.0, last_round=ROUND)
    size = {"bytes_sent": 10, "bytes_received": 20}
    assert it.told == [
        {
            "v": 1,
            "t": ANY,
            "event": "step",
            "step": 1,
            "loss": 2.0,
            "learning_rate": 0.5,
            "samples": 64,
            "my_samples": 16,
            "my_tokens": 120,
            "given": {"samples": 16, "tokens": 120},
            "peers": 2,
            "samples_per_second": 3.0,
            "round": {
                "group": ["QmA", "QmB"],
                "samples": {"QmA": 16},
                "left_out": {"QmB": "too large"},
                "committed": True,
                "reason": "QmC did not vote",
                "seconds": 0.123,
                "blocked_seconds": 0.123,
                **size,
            },
            "data": None,
        }
    ]
    of_swarm = {"step": 1, "peers": 2, "samples": 64, "group_size": 2, "round_seconds": 0.12345, **size}
    assert it.callback.figures() == {f"swarm/{name}": value for name, value in of_swarm.items()}


def test_step_event_counts_own_work_only(it):
    it.swarm_step(1, last_round=ROUND)
    it.swarm_step(2, loss=torch.nan, weight=0.0, last_round=None)
    it.local_step(local_epoch=5)  # downloaded
    names = "loss", "samples_per_second", "samples", "my_samples", "my_tokens", "given", "round"
    given = {"samples": 32, "tokens": 80}
    assert [[event[name] for name in names] for event in it.told[1:]] == [
        [None, 4.0, 64, 16, 40, given, None],
        [1.0, 4.0, None, 0, 0, given, None],
    ]
    assert (it.callback.samples_seen, it.callback.most_peers) == (128, 2)


def test_evaluation_is_reported_and_takes_no_time(it):
    it.swarm_step(1)
    it.clock.now += 500
    it.callback.on_evaluate(metrics={"eval_loss": 2.5, "eval_text": "x", "epoch": 0.1})
    assert it.told[1] == {"v": 1, "t": ANY, "event": "eval", "step": 1, "eval_loss": 2.5, "epoch": 0.1}
    assert it.callback.evaluated_at == 1
    it.swarm_step(2)
    assert it.told[2]["samples_per_second"] == 4.0


@pytest.mark.parametrize(
    ("code", "field", "values", "said"),
    [
        (
            "round",
            "last_round",
            [FAILED, replace(FAILED, reason="they left")],
            ["(nobody came)", "(they left)"],
        ),
        ("not-finite", "dropped_samples", [4, 12], ["of 4 samples", "of 8 samples"]),
    ],
)
def test_trouble_is_reported_once(it, code, field, values, said):
    for value in values:
        it.local_step(**{field: value})
        it.local_step()
    assert it.names == [code] * 2
    for event, text in zip(it.told, said, strict=True):
        assert text in event["message"]


def test_first_step_missed_by_joiner_is_no_trouble(it):
    for _ in range(2):
        it.local_step(last_round=replace(FAILED, reason=OVERTAKEN))
    assert it.names == ["round"]


def test_overflowed_batches_are_withdrawn_and_reported(it):
    for it.optimizer_step_was_skipped, step in ((True, 0), (True, 0), (False, 1), (False, 2)):
        it.local_step(local_epoch=step, step_taken=step)
    assert it.taken_back == [1.0, 2.0]
    assert it.names == ["overflow", "step", "step"]
    assert "2 local batches" in it.told[0]["message"]


def test_many_overflows_warn_without_step(it):
    for _ in range(20):
        it.local_step(optimizer_step_was_skipped=True)
    assert it.names == ["overflow"]
