"""The swarm's step as the clock: when actions are due, and events about them."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trahiv_cli.optim.method import OwnSteps
from trahiv_cli.optim.rounds import Round
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import callbacks
from trahiv_cli.train.batches import BatchWeight
from trahiv_cli.train.callbacks import SwarmCallback, SwarmEvents
from trahiv_cli.train.leaving import ENDLESS_BUDGET, Budget, Left

ROUND = Round({"QmA": 16}, 0.12345, 10, 20, True, "QmC did not vote", {"QmB": "too large"}, 0.12345)
FAILED = Round({}, 3.0, 0, 0, False, "nobody came")


class Hearer(TrainerCallback):
    """Stands for a user's callback, and notes each event with the step at which it came."""

    def __init__(self):
        self.heard = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.heard.append((name, state.global_step))

    def steps_of(self, event):
        return [step for name, step in self.heard if name == event]


class Swarm:
    """A callback over an optimizer that is only its numbers, with all events and checkpoints."""

    def __init__(
        self, monkeypatch, leave=lambda: False, budget=ENDLESS_BUDGET, steps_per_pass=100, **settings
    ):
        self.told, self.saved, self.taken_back = [], [], []
        self.control, self.clock = TrainerControl(), [0.0]
        monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: self.clock[0]))
        data = SimpleNamespace(of=lambda model, optimizer: optimizer.local_epoch)
        monkeypatch.setattr(callbacks, "CheckpointData", data)
        counts = dict.fromkeys(("local_epoch", "dropped_samples", "step_samples", "my_step_samples"), 0)
        self.optimizer = SimpleNamespace(
            **counts,
            step_taken=-1,
            max_steps=settings.pop("max_steps", 100),
            events=Events(self._hear),
            last_round=None,
            last_learning_rates=[0.5, 0.5],
            last_grad_norm=None,
            forget_announced=lambda: self.taken_back.append(self.clock[0]),
            tracker=SimpleNamespace(others=()),
            data_figures=None,
            own_steps=OwnSteps(),
        )
        self.accelerator = SimpleNamespace(optimizer_step_was_skipped=False)
        swarm = SimpleNamespace(save_minutes=settings.pop("save_minutes", 0))
        usual = {"logging_first_step": False, "eval_delay": 0}
        for kind in ("logging", "eval", "save"):
            usual[f"{kind}_steps"] = settings.get(f"{kind}_steps")
            usual[f"{kind}_strategy"] = "steps" if f"{kind}_steps" in settings else "no"
        args = SimpleNamespace(**usual | settings)
        self.args = args
        self.state = TrainerState(max_steps=self.optimizer.max_steps)
        self.state.compute_steps(args, self.optimizer.max_steps)
        self.trainer = trainer = SimpleNamespace(
            plain_model=None,
            accelerator=self.accelerator,
            swarm_args=args,
            swarm_settings=SimpleNamespace(swarm=swarm),
            count_swarm_steps=self._count,
            is_evaluating=True,
        )
        self.checkpoints = SimpleNamespace(save_beside=self.saved.append)
        self.callback = SwarmCallback(trainer, self.optimizer, self.checkpoints, leave, budget=budget)
        self.user = Hearer()
        before = CallbackHandler([DefaultFlowCallback(), self.user], None, None, None, None)
        self.events = SwarmEvents(before, self.callback, steps_per_pass)

    def _count(self):
        self.state.global_step = self.optimizer.local_epoch

    def _hear(self, event):
        self.told.append({name: value for name, value in event.items() if name not in ("v", "t")})

    def local_step(self, loss=1.0, seconds=1.0, weight=4.0, **changes):
        """One local step of the Trainer, which sets the optimizer's fields in `changes`."""
        self.callback.add_loss(torch.tensor(loss), BatchWeight(4, weight, None, tokens=40))
        vars(self.optimizer).update(changes)
        self.clock[0] += seconds
        self.control = self.events.on_step_begin(self.args, self.state, TrainerControl())
        self.state.global_step += 1  # as the Trainer does
        self.control = self.events.on_step_end(self.args, self.state, self.control)
        if self.control.should_save:
            self.callback.save_checkpoint()

    def swarm_step(self, step, **changes):
        taken = {"step_taken": step, "step_samples": 64, "my_step_samples": 16}
        self.local_step(local_epoch=step, **taken, **changes)

    def names(self):
        return [event.get("code", event["event"]) for event in self.told]


@pytest.fixture
def swarm(monkeypatch):
    return lambda **more: Swarm(monkeypatch, **more)


def test_due_actions_survive_skipped_steps(swarm):
    it, asked = swarm(logging_steps=2, eval_steps=3, save_steps=4, max_steps=8, eval_delay=4), []
    for step in (1, 2, 3, 7, 7, 8):
        it.swarm_step(step)
        asked.append((it.control.should_log, it.control.should_evaluate, it.control.should_save))
    assert asked[:3] == [(False,) * 3, (True, False, False), (False,) * 3]
    assert asked[3:] == [(True, True, True), (False,) * 3, (True, True, True)]


