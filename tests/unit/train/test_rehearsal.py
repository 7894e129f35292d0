"""Errors that only training and saving raise come before others are invited; a rehearsal leaves no trace."""

import inspect
import json

import pytest
import torch
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from tests.kit.fakes import FakeNode
from tests.kit.recipes import tiny_llama
from tests.kit.stand_ins import chat_tokenizer, write_bert, write_llama
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.errors import AssetError, RecipeError
from trahiv_cli.recipe.agreement import AgreedRun
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.upstream import BORDERLESS, SCHEDULES
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import trainer as trainer_module
from trahiv_cli.train.rehearsal import excerpt, rehearse
from trahiv_cli.train.tasks import build_trainer, training_arguments

LLAMA = tiny_llama(vocab_size=384)
HEADS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 384}
OTHERS = {
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 384},
    "mamba": HEADS,
    "opt": HEADS | {"ffn_dim": 32, "word_embed_proj_dim": 32},
}
ENDLESS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@pytest.fixture
def prepared(tmp_path):
    """Make the trainer of a recipe, with `told` and `rehearse`: `prepared("sft", ..., packing=True)`."""

    def prepare(task="clm", model=LLAMA, rows=None, data=None, **options):
        rows = rows or [{"text": "sample of some words " * (1 + number % 3)} for number in range(24)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"model_name_or_path": str(model)}
        if isinstance(model, dict):
            source = {"config": model, "tokenizer_name_or_path": "builtin/bytes"}
        recipe = Recipe.model_validate(
            {
                "name": "test",
                "task": task,
                "model": source,
                "data": {"datasets": [{"path": str(tmp_path / "rows.jsonl")}], **(data or {})},
                "training": {"max_steps": 4, "per_device_train_batch_size": 2},
                "hivemind_config": {"opt": {"run_id": "test", "target_batch_size": 8}},
                task.replace("-", "_"): {"max_length": 32} | options,
            }
        )
        splits = build_datasets(recipe, build_tokenizer(recipe), peer_seed=1)
        run = AgreedRun.of(recipe)
        arguments = training_arguments(run, tmp_path / "run")
        trainer = build_trainer(run, arguments, splits, node=FakeNode())
        trainer.told = []
        events = Events(lambda event: trainer.told.append(event["code"]))
        trainer.rehearse = lambda: rehearse(trainer, recipe, events)
        return trainer

    return prepare


def test_rehearsal_leaves_trainer_unchanged(prepared):
    trainer = prepared("sft", LLAMA | {"attention_dropout": 0.1})
    trainer.model.register_buffer("seen", torch.ones(2))

    def count_batch(model, _):
        model.seen += 1

    trainer.model.register_forward_pre_hook(count_batch)
    trainer.model.eval()

    def content():
        weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
        gradients = [weight.grad for weight in trainer.model.parameters()]
        return weights, gradients, trainer.model.training, torch.get_rng_state().tolist()

    before = content()
    figures = dict(vars(trainer))
    trainer.rehearse()
    assert content() == before
    assert vars(trainer).items() >= figures.items()
    assert not any(trainer._metrics.values())


@pytest.mark.parametrize("task", ["clm", "dpo", "kto", "reward", "grpo", "mlm", "seq-cls"])
def test_every_task_can_be_rehearsed(prepared, tmp_path, task):
    pairs = [{"prompt": "Say it", "chosen": "yes", "rejected": "no", "text": "a b c", "label": 1}] * 8
    model = write_bert(tmp_path / "model") if task in ("mlm", "seq-cls") else LLAMA
    grpo = {
        "rewards": [{"name": "length", "max_tokens": 3}],
        "max_completion_length": 4,
        "num_generations": 2,
    }
    options = {"seq-cls": {"labels": ["bad", "good"]}, "grpo": grpo}.get(task, {})
    prepared(task, model, pairs if task != "clm" else None, **options).rehearse()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LLAMA | {"num_key_value_heads": 3}, "batch could not be trained .* RuntimeError: .* size of tensor"),
        ({"model_type": "bert", **HEADS, "intermediate_size": 32}, "sees the tokens that it is to predict"),
    ],
)
def test_untrainable_model_is_refused(prepared, model, message):
    with pytest.raises(AssetError, match=message):
        prepared(model=model).rehearse()


