"""A user's overrides of a trainer are called in a swarm as in a Trainer, or refused by name."""

from inspect import isfunction, signature
from types import MethodType

import pytest
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import EarlyStoppingCallback, LlamaForCausalLM, Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.kit.fakes import FakeNode
from tests.kit.lone import lone_node, train_alone
from tests.kit.stand_ins import write_llama
from tests.unit.conftest import refused
from tests.unit.train.conftest import Hearer
from trahiv_cli.errors import RecipeError
from trahiv_cli.train.checkpoint import derive_peer_seed
from trahiv_cli.train.hooks import put_in_swarm
from trahiv_cli.train.inner import change_to_float32, require_steppable
from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainerMixin, in_swarm

HOOKS = [name for name, value in vars(Trainer).items() if isfunction(value) and not name.startswith("_")]
HOOKS += ["_get_train_sampler", "_evaluate", "_inner_training_loop", "_prepare_inputs"]

PLACES = ["above", "below", "assigned"]
"""Where methods of the user's own are: above or below the mixin, or on the trainer itself."""


FIELDS = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.1,
    "optim": "sgd",
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
}


@pytest.fixture
def trained(arguments, llama, samples, monkeypatch):
    """Train `Trainer` with methods of the user's own: plainly, or in a swarm with these in a place."""

    def train(own=(), where="above", *, target=4, **more):
        own = dict(own)
        keywords = {"model": llama(), "eval_dataset": samples[:4], "train_dataset": samples}
        names = signature(Trainer).parameters.keys() | {"events", "swarm"}
        keywords |= {name: more.pop(name) for name in names & more.keys()}
        keywords["args"] = arguments(**FIELDS | more)
        if where == "plain":
            trainer = type("Mine", (Trainer,), own)(**keywords)
            trainer.train()
            return trainer
        cls = type("Mine", (SwarmTrainer,), own if where == "above" else {})
        if where == "below":
            cls = type("Swarm", (SwarmTrainerMixin, type("Mine", (Trainer,), own)), {})
        config = {"opt": {"run_id": "run-1", "target_batch_size": target}}
        trainer = cls(hivemind_config=config, node=lone_node(), **keywords)
        if where == "assigned":
            for name, function in own.items():
                setattr(trainer, name, MethodType(function, trainer))
        return train_alone(monkeypatch, trainer)

    return train


@pytest.fixture
def both(trained, llama):
    """Train plainly and in a swarm, on samples in order, with the keywords that `given` makes of a model."""

    def train(own=None, where="above", given=lambda _: {}, **more):
        for place in ("plain", where):
            model = llama()
            yield trained(own or IN_ORDER, place, model=model, **given(model), **more)

    return train


def in_order(self, dataset=None):
    return SequentialSampler(self.train_dataset)


IN_ORDER = {"_get_train_sampler": in_order}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def alike(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in pairs)


def noting(noted):
    """Make methods for every hook that note their call and go on to the next class."""

    def method(name):
        def call(self, *args, **keywords):
            noted.add(name)
            mine = next(cls for cls in type(self).__mro__ if vars(cls).get(name) is call)
            return getattr(super(mine, self), name)(*args, **keywords)

        return call

    return {name: method(name) for name in HOOKS}


@pytest.mark.parametrize("where", ["above", "below"])
def test_every_trainer_override_is_called(trained, where):
    plain = set()
    ours = set()
    by_steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trained(noting(plain), "plain", **by_steps)
    own = noting(ours)
    if where == "above":
        del own["train"]
    trained(own, where, **by_steps)
    # Only Trainer's `_save_checkpoint` calls the last two; a swarm writes checkpoints of its own.
    assert plain - ours <= {"train", "save_model", "store_flos"}


def test_train_above_mixin_is_refused(trained):
    with pytest.raises(RecipeError, match=r"`Mine\.train` can't be used"):
        trained({"train": Trainer.train})


