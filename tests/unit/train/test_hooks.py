"""A user's overrides of a trainer are called in a swarm as in a Trainer, or refused by name."""

from types import MethodType

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, SequentialSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.kit.fakes import FakeNode
from tests.kit.lone import lone_node, train_alone
from tests.kit.stand_ins import write_llama
from trahiv_cli.errors import RecipeError
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.hooks import put_in_swarm
from trahiv_cli.train.inner import require_steppable
from trahiv_cli.train.settings import SwarmTrainingArguments
from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainerMixin

HOOKS = [name for name, value in vars(Trainer).items() if callable(value) and not name.startswith("_")]
HOOKS += ["_get_train_sampler", "_evaluate", "_inner_training_loop", "_prepare_inputs"]

REPLACED = {"train": "the life of a run"} | dict.fromkeys(
    ("save_model", "store_flos"), "only `_save_checkpoint` calls it; a swarm writes checkpoints of its own"
)
"""Methods that Trainer calls in a training and a swarm's does not, and why."""


def placed(where, cls, own):
    """Make a class of trainers for a swarm with `own` methods in front of `cls`, or behind the mixin."""
    if where == "below":
        return type("Swarm", (SwarmTrainerMixin, type("Mine", (cls,), own)), {})
    return type("Mine", (type("Swarm", (SwarmTrainerMixin, cls), {}),), own if where == "above" else {})


@pytest.fixture
def trained(arguments, llama, samples, monkeypatch):
    """Train `Trainer` with methods of the user's own: plainly, or in a swarm with these above or below."""

    def train(where, own, *, cls=Trainer, swarm=None, model=None, target=4, data=None, **more):
        fields = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd"}
        fields |= {"logging_steps": 1, "logging_strategy": "steps", "lr_scheduler_type": "constant"}
        keywords = {"eval_dataset": samples[:4], "train_dataset": samples if data is None else data}
        for name in ("callbacks", "optimizers", "optimizer_cls_and_kwargs", "data_collator", "events"):
            if name in more:
                keywords[name] = more.pop(name)
        keywords["model"] = llama() if model is None else model
        if where == "plain":
            keywords.pop("events", None)
            trainer = type("Mine", (cls,), own)(args=arguments(**fields | more), **keywords)
            trainer.train()
            return trainer
        config = {"opt": {"run_id": "run-1", "target_batch_size": target}}
        args = arguments(SwarmTrainingArguments, hivemind_config=config, **fields | more)
        trainer = placed(where, cls, own)(args=args, swarm=swarm, node=lone_node(), **keywords)
        if where == "assigned":
            for name, function in own.items():
                setattr(trainer, name, MethodType(function, trainer))
        return train_alone(monkeypatch, trainer)

    return train


def in_order(self, dataset=None):
    return SequentialSampler(self.train_dataset)


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def noting(noted):
    """Make methods for every hook that note their call and go on to the next class."""

    def note(name, self, *args, **keywords):
        noted.add(name)
        classes = [cls for cls in type(self).__mro__ if name in vars(cls)]
        here = next(i for i, cls in enumerate(classes) if getattr(vars(cls)[name], "is_noting", False))
        return vars(classes[here + 1])[name].__get__(self)(*args, **keywords)

    def method(name):
        def call(self, *args, **keywords):
            return note(name, self, *args, **keywords)

        call.is_noting = True
        return call

    static = [name for name in HOOKS if isinstance(vars(Trainer)[name], staticmethod)]
    return {name: method(name) for name in HOOKS if name not in static}


@pytest.mark.parametrize("where", ["above", "below"])
def test_every_trainer_override_is_called(trained, where):
    plain, ours = set(), set()
    by_steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trained("plain", noting(plain), **by_steps)
    own = noting(ours)
    del own["create_optimizer_and_scheduler"]  # a Trainer does not call it, and a swarm refuses it
    if where == "above":
        with pytest.raises(RecipeError, match=r"`Mine\.train` can't be used"):
            trained(where, own)
        del own["train"]
    trained(where, own, **by_steps)
    assert plain - ours <= REPLACED.keys()