def test_out_of_memory_tries_one_sample(prepared):
    trainer = prepared()
    tried = []
    compute = trainer.compute_loss

    def compute_small(model, inputs):
        tried.append(len(inputs["input_ids"]))
        if tried[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(model, inputs)

    trainer.compute_loss = compute_small
    trainer.rehearse()
    assert tried == [2, 1]


@pytest.mark.parametrize("kind", OTHERS)
def test_packing_without_borders_is_refused(prepared, kind):
    assert kind in BORDERLESS
    with pytest.raises(AssetError, match=f"'{kind}' have no borders"):
        prepared("sft", OTHERS[kind] | {"model_type": kind}, max_length=96, packing=True).rehearse()


@pytest.mark.parametrize(
    ("strategy", "model"), [("bfd", LLAMA), ("wrapped", OTHERS["bloom"] | {"model_type": "bloom"})]
)
def test_packing_with_borders_or_wrapped_is_allowed(prepared, strategy, model):
    prepared("sft", model, max_length=128, packing=True, packing_strategy=strategy).rehearse()


def test_packed_excerpt_keeps_borders():
    row = {"input_ids": list(range(10)), "labels": list(range(10)), "seq_lengths": [2, 3, 5]}
    cut = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "seq_lengths": [1, 3, 1]}
    assert excerpt(row, 1, 6) == cut
    assert excerpt(row, 0, 99) == row


def test_unsavable_generation_config_is_replaced(prepared, tmp_path):
    folder = write_llama(tmp_path / "model")
    wrong = {"do_sample": False, "temperature": 0.9, "eos_token_id": [2, 3]}
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    trainer = prepared(model=folder)
    trainer.rehearse()
    assert trainer.told == ["generation"]
    trainer.model.save_pretrained(tmp_path / "final")
    assert trainer.model.generation_config.eos_token_id == [2, 3]


def share_memory(trainer):
    first, second = (layer.mlp.up_proj.weight for layer in trainer.model.model.layers[:2])
    memory = torch.randn(1 + len(first), 32)
    first.data = memory[:-1]
    second.data = memory[1:]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda it: it.processing_class.init_kwargs.update(bad=print), "TypeError"),
        (lambda it: setattr(it.model.config, "id2label", {"bad": 0}), "(Type|Value)Error"),
        (
            lambda it: setattr(it.model.generation_config, "id2label", {"bad": object()}),
            "(Type|Value)Error",
        ),
        (share_memory, "shared"),
    ],
)
def test_unsavable_model_is_refused(prepared, spoil, why):
    trainer = prepared()
    spoil(trainer)
    with pytest.raises(AssetError, match=f"could not be saved .* {why}"):
        trainer.rehearse()


@pytest.mark.parametrize(
    ("data", "told", "ends"), [({}, [], [2]), ({"chat_template": ENDLESS}, ["no-end"], 2)]
)
def test_turn_end_token_is_listed(prepared, tmp_path, data, told, ends):
    folder = write_llama(tmp_path / "model")
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    trainer = prepared("sft", folder, [{"messages": talk}] * 8, data, max_length=64)
    trainer.rehearse()
    assert trainer.told == told
    assert trainer.model.generation_config.eos_token_id == ends


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr_scheduler_kwargs": {"eta_min": 0.1}},
        {"adam_beta1": 2.0},
        {"optim": "rmsprop_bnb", "optim_args": "beta=3"},
        {"optim": "rmsprop_bnb", "optim_args": "centered=true"},
    ],
)
def test_unbuildable_optimizer_is_refused(prepared, arguments):
    trainer = prepared()
    vars(trainer.args).update(arguments)
    with pytest.raises(RecipeError, match="optimizer or its schedule can't be made"):
        trainer.rehearse()


def test_drop_in_tries_optimizer_before_node(arguments, swarm_trainer, monkeypatch):
    monkeypatch.setattr(trainer_module, "started", lambda *_, **__: pytest.fail("a node was started"))
    trainer = swarm_trainer(args=arguments(lr_scheduler_type="cosine_with_min_lr"))
    with pytest.raises(RecipeError, match="min_lr or min_lr_rate"):
        trainer.train()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_keywords_match_transformers(name):
    ours = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[name]).parameters)
    ours -= {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    assert set(SCHEDULES[name]) == ours
