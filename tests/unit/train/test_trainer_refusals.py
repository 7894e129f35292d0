"""What can't work in a swarm is said before anything starts; without a swarm it is transformers' Trainer."""

import io
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import FolderTaken, RecipeError, RecipeMismatch, SwarmError
from trahiv_cli.optim.history import History
from trahiv_cli.optim.reports import PeerProgress
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.swarm.alike import publish_likeness
from trahiv_cli.train import trainer as trainer_module
from trahiv_cli.train.folder import owned
from trahiv_cli.train.trainer import REFUSED_OPTIMIZERS, SwarmTrainer, SwarmTrainingArguments

torch.set_num_threads(1)

SWARM = {"dht": {}, "opt": {"run_id": "run-1", "target_batch_size": 64}}
SAMPLES = [
    {"input_ids": [(7 * i + j) % 30 for j in range(8)], "labels": [(7 * i + j) % 30 for j in range(8)]}
    for i in range(16)
]


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


@pytest.fixture
def arguments(tmp_path):
    """Make arguments: `arguments(SwarmTrainingArguments, hivemind_config=...)`."""

    def make(cls=TrainingArguments, **fields):
        quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        return cls(output_dir=str(tmp_path / "out"), max_steps=2, seed=1, **quiet, **fields)

    return make


def with_(**attributes):
    """Change arguments that transformers itself would only take on another machine."""
    return lambda args: vars(args).update(attributes) or {}