def unlike(samples):
    """Mask labels so that every other batch of four has few trained tokens."""
    return [row | {"labels": [-100] * 7 + [3]} if i // 4 % 2 else row for i, row in enumerate(samples)]


def own_loss(self, model, inputs, **_):
    return model(**inputs).loss


def own_step(self, model, inputs, _):
    loss = model(**inputs).loss
    self.accelerator.backward(loss)
    return loss.detach()


@pytest.mark.parametrize("own", [{"compute_loss": own_loss}, {"training_step": own_step}])
@pytest.mark.parametrize("where", PLACES)
def test_batches_of_own_loss_are_weighted(trained, samples, where, own):
    how = {"target": 8, "train_dataset": unlike(samples), "swarm": {"divide_data": False}}
    ours = trained(own, where, **how)
    usual = trained(**how)
    assert alike(ours, usual)
    assert losses(ours) == pytest.approx(losses(usual))
    assert len({weight for _, weight in ours.swarm_optimizer.trained}) > 1


def test_step_without_accelerator_backward_is_refused(trained):
    def step(self, model, inputs, _):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    with pytest.raises(RecipeError, match=r"did not call `self\.accelerator\.backward"):
        trained({"training_step": step})


def two_groups(self):
    body = [weight for name, weight in self.model.named_parameters() if "lm_head" not in name]
    groups = [{"params": body}, {"params": self.model.lm_head.parameters(), "lr": 0.5}]
    self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
    return self.optimizer


def halving(self, num_training_steps, optimizer=None):
    self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 0.5**step)
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


def figures(trainer):
    keys = "loss", "learning_rate", "grad_norm", "epoch", "eval_loss", "own"
    return [entry.get(key, -1.0) for entry in trainer.state.log_history for key in keys]


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("where", PLACES)
def test_override_works_as_in_trainer(both, where, own):
    plain, ours = both(OWN[own], where, eval_strategy="steps", eval_steps=2, max_grad_norm=0.3)
    assert alike(ours, plain)
    assert figures(ours) == pytest.approx(figures(plain), rel=1e-5)


def adam(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {"optimizers": (optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))}


def adam_with_frozen_group(model):
    backbone = model.model.requires_grad_(False).parameters()
    groups = [{"params": backbone, "lr": 1.0}, {"params": model.lm_head.parameters(), "lr": 0.01}]
    optimizer = torch.optim.Adam(groups)
    return {"optimizers": (optimizer, LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step]))}