def unlike(samples):
    """Mask labels so that every other batch of four has few trained tokens."""
    few = [-100] * 7
    return [row | {"labels": [*few, 3]} if i // 4 % 2 else row for i, row in enumerate(samples)]


def own_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    return (outputs.loss, outputs) if return_outputs else outputs.loss


def own_step(self, model, inputs, num_items_in_batch=None):
    model.train()
    loss = model(**inputs).loss
    self.accelerator.backward(loss)
    return loss.detach()


@pytest.mark.parametrize(
    ("where", "own"),
    [
        ("above", {"compute_loss": own_loss}),
        ("below", {"compute_loss": own_loss}),
        ("assigned", {"training_step": own_step}),
        ("above", {"training_step": own_step}),
    ],
)
def test_batches_of_own_loss_are_weighted(trained, samples, where, own):
    how = {"target": 8, "data": unlike(samples), "swarm": {"divide_data": False}}
    ours, usual = trained(where, own, **how), trained("above", {}, **how)
    assert torch.allclose(weights(ours), weights(usual), atol=1e-6)
    assert losses(ours) == pytest.approx(losses(usual)) and min(losses(ours)) > 1
    assert len({weight for _, weight in ours.swarm_optimizer.trained}) > 1


def test_step_without_accelerator_backward_is_refused(trained):
    def step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    with pytest.raises(RecipeError, match=r"did not call `self\.accelerator\.backward"):
        trained("above", {"training_step": step})


def two_groups(self):
    body = [weight for name, weight in self.model.named_parameters() if "lm_head" not in name]
    groups = [{"params": body}, {"params": self.model.lm_head.parameters(), "lr": 0.5}]
    self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
    return self.optimizer


def halving(self, num_training_steps, optimizer=None):
    optimizer = self.optimizer if optimizer is None else optimizer
    self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    self._created_lr_scheduler = True
    return self.lr_scheduler


def loader(self):
    dataset = torch.utils.data.Subset(self.train_dataset, range(15, -1, -1))
    return self.accelerator.prepare(DataLoader(dataset, 4, collate_fn=self.data_collator))


def half_of_the_tokens(self, epoch_iterator, num_batches, device):
    batches, _ = Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)
    return [{name: rows[:, :4] for name, rows in batch.items()} for batch in batches], None


def all_in_one_group(self, args, model=None):
    """As sentence-transformers names its groups."""
    return torch.optim.SGD, {"lr": 0.2, "optimizer_dict": [{"params": list(model.parameters())}]}


OWN = {
    "optimizer": {
        "create_optimizer": two_groups,
        "create_scheduler": halving,
        "get_batch_samples": half_of_the_tokens,
        "_get_train_sampler": in_order,
    },
    "loader": {
        "get_train_dataloader": loader,
        "get_optimizer_cls_and_kwargs": all_in_one_group,
        "evaluate": lambda self, *args, **more: {"eval_loss": 0.25},
        "log": lambda self, logs, *more: self.state.log_history.append({"own": True, **logs}),
    },
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("where", ["above", "below", "assigned"])
def test_override_works_as_in_trainer(trained, where, own):
    how = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.3}
    plain, ours = trained("plain", OWN[own], **how), trained(where, OWN[own], **how)
    assert torch.allclose(weights(ours), weights(plain), atol=1e-6)
    keys = "loss", "learning_rate", "grad_norm", "epoch", "eval_loss", "own"
    histories = zip(ours.state.log_history, plain.state.log_history, strict=True)
    for mine, theirs in histories:
        both = ([entry.get(key, -1.0) for key in keys] for entry in (mine, theirs))
        assert next(both) == pytest.approx(next(both), rel=1e-5)


@pytest.mark.parametrize("how", ["optimizers", "optimizer_cls_and_kwargs"])
def test_given_optimizer_is_stepped(trained, llama, how):
    own = {"_get_train_sampler": in_order}
    ends = []
    for where in ("plain", "above"):
        model = llama()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        given = {
            "optimizers": (optimizer, schedule),
            "optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 0.01}),
        }
        trainer = trained(where, own, model=model, **{how: given[how]})
        ends.append(weights(trainer))
    assert torch.allclose(*ends, atol=1e-6)
    if how == "optimizers":
        assert trainer.swarm_optimizer.opt is optimizer and optimizer.state
        trainer.train()
        assert trainer.swarm_optimizer.last_learning_rates == [pytest.approx(0.01 / 4)]


def test_schedule_keeps_rates_of_frozen_groups(trained, llama):
    ends = []
    for where in ("plain", "above"):
        model = llama()
        backbone, head = list(model.model.parameters()), list(model.lm_head.parameters())
        for weight in backbone:
            weight.requires_grad_(False)
        optimizer = torch.optim.Adam([{"params": backbone, "lr": 1.0}, {"params": head, "lr": 0.01}])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step])
        own = {"_get_train_sampler": in_order}
        ends.append(weights(trained(where, own, model=model, optimizers=(optimizer, schedule))))
    assert torch.allclose(*ends, atol=1e-6)