TROUBLE = {
    "several GPUs": (with_(_n_gpu=2), "CUDA_VISIBLE_DEVICES"),
    "a device of type xpu": (with_(_setup_devices=torch.device("xpu")), "use_cpu=True"),
    "auto_find_batch_size": (with_(auto_find_batch_size=True), "per_device_train_batch_size"),
    "model_init": (lambda args: {"model_init": tiny_llama}, "the model itself"),
    "FSDP": (with_(fsdp="full_shard"), "one peer per GPU"),
    "DeepSpeed": (with_(deepspeed="ds.json"), "one peer per GPU"),
    "load_best_model_at_end": (with_(load_best_model_at_end=True), "afterwards"),
    "optimizers=...": (lambda args: {"optimizers": (object(), None)}, "`optim`"),
    "optimizer_cls_and_kwargs": (
        lambda args: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        "`optim`",
    ),
    "looks at metrics": (with_(lr_scheduler_type="reduce_lr_on_plateau"), "cosine"),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_what_cannot_work_in_a_swarm_is_refused(arguments, what):
    change, instead = TROUBLE[what]
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    extra = change(args)
    model = None if "model_init" in extra else tiny_llama()
    with pytest.raises(RecipeError) as refused:
        SwarmTrainer(model=model, args=args, train_dataset=SAMPLES, **extra)
    assert what in refused.value.message and instead in refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("what", ["load_best_model_at_end", "optimizers=...", "auto_find_batch_size"])
def test_the_same_is_refused_with_plain_arguments(arguments, what):
    args = arguments()
    extra = TROUBLE[what][0](args)
    with pytest.raises(RecipeError):
        SwarmTrainer(model=tiny_llama(), args=args, train_dataset=SAMPLES, hivemind_config=SWARM, **extra)


def test_a_swarm_needs_arguments():
    with pytest.raises(RecipeError, match="needs `args`"):
        SwarmTrainer(model=tiny_llama(), hivemind_config=SWARM)


@pytest.mark.parametrize("run_id", [None, "", "dotted.name", 7])
def test_a_run_without_a_usable_name_is_refused(arguments, run_id):
    config = {"opt": {"run_id": run_id, "target_batch_size": 64}}
    with pytest.raises(RecipeError, match=r"hivemind_config\.opt\.run_id") as refused:
        SwarmTrainer(model=tiny_llama(), args=arguments(), hivemind_config=config)
    assert refused.value.hint


@pytest.mark.parametrize("config", [{"dht": {}}, {"opt": {}}, {"opt": None}])
def test_a_run_without_a_name_at_all_is_refused(arguments, config):
    with pytest.raises(RecipeError, match="run_id is missing"):
        SwarmTrainer(model=tiny_llama(), args=arguments(), hivemind_config=config)


@pytest.mark.parametrize(
    ("swarm", "said"),
    [
        ({"solo": "300"}, r"^swarm\.solo: expected never, .* got '300': write `after 300 seconds`"),
        ({"norm_limit": 0.5}, r"^swarm\.norm_limit: expected 0 or a number above 1, got 0\.5"),
        ({"robust_mean": 1}, r"^swarm\.robust_mean: "),
        ({"robust": True}, r"^swarm\.robust: "),
        ({"local_steps": 9}, r"^swarm: has no effect in mode auto: it is for diloco and streaming"),
        ({"solo": 1, "norm_limit": 1}, r"swarm\.solo: .*; swarm\.norm_limit: "),
    ],
)
def test_a_wrong_word_about_rounds_is_refused(arguments, swarm, said):
    with pytest.raises(RecipeError, match=said) as refused:
        SwarmTrainer(model=tiny_llama(), args=arguments(), hivemind_config=SWARM, swarm=swarm)
    assert refused.value.hint


class Built(Exception):
    """Carries what the optimizer would have been built with."""


@pytest.fixture
def built_with(arguments, monkeypatch):
    """Return the keywords that a trainer would build the optimizer with: `built_with(swarm={...})`."""

    def build(*_, **keywords):
        raise Built(keywords)

    monkeypatch.setattr(trainer_module, "build_optimizer", build)
    node = FakeNode()
    node.dht = None

    def keywords_of(model=None, **swarm):
        model = tiny_llama() if model is None else model
        it = SwarmTrainer(model=model, args=arguments(), hivemind_config=SWARM, node=node, **swarm)
        with pytest.raises(Built) as built:
            it.create_optimizer()
        return built.value.args[0]

    return keywords_of


@pytest.mark.parametrize(
    ("swarm", "rules"),
    [
        ({}, RoundRules()),
        ({"swarm": None}, RoundRules()),
        ({"swarm": {"solo": "never"}}, RoundRules(solo_after_s=math.inf)),
        ({"swarm": {"solo": "always", "norm_limit": 0}}, RoundRules(solo_after_s=0.0, norm_limit=0.0)),
        ({"swarm": SwarmSection(solo="after 1 second", robust_mean=True)}, RoundRules(1.0, robust_mean=True)),
    ],
)
def test_how_rounds_are_judged_arrives_at_the_optimizer(built_with, swarm, rules):
    assert built_with(**swarm)["rules"] == rules


@pytest.mark.parametrize(
    ("swarm", "mode", "share"),
    [
        ({}, "sync", 0.05),
        ({"swarm": {"communication_share": 0.2}}, "sync", 0.2),
        ({"swarm": {"mode": "sync"}}, "sync", None),
        ({"swarm": {"mode": "streaming"}}, "streaming", None),
    ],
    ids=["default", "auto", "sync", "streaming"],
)
def test_the_mode_arrives_at_the_optimizer_and_is_auto_unless_one_is_named(built_with, swarm, mode, share):
    keywords = built_with(**swarm)
    assert (keywords["pace"].mode, keywords["auto_share"]) == (mode, share)


def test_a_compiled_model_averages_with_one_that_is_not(built_with):
    plain, compiled = built_with(), built_with(torch.compile(tiny_llama(), backend="eager"))
    assert compiled["schema"] == plain["schema"]


@pytest.mark.parametrize("key", ["state_averaging_compression", "load_state_compression"])
def test_weights_in_4_bits_are_refused_with_the_reason(arguments, key):
    config = {"opt": SWARM["opt"] | {key: "blockwise4"}}
    with pytest.raises(RecipeError, match=rf"opt\.{key}: 'blockwise4' can't work .* use `blockwise8`"):
        SwarmTrainer(model=tiny_llama(), args=arguments(), hivemind_config=config)


def test_a_local_batch_beyond_the_target_is_refused(arguments):
    args = arguments(per_device_train_batch_size=9, gradient_accumulation_steps=8)
    with pytest.raises(RecipeError, match="One local batch is 72 samples but target_batch_size is 64"):
        SwarmTrainer(model=tiny_llama(), args=args, hivemind_config=SWARM)


def test_a_local_batch_of_the_whole_target_is_taken(arguments):
    args = arguments(per_device_train_batch_size=8, gradient_accumulation_steps=8)
    SwarmTrainer(model=tiny_llama(), args=args, hivemind_config=SWARM)


@pytest.fixture
def trainer(arguments):
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    return SwarmTrainer(model=tiny_llama(), args=args, train_dataset=SAMPLES)


@pytest.mark.parametrize("checkpoint", [True, "out/checkpoint-1"])
def test_resuming_from_a_path_is_refused_before_a_node_is_started(trainer, checkpoint):
    with pytest.raises(RecipeError, match="no meaning in a swarm"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.node is None


def test_a_folder_that_another_peer_runs_in_is_refused_before_a_node_is_started(arguments, tmp_path):
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    trainer = SwarmTrainer(model=tiny_llama(), args=args, train_dataset=SAMPLES)
    with owned(tmp_path / "out"), pytest.raises(FolderTaken, match="A peer runs in .*out already"):
        trainer.train()
    assert trainer.node is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


def test_the_arguments_of_the_caller_are_not_changed(arguments):
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM, logging_strategy="steps", warmup_steps=1)
    SwarmTrainer(model=tiny_llama(), args=args, train_dataset=SAMPLES)
    assert (args.max_steps, args.warmup_steps, args.max_grad_norm) == (2, 1, 1.0)
    assert args.logging_strategy == "steps"


def test_a_dataset_without_a_length_needs_max_steps(arguments):
    args = arguments(SwarmTrainingArguments, hivemind_config=SWARM)
    args.max_steps = -1
    it = SwarmTrainer(model=tiny_llama(), args=args, train_dataset=SAMPLES)
    it.train_dataset = iter(SAMPLES)
    with pytest.raises(RecipeError, match="needs `max_steps`"):
        it._max_swarm_steps()
    it.train_dataset = SAMPLES
    assert it._max_swarm_steps() == 1  # 3 epochs of 16 samples, 64 a step


@pytest.mark.parametrize("name", [f"{word}_adamw" for word in REFUSED_OPTIMIZERS])
def test_an_optimizer_that_steps_elsewhere_is_refused(trainer, monkeypatch, name):
    # As if its package were installed.
    monkeypatch.setattr(trainer, "get_optimizer_cls_and_kwargs", lambda args, model: (torch.optim.AdamW, {}))
    trainer.swarm_args.optim = name
    with pytest.raises(RecipeError, match=f"optim={name} can't be used in a swarm"):
        trainer._inner_optimizer(trainer.model)


@pytest.mark.parametrize("key", ["params", "model", "optimizer_dict"])
def test_an_optimizer_that_wants_the_whole_model_is_refused(trainer, monkeypatch, key):
    made = (torch.optim.AdamW, {key: object()})
    monkeypatch.setattr(trainer, "get_optimizer_cls_and_kwargs", lambda args, model: made)
    with pytest.raises(RecipeError, match="outside of"):
        trainer._inner_optimizer(trainer.model)


@pytest.mark.parametrize(
    ("name", "cls"),
    [("adamw_torch", "AdamW"), ("adamw_torch_fused", "AdamW"), ("sgd", "SGD"), ("adagrad", "Adagrad")]
    + [("rmsprop", "RMSprop"), ("adafactor", "Adafactor"), ("adamw_bnb_8bit", "AdamW")],
)
def test_optimizers_that_step_once_are_taken(trainer, name, cls):
    trainer.swarm_args.optim = name
    groups = trainer._param_groups(trainer.model)
    assert type(trainer._inner_optimizer(trainer.model)(groups)).__name__ == cls


def test_every_trained_weight_is_in_one_group(trainer):
    trainer.model.lm_head.requires_grad_(False)
    groups = trainer._param_groups(trainer.model)
    grouped = [id(param) for group in groups for param in group["params"]]
    trained = [id(param) for param in trainer.model.parameters() if param.requires_grad]
    assert sorted(grouped) == sorted(trained)


# -- whom it trains with --------------------------------------------------------------------------


class SlowNode(FakeNode):
    """A node whose look-ups end without an answer while it `is_slow`."""

    is_slow = True

    def fetch(self, key):
        if self.is_slow:
            raise SwarmError("The DHT did not answer within 10 s; nothing was changed.")
        return super().fetch(key)


def test_a_dht_that_does_not_answer_ends_nobody_and_others_are_compared_later(trainer):
    trainer.node, other = SlowNode("QmB"), PeerProgress("QmA", History(), 0, 1.0, is_client=False)
    trainer.swarm_optimizer = SimpleNamespace(tracker=SimpleNamespace(others=(other,)))
    trainer._likeness = {"frozen weights": "a" * 64}
    publish_likeness(trainer.node.neighbour("QmA"), "run-1", {"frozen weights": "b" * 64})
    trainer._compare_with_others()
    trainer.node.is_slow = False
    with pytest.raises(RecipeMismatch, match="frozen weights"):
        trainer._compare_with_others()


# -- what it keeps --------------------------------------------------------------------------------


def test_a_run_without_an_end_keeps_its_newest_logs(trainer):
    trainer.swarm_optimizer = SimpleNamespace(local_epoch=7, max_steps=9)
    trainer.state.log_history[:] = [{"step": 0}] * trainer_module.LOGS_KEPT
    trainer.log({"eval_loss": 1.5})
    assert len(trainer.state.log_history) == trainer_module.LOGS_KEPT
    newest = trainer.state.log_history[-1]
    assert (newest["eval_loss"], newest["step"]) == (1.5, 7)


# -- what others need to join ---------------------------------------------------------------------


class Screen(io.StringIO):
    """A terminal, a notebook's cell, or a file."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


TERMINAL, FILE = Screen(True), Screen(False)
READERS = [  # who gets what is logged, and whether that is a person alone
    ([logging.StreamHandler(TERMINAL)], False, True),
    ([logging.StreamHandler(TERMINAL), logging.StreamHandler(FILE)], False, False),
    ([logging.StreamHandler(FILE)], False, False),
    ([logging.StreamHandler(FILE)], True, False),
    ([logging.NullHandler()], False, False),
    ([], False, False),
    ([], True, True),
]


@pytest.mark.parametrize(("handlers", "is_notebook", "is_private"), READERS)
def test_an_invitation_is_shown_to_a_person_and_to_no_log(monkeypatch, handlers, is_notebook, is_private):
    monkeypatch.setattr("sys.stderr", Screen(False))
    monkeypatch.setattr(trainer_module, "is_in_notebook", lambda: is_notebook)
    above, log = logging.Logger("above"), logging.Logger("log")
    log.parent, above.handlers = above, handlers
    assert trainer_module.is_shown_to_a_person(log) == is_private


@pytest.mark.parametrize("peers", ["trahiv1:abc", ["trahiv1:abc"], ("/ip4/10.0.0.1/tcp/1/p2p/Qm", "@file")])
def test_initial_peers_are_taken_as_a_friend_pastes_them(arguments, peers):
    config = SWARM | {"dht": {"initial_peers": peers}}
    args = arguments(SwarmTrainingArguments, hivemind_config=config)
    it = SwarmTrainer(model=tiny_llama(), args=args, train_dataset=SAMPLES)
    assert it._initial_peers == ([peers] if isinstance(peers, str) else list(peers))
    assert "trahiv1" not in it.args.to_json_string(), "trackers keep that"


# -- without a swarm ------------------------------------------------------------------------------


def trained(cls, args):
    model = tiny_llama()
    it = cls(model=model, args=args, train_dataset=SAMPLES)
    it.train()
    return it, model.state_dict()


@pytest.mark.parametrize("args_class", [TrainingArguments, SwarmTrainingArguments])
def test_without_a_swarm_it_trains_to_the_same_bits_as_trainer(arguments, args_class):
    fields = {"logging_steps": 1, "logging_strategy": "steps", "learning_rate": 0.01}
    ours, our_weights = trained(SwarmTrainer, arguments(args_class, **fields))
    theirs, their_weights = trained(Trainer, arguments(**fields))
    start = tiny_llama().state_dict()
    assert all(torch.equal(our_weights[name], their_weights[name]) for name in their_weights)
    assert not all(torch.equal(our_weights[name], start[name]) for name in start)
    assert type(ours.optimizer) is type(theirs.optimizer)
    assert type(ours.lr_scheduler) is type(theirs.lr_scheduler)
    assert ours.state.global_step == theirs.state.global_step == 2
    unlike = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    logs = [
        [{k: v for k, v in log.items() if k not in unlike} for log in it.state.log_history]
        for it in (ours, theirs)
    ]
    assert logs[0] == logs[1] and "loss" in logs[0][0]


def test_without_a_swarm_nothing_is_refused(arguments):
    optimizer = torch.optim.SGD(tiny_llama().parameters(), lr=0.1)
    SwarmTrainer(model=tiny_llama(), args=arguments(), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="checkpoint"):
        SwarmTrainer(model=tiny_llama(), args=arguments(), train_dataset=SAMPLES).train(
            resume_from_checkpoint=True
        )


def test_closing_a_trainer_that_never_trained_is_harmless(trainer, arguments):
    trainer.close()
    trainer.close()
    SwarmTrainer(model=tiny_llama(), args=arguments()).close()
