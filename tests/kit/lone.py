"""A trainer that trains in a swarm of its own: all of it is real but processes and the network."""

import contextlib
import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import torch

from tests.kit.fakes import FakeNode
from trahiv_cli.progress.committed import StateLock
from trahiv_cli.progress.history import History
from trahiv_cli.step.method import OwnSteps
from trahiv_cli.train import hooks


class LoneOptimizer(torch.optim.Optimizer):
    """Takes a step for each `target_batch_size` samples, as `SwarmOptimizer` does where nobody else is.

    Keywords are those of `build_optimizer`.
    """

    def __init__(
        self,
        options,
        run,
        *,
        params,
        optimizer,
        scheduler,
        events,
        **_,
    ):
        super().__init__(params, {})
        self.opt = optimizer(params)
        self.schedule = scheduler(self.opt)
        self.schedule.last_epoch = -1  # as for a peer that enters at step 0
        self.schedule.step()
        self.max_steps = run.max_steps
        self._max_norm = run.max_grad_norm
        self.events = events
        self._target = options.target_batch_size
        self.local_epoch = 0
        self.step_taken = -1
        self.step_samples = 0
        self.my_step_samples = 0
        self.dropped_samples = 0
        self.last_round = None
        self.data_figures = None
        self.last_grad_norm = None
        self.last_learning_rates = self.schedule.get_last_lr()
        self.announced = []
        self.trained = []  # samples and weight of each batch
        self.history = History()
        self.tracker = SimpleNamespace(others=())
        self.catch_up = SimpleNamespace(wait_for_stragglers=lambda *_: None)
        self.work = SimpleNamespace(announce=self.announced.append)
        self.own_steps = OwnSteps()
        self.samples_in_time = float("inf")
        self.state_averager = SimpleNamespace(lock_state=StateLock())
        self._held = []

    def divide_data(self, number, *, unit):
        positions = itertools.count(step=unit)
        return SimpleNamespace(take=lambda _: next(positions))

    def expect_batch(self, samples, weight, *, lend):
        self._held.append((samples, weight))
        anchor = next((one for _, one in self._held if one), 0.0)
        return weight / anchor if anchor else 1.0

    @torch.no_grad()
    def step(self, closure=None):
        weights = [weight for group in self.opt.param_groups for weight in group["params"]]
        for weight in weights:  # in float64 nothing is lost where batches differ
            if "sum" not in self.state[weight]:
                self.state[weight]["sum"] = torch.zeros_like(weight, dtype=torch.float64)
            if weight.grad is not None:
                self.state[weight]["sum"] += weight.grad
            weight.grad = None
        if (samples := sum(samples for samples, _ in self._held)) < self._target:
            return
        total = sum(weight for _, weight in self._held)
        anchor = next((weight for _, weight in self._held if weight), 0.0)
        for weight in weights:
            weight.grad = (self.state[weight].pop("sum") * (anchor / total if total else 0.0)).float()
        limit = self._max_norm or float("inf")
        self.last_grad_norm = float(torch.nn.utils.clip_grad_norm_(weights, limit))
        self.last_learning_rates = self.schedule.get_last_lr()
        self.opt.step()
        self.schedule.step()
        self.zero_grad()
        self.trained += self._held
        self._held = []
        self.local_epoch += 1
        self.step_taken = self.local_epoch
        self.step_samples = self.my_step_samples = samples

    @contextlib.contextmanager
    def agreed_weights(self):
        yield

    def shutdown(self):
        """Nothing was started."""


class LoneCheckpoints:
    """Checkpoints that are written at once, to a list of steps."""

    def __init__(self, *_):
        self.saved = []
        self.last = Future()

    def newest(self):
        return None

    def save_beside(self, step):
        self.saved.append(step)
        self.last = Future()
        self.last.set_result(f"step-{step}")

    def finish(self):
        return f"step-{self.saved[-1]}" if self.saved else None


def lone_node():
    """Make a node without a network, to give to a trainer."""
    node = FakeNode()
    node.dht = None
    return node


def train_alone(monkeypatch, trainer):
    """Train until the end, with a `lone_node`, and return the trainer."""
    monkeypatch.setattr(hooks, "build_optimizer", LoneOptimizer)
    monkeypatch.setattr(hooks, "Checkpoints", LoneCheckpoints)
    monkeypatch.setattr(hooks, "enter", lambda *_: SimpleNamespace(source="fresh"))
    monkeypatch.setattr("trahiv_cli.train.callbacks.CheckpointData.of", lambda _, swarm: swarm.local_epoch)
    trainer.train()
    return trainer