@pytest.mark.parametrize(
    "given",
    [
        adam,
        adam_with_frozen_group,
        lambda _: {"optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 0.01})},
    ],
)
def test_given_optimizer_is_stepped(both, given):
    plain, ours = both(given=given)
    assert alike(ours, plain)


def test_model_init_makes_model_of_seed(trained, llama):
    config = llama().config

    def draw():
        return LlamaForCausalLM(config)

    plain, ours = (trained(IN_ORDER, place, model=None, model_init=draw) for place in ("plain", "above"))
    assert alike(ours, plain)


def test_given_optimizer_begins_each_training_anew(trained, llama):
    model = llama()
    given = adam(model)
    trainer = trained(model=model, **given)
    optimizer, _ = given["optimizers"]
    assert trainer.swarm_optimizer.opt is optimizer
    assert optimizer.state
    trainer.train()
    assert trainer.swarm_optimizer.last_learning_rates == [pytest.approx(0.01 / 4)]


def sgd(params):
    return torch.optim.SGD(params, lr=1)


def test_own_optimizer_follows_model_order(llama):
    model = llama()
    params = list(model.parameters())
    optimizer = sgd([{"params": params[3::-1]}, {"params": params[:3:-1]}])
    require_steppable(optimizer, model)
    listed = [param for group in optimizer.param_groups for param in group["params"]]
    assert list(map(id, listed)) == list(map(id, params))


@pytest.fixture
def refuse(trained, monkeypatch):
    """Have methods refused in all places, before the swarm is entered."""
    monkeypatch.setattr("tests.kit.lone.LoneOptimizer.__init__", None)

    def refuse(name, function, said):
        for where in PLACES:
            with refused(said, ".", RecipeError):
                trained({name: function}, where)

    return refuse


@pytest.mark.parametrize(
    ("attribute", "make", "said"),
    [
        ("optimizer", lambda _: object(), "no torch.optim.Optimizer"),
        ("optimizer", lambda self: sgd(self.model.lm_head.parameters()), "steps 1 of"),
        (
            "optimizer",
            lambda self: sgd([*self.model.parameters(), torch.ones(1, requires_grad=True)]),
            "not the model's",
        ),
        ("lr_scheduler", lambda self: StepLR(self.optimizer, 3), "StepLR can't be used"),
        (
            "lr_scheduler",
            lambda self: LambdaLR(sgd(self.model.parameters()), lambda step: 1),
            "another optimizer",
        ),
    ],
)
def test_unusable_optimizer_or_schedule_is_refused(refuse, attribute, make, said):
    def create(self, **_):
        setattr(self, attribute, make(self))

    refuse(f"create_{attribute.removeprefix('lr_')}", create, said)


@pytest.mark.parametrize("name", ["_clip_grad_norm", "_get_grad_norm", "_save_checkpoint"])
def test_override_of_replaced_method_is_refused(refuse, name):
    refuse(name, lambda *_, **__: None, rf"`Mine\.{name}` can't be used")


@pytest.mark.parametrize(
    "how",
    [
        {"num_train_epochs": 3, "max_steps": -1}
        | dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch"),
        {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "eval_delay": 4,
            "save_strategy": "steps",
            "save_steps": 0.5,
            "logging_first_step": True,
            "logging_steps": 3,
            "max_steps": 8,
            "eval_on_start": True,
        },
        {
            "eval_strategy": "epoch",
            "save_strategy": "best",
            "metric_for_best_model": "eval_loss",
            "logging_strategy": "no",
        },
    ],
)
def test_callbacks_hear_same_as_in_trainer(trained, how):
    def heard(where):
        hearer = Hearer()
        state = trained(IN_ORDER, where, callbacks=[hearer], **how).state
        return sorted(hearer.heard), hearer.shown, state.epoch, state.best_metric

    assert heard("above") == heard("plain")


def test_train_loss_is_mean_of_batches(trained):
    trainer = trained(target=12, max_steps=2)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses(trainer)) / 2)
    assert trainer.state.global_step == trainer.state.max_steps == 2


def test_early_stopping_leaves_checkpoint(trained):
    trainer = trained(
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.0,
        metric_for_best_model="eval_loss",
        max_steps=12,
    )
    assert trainer.state.global_step == 3
    assert trainer.swarm_callback.checkpoints.saved == [3]


@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_model_trains(both, frozen):
    def halve(model):
        for name, weight in model.bfloat16().named_parameters():
            weight.requires_grad_(not frozen or "lm_head" in name or "norm" in name)
        return {}

    plain, ours = both(given=halve)
    assert losses(ours) == pytest.approx(losses(plain), rel=2e-2)
    assert ours.evaluate()["eval_loss"] < losses(ours)[0]


def test_batch_norm_statistics_become_float32():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).bfloat16()
    change_to_float32(model)
    assert model(torch.ones(4, 2)).dtype == torch.float32


def own_order(self, *_):
    return RandomSampler(self.train_dataset, replacement=True)