def test_own_optimizer_follows_model_order(llama):
    model = llama()
    params = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": params[3::-1]}, {"params": params[4:][::-1]}], lr=1)
    require_steppable(optimizer, model)
    listed = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(one is other for one, other in zip(listed, params, strict=True))


@pytest.mark.parametrize(
    ("name", "own", "said"),
    [
        ("create_optimizer", lambda self: setattr(self, "optimizer", object()), "no torch.optim.Optimizer"),
        (
            "create_optimizer",
            lambda self: setattr(self, "optimizer", torch.optim.SGD(self.model.lm_head.parameters(), lr=1)),
            "steps 1 of",
        ),
        (
            "create_optimizer",
            lambda self: setattr(
                self,
                "optimizer",
                torch.optim.SGD([*self.model.parameters(), torch.ones(1, requires_grad=True)], lr=1),
            ),
            "not the model's",
        ),
        (
            "create_scheduler",
            lambda self, num_training_steps: setattr(
                self, "lr_scheduler", torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
            ),
            "StepLR can't be used",
        ),
        (
            "create_scheduler",
            lambda self, num_training_steps: setattr(
                self,
                "lr_scheduler",
                torch.optim.lr_scheduler.LambdaLR(
                    torch.optim.SGD(self.model.parameters(), lr=1), lambda step: 1
                ),
            ),
            "another optimizer",
        ),
        ("create_optimizer_and_scheduler", lambda self, num_training_steps: None, "can't be used"),
        ("_clip_grad_norm", lambda self, model: None, r"`Mine\._clip_grad_norm` can't"),
        ("_get_grad_norm", lambda self, model, grad_norm=None: None, r"`Mine\._get_grad_norm` can't"),
        ("_save_checkpoint", lambda self, model, trial: None, r"`Mine\._save_checkpoint` can't"),
    ],
)
def test_unusable_override_is_refused(trained, monkeypatch, name, own, said):
    monkeypatch.setattr("tests.kit.lone.LoneOptimizer.__init__", None)  # before the swarm is entered
    for where in ("above", "below", "assigned"):
        with pytest.raises(RecipeError, match=said) as refused:
            trained(where, {name: own})
        assert refused.value.hint


class Counting(TrainerCallback):
    """Notes each event with its step, and the settings that the callback saw."""

    def __init__(self):
        self.came, self.shown = [], set()

    def _note(self, event, args, state):
        self.came.append((event, state.global_step))
        self.shown |= {(state.max_steps, args.max_steps, args.save_strategy, args.max_grad_norm)}

    on_evaluate, on_save, on_epoch_end, on_train_end, on_step_begin, on_step_end = (
        lambda self, args, state, control, _event=event, **_: self._note(_event, args, state)
        for event in ("evaluate", "save", "epoch_end", "train_end", "step_begin", "step_end")
    )

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self._note("log", args, state)


@pytest.mark.parametrize(
    "how",
    [
        {"num_train_epochs": 3, "max_steps": -1}
        | {f"{kind}_strategy": "epoch" for kind in ("logging", "eval", "save")},
        {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "eval_delay": 4,
            "save_strategy": "steps",
            "save_steps": 0.5,
        }
        | {"logging_first_step": True, "logging_steps": 3, "max_steps": 8, "eval_on_start": True},
        {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "eval_loss"}
        | {"logging_strategy": "no"},
    ],
    ids=["by epoch", "by steps", "best"],
)
def test_callbacks_hear_same_as_in_trainer(trained, how):
    heard = []
    for where in ("plain", "above"):
        counting = Counting()
        trainer = trained(where, {"_get_train_sampler": in_order}, callbacks=[counting], **how)
        heard.append((sorted(counting.came), counting.shown, trainer.state.epoch, trainer.state.best_metric))
    assert heard[0] == heard[1] and heard[0][0]


def test_several_batches_are_one_callback_step(trained):
    counting = Counting()
    trainer = trained("above", {}, target=12, callbacks=[counting], max_steps=2)
    steps = [(event, step) for event, step in counting.came if event.startswith("step")]
    assert steps == [("step_begin", 0), ("step_end", 1), ("step_begin", 1), ("step_end", 2)]
    mean = sum(losses(trainer)) / 2
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(mean)
    assert trainer.state.global_step == trainer.state.max_steps == 2