def test_checkpoint_is_due_by_clock(swarm):
    for strategy, due in (("steps", [3, 6]), ("no", [])):
        it = swarm(save_minutes=1, save_strategy=strategy, save_steps=50)
        for step in range(1, 7):
            it.swarm_step(step, seconds=25.0)
        assert it.saved == due


def test_epoch_strategies_are_due_after_passes(swarm):
    by_epoch = {f"{kind}_strategy": "epoch" for kind in ("logging", "eval", "save")}
    it, due = swarm(steps_per_pass=4, max_steps=10, **by_epoch), []
    it.control = it.events.on_epoch_begin(it.args, it.state, it.control)
    for step in (1, 3, 4, 5, 9, 10):
        it.local_step()
        it.control = it.events.on_epoch_end(it.args, it.state, it.control)  # of this peer's data
        it.control = it.events.on_epoch_begin(it.args, it.state, it.control)
        it.swarm_step(step)
        if it.control.should_log and it.control.should_evaluate and it.control.should_save:
            due.append(step)
    assert due == it.user.steps_of("on_epoch_end") == [4, 9, 10]
    assert it.user.steps_of("on_epoch_begin") == [0, 4, 9]


def test_callbacks_hear_swarm_steps(swarm):
    it = swarm()
    for step in (1, 2):
        it.local_step()
        it.local_step()
        it.swarm_step(step)
    steps = [("on_step_begin", 0), *[("on_substep_end", 0)] * 2, ("on_step_end", 1)]
    steps += [("on_step_begin", 1), *[("on_substep_end", 1)] * 2, ("on_step_end", 2)]
    assert it.user.heard == steps


def test_on_save_follows_written_checkpoint(swarm):
    it = swarm()
    written, failed, replaced, late = saves = [Future() for _ in range(4)]
    for step, it.checkpoints.last in enumerate(saves, 1):
        it.swarm_step(step)
        it.events.on_save(it.args, it.state, it.control)
    it.user.heard.clear()
    written.set_result("checkpoints/step-1")
    failed.set_result(None)
    replaced.cancel()
    it.local_step()
    assert it.user.steps_of("on_save") == []
    late.set_result("checkpoints/step-4")
    it.swarm_step(5)
    assert it.user.heard[-3:] == [("on_save", 1), ("on_save", 4), ("on_step_end", 5)]


def test_second_training_keeps_callbacks(swarm):
    it, other = swarm(), swarm()
    again = SwarmEvents(it.events, other.callback, 5)
    assert again.callbacks == [other.callback, *it.events.callbacks[1:]]


@pytest.mark.parametrize(("own", "saved"), [(OwnSteps((8.0,), 8), [1, 1]), (OwnSteps(), [1])])
def test_long_round_saves_own_steps(swarm, own, saved):
    it = swarm(save_minutes=1, save_strategy="steps", save_steps=50)
    it.swarm_step(1, seconds=70.0, own_steps=own)
    for _ in range(3):
        it.local_step(seconds=25.0)
    assert it.saved == saved


def test_wish_to_leave_ends_evaluation(swarm):
    wish = []
    it = swarm(leave=lambda: bool(wish))
    it.callback.on_prediction_step(None, None, None)
    wish.append(True)
    with pytest.raises(Left):
        it.callback.on_prediction_step(None, None, None)
    it.trainer.is_evaluating = False
    it.callback.on_prediction_step(None, None, None)  # of `predict`, whose result is wanted


def test_training_ends_with_swarm_or_wish(swarm):
    wish = []
    it, over = swarm(leave=lambda: bool(wish), max_steps=9), swarm(max_steps=0)
    it.local_step(last_round=ROUND)
    assert it.told == [] and not it.control.should_training_stop
    it.swarm_step(11)  # by a download
    assert it.control.should_training_stop
    it.local_step(local_epoch=1)
    assert not it.control.should_training_stop
    wish.append(True)
    it.local_step()
    assert it.control.should_training_stop
    control = over.events.on_train_begin(over.args, over.state, over.control)
    assert control.should_training_stop, "before the first batch"


def test_budget_ends_training_at_round_border(swarm):
    for budget, steps in ((Budget(steps=3), 3), (Budget(samples=30), 2), (Budget(seconds=8), 4)):
        it = swarm(budget=budget)
        for step in range(1, steps + 1):
            assert not it.callback.has_spent_budget
            it.local_step()
            assert not it.control.should_training_stop
            it.swarm_step(step)
        assert it.control.should_training_stop and it.callback.has_spent_budget
    it = swarm(budget=Budget(steps=10))
    it.local_step(local_epoch=7)  # which others took
    it.swarm_step(16)  # of nine steps of its own
    assert not it.callback.has_spent_budget
    it.swarm_step(17)
    assert it.callback.has_spent_budget