@pytest.mark.parametrize(
    ("order", "is_shuffled"), [(in_order, False), (lambda self, *_: RandomSampler(self.train_dataset), True)]
)
def test_usual_order_of_own_sampler_is_divided(trained, events, told, order, is_shuffled):
    trainer = trained({"_get_train_sampler": order}, events=events)
    assert [event["code"] for event in told if event["event"] == "warning"] == []
    assert trainer.swarm_optimizer.announced[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (trainer._divided.seed is not None) is is_shuffled


def test_own_loader_gets_seed_of_peer(trained):
    seen = []

    def noted(self):
        seen.append(self.args.data_seed)
        return loader(self)

    trainer = trained({"get_train_dataloader": noted})
    assert seen == [derive_peer_seed(trainer.args.seed, trainer.node.peer_id)]
    assert trainer.args.data_seed is None


@pytest.mark.parametrize(
    ("own", "how", "why"),
    [
        ({"_get_train_sampler": own_order}, {}, "Mine._get_train_sampler"),
        ({"get_train_dataloader": loader}, {}, "Mine.get_train_dataloader"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({}, {"swarm": {"divide_data": False}}, None),
    ],
)
def test_undivided_data_warns_once_unless_chosen(trained, events, told, own, how, why):
    trainer = trained(own, events=events, **how)
    warnings = [(event["code"], why in event["message"]) for event in told if event["event"] == "warning"]
    assert warnings == ([("not-divided", True)] if why else [])
    assert trainer.swarm_optimizer.announced == []


def test_each_training_announces_its_batches(trained):
    trainer = trained(target=8, max_steps=1)
    first = trainer.swarm_optimizer.announced
    trainer.train()
    assert first == trainer.swarm_optimizer.announced == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_undivided_data_order_differs_by_peer(arguments, swarm_trainer):
    def order(peer):
        trainer = swarm_trainer(
            args=arguments(data_seed=3), swarm={"divide_data": False}, node=FakeNode(peer)
        )
        put_in_swarm(trainer)
        return [batch["input_ids"][0, 0].item() for batch in trainer.get_train_dataloader()]

    assert order("QmA") == order("QmA") != order("QmB")


def test_extra_loader_call_changes_nothing(trained):
    def asking(self, *args):
        self.get_train_dataloader()
        return Trainer.training_step(self, *args)

    trainer = trained({"training_step": asking}, target=8, max_steps=2)
    assert trainer.swarm_optimizer.announced == [list(range(n, n + 4)) for n in range(0, 16, 4)]
    assert len(list(trainer.get_train_dataloader())) == 4


@pytest.fixture
def rewarded(arguments, tmp_path, events):
    """Make a trainer of TRL that compares two completions of each prompt."""

    def make(cls, config, num_prompts, reward):
        fields = {"num_generations": 2, "max_completion_length": 4, "bf16": False}
        return in_swarm(cls)(
            model=str(write_llama(tmp_path / "model", hidden_size=16)),
            args=arguments(config, per_device_train_batch_size=4, **fields),
            train_dataset=Dataset.from_list([{"prompt": f"say {i}"} for i in range(num_prompts)]),
            reward_funcs=reward,
            hivemind_config={"opt": {"run_id": "run-1", "target_batch_size": 4}},
            node=lone_node(),
            events=events,
        )

    return make


@pytest.mark.parametrize(
    ("cls", "config", "weight"),
    [(GRPOTrainer, GRPOConfig, 16.0), (RLOOTrainer, RLOOConfig, 4.0)],
    ids=["by token", "by completion"],
)
def test_prompts_of_completions_are_divided(cls, config, weight, rewarded, monkeypatch, told):
    groups = []

    def reward(prompts, **_):
        groups.append(prompts)
        return [1.0] * len(prompts)

    trainer = rewarded(cls, config, 8, reward)
    train_alone(monkeypatch, trainer)
    assert trainer.swarm_optimizer.trained == [(4, weight)] * 2
    assert all(prompts[::2] == prompts[1::2] for prompts in groups)
    assert trainer.swarm_optimizer.announced == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a position is a completion
    assert trainer.samples_per_pass == 16
    assert [event["code"] for event in told if event["event"] == "warning"] == []
    assert [event["reward"] for event in told if event["event"] == "step"] == [1.0, 1.0]


def test_prompts_fill_a_generation_or_are_refused(rewarded):
    trainer = rewarded(GRPOTrainer, GRPOConfig, 1, lambda prompts, **_: [1.0] * len(prompts))
    with refused("Samples in the training data: 1; in one local batch: 2"):
        trainer.plan_run()