def test_early_stopping_leaves_checkpoint(trained):
    how = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss", "max_steps": 12}
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = trained("above", {}, learning_rate=0.0, callbacks=[stopping], **how)
    assert trainer.state.global_step == 3
    assert trainer.swarm_callback.checkpoints.saved == [3]


@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_model_trains(trained, llama, frozen):
    ends = []
    for where in ("plain", "above"):
        model = llama().bfloat16()
        for name, weight in model.named_parameters():
            weight.requires_grad_(not frozen or "lm_head" in name or "norm" in name)
        trainer = trained(where, {"_get_train_sampler": in_order}, model=model)
        ends.append(losses(trainer))
    assert ends[1] == pytest.approx(ends[0], rel=2e-2)
    assert trainer.evaluate()["eval_loss"] < ends[1][0]


def test_batch_norm_statistics_become_float32(llama):
    from trahiv_cli.train.inner import change_to_float32

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).bfloat16()
    change_to_float32(model)
    assert model(torch.ones(4, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("own", "how", "why"),
    [
        ({"_get_train_sampler": in_order}, {}, "Mine._get_train_sampler"),
        ({"get_train_dataloader": loader}, {}, "Mine.get_train_dataloader"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "group_by_length"),
    ],
)
def test_undivided_data_warns_once(trained, own, how, why):
    told = []
    trainer = trained("below", own, events=Events(told.append), **how)
    [warning] = [event for event in told if event["event"] == "warning"]
    assert warning["code"] == "not-divided" and why in warning["message"]
    assert trainer.swarm_optimizer.announced == []


def test_chosen_undivided_data_gives_no_warning(trained):
    told = []
    trained("below", {}, events=Events(told.append), swarm={"divide_data": False})
    assert not [event for event in told if event["event"] == "warning"]


def test_each_training_announces_its_batches(trained, monkeypatch):
    trainer = trained("above", {}, target=8, max_steps=1)
    announced = [trainer.swarm_optimizer.announced]
    trainer.train()
    announced.append(trainer.swarm_optimizer.announced)
    assert announced == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_undivided_data_order_differs_by_peer(arguments, llama, samples):
    orders = []
    for peer in ("QmA", "QmB", "QmA"):
        config = {"opt": {"run_id": "run-1", "target_batch_size": 8}}
        args = arguments(SwarmTrainingArguments, hivemind_config=config, data_seed=3)
        trainer = SwarmTrainer(
            model=llama(), args=args, train_dataset=samples, swarm={"divide_data": False}, node=FakeNode(peer)
        )
        put_in_swarm(trainer)
        orders.append([batch["input_ids"][0, 0].item() for batch in trainer.get_train_dataloader()])
    assert orders[0] == orders[2] != orders[1]


def test_extra_loader_call_changes_nothing(trained):
    def asking(self, *args):
        self.get_train_dataloader()
        return Trainer.training_step(self, *args)

    trainer = trained("below", {"training_step": asking}, target=8, max_steps=2)
    assert trainer.swarm_optimizer.announced == [list(range(n, n + 4)) for n in range(0, 16, 4)]
    assert len(list(trainer.get_train_dataloader())) == 4


def test_grpo_sampler_keeps_groups(tmp_path, monkeypatch):
    groups, told = [], []

    def reward(prompts, completions, **_):
        groups.append(prompts)
        return [float(len(set(text))) for text in completions]

    args = GRPOConfig(
        str(tmp_path / "out"), per_device_train_batch_size=4, num_generations=2, max_completion_length=4,
        max_steps=2, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no",
        gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer = type("Swarm", (SwarmTrainerMixin, GRPOTrainer), {})(
        model=str(write_llama(tmp_path / "model", hidden_size=16)),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"say {i}"} for i in range(8)]),
        reward_funcs=reward,
        hivemind_config={"opt": {"run_id": "run-1", "target_batch_size": 4}},
        node=lone_node(),
        events=Events(told.append),
    )
    train_alone(monkeypatch, trainer)
    assert trainer.swarm_optimizer.trained == [(4, 4.0)] * 2
    assert all(prompts[::2] == prompts[1::2] for prompts in groups)
    assert [event["code"] for event in told if event["event"] == "warning"] == ["not-divided"]