@pytest.mark.parametrize(
    ("weights", "logged"), [([4.0, 4.0], 9.0), ([4.0, 0.0, 12.0], 2.5), ([0.0, 0.0], None)]
)
def test_logged_loss_skips_untrained_batches(swarm, weights, logged):
    it, logs = swarm(), {"loss": 9.0, "train_loss": 9.0}
    for number, weight in enumerate(weights):
        it.local_step(loss=1.0 + number, weight=weight)
    it.callback.complete(logs)
    losses = {name: logs[name] for name in ("loss", "train_loss") if name in logs}
    assert losses == (dict.fromkeys(("loss", "train_loss"), logged) if logged else {})
    assert logs["swarm/step"] == 0


def test_step_event_has_mean_loss(swarm):
    it = swarm()
    it.optimizer.tracker.others = (object(),)
    it.local_step(loss=1.0)
    it.local_step(loss=2.0)
    it.swarm_step(1, loss=6.0, seconds=2.0, last_round=ROUND)
    size = {"bytes_sent": 10, "bytes_received": 20}
    round_ = {"group": ["QmA", "QmB"], "samples": {"QmA": 16}, "left_out": {"QmB": "too large"}, **size}
    round_ |= {"committed": True, "reason": "QmC did not vote", "seconds": 0.123, "blocked_seconds": 0.123}
    figures = {"loss": 3.0, "learning_rate": 0.5, "samples_per_second": 3.0, "data": None}
    counts = {"step": 1, "samples": 64, "my_samples": 16, "peers": 2}
    counts |= {"my_tokens": 120, "given": {"samples": 16, "tokens": 120}}
    assert it.told == [{"event": "step", "round": round_, **figures, **counts}]
    of_swarm = {"step": 1, "peers": 2, "samples": 64, "group_size": 2, "round_seconds": 0.12345, **size}
    assert it.callback.figures() == {f"swarm/{name}": value for name, value in of_swarm.items()}
    it.swarm_step(2, loss=8.0, last_round=None)
    assert (it.told[1]["loss"], it.told[1]["samples_per_second"], it.told[1]["round"]) == (8.0, 4.0, None)
    assert it.told[1]["given"] == {"samples": 32, "tokens": 160}
    it.local_step(local_epoch=5)  # downloaded, and so not this peer's work
    assert (it.told[2]["samples"], it.told[2]["my_samples"], it.told[2]["round"]) == (None, 0, None)
    assert it.told[2]["given"] == it.told[1]["given"]
    assert it.callback.samples_seen == 128 and it.callback.most_peers == 2


def test_loss_is_weighted_by_trained_tokens(swarm):
    it = swarm()
    it.local_step(loss=1.0, weight=30.0)
    it.local_step(loss=torch.nan, weight=0.0)  # a mean over no tokens
    it.swarm_step(1, loss=5.0, weight=10.0)
    assert (it.told[0]["loss"], it.told[0]["samples_per_second"]) == (2.0, 4.0)
    it.clock[0] += 500
    metrics = {"eval_loss": 2.5, "eval_text": "x", "epoch": 0.1}
    it.callback.on_evaluate(None, None, it.control, metrics=metrics)
    assert it.told[1] == {"event": "eval", "step": 1, "eval_loss": 2.5, "epoch": 0.1}
    assert it.callback.evaluated_at == 1
    it.swarm_step(2, loss=torch.nan, weight=0.0)
    assert (it.told[2]["loss"], it.told[2]["samples_per_second"]) == (None, 4.0)


def test_failed_round_is_reported_once(swarm):
    it = swarm()
    it.local_step(last_round=FAILED)
    it.local_step(dropped_samples=4)
    it.local_step()
    it.local_step(dropped_samples=12, last_round=replace(FAILED, reason="nobody came, again"))
    assert it.names() == ["round", "not-finite", "round", "not-finite"]
    said = ("nobody came", "of 4 samples", "nobody came, again", "of 8 samples")
    assert all(words in event["message"] for words, event in zip(said, it.told, strict=True))


def test_overflowed_batches_are_withdrawn(swarm):
    it = swarm()
    it.accelerator.optimizer_step_was_skipped = True
    it.local_step()
    it.local_step()
    assert it.told == [] and it.taken_back == [1.0, 2.0]
    it.accelerator.optimizer_step_was_skipped = False
    for step in (1, 2):
        it.local_step(local_epoch=step, step_taken=step)
    assert it.names() == ["overflow", "step", "step"] and "2 local batches" in it.told[0]["message"]
    it.accelerator.optimizer_step_was_skipped = True
    for _ in range(callbacks.OVERFLOWS_IN_A_ROW):
        it.local_step()
    assert it.names()[3:] == ["overflow"]
