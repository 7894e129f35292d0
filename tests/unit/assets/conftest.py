"""A tiny llama, tokenizers, recipes and files of rows; nothing here reaches a hub."""

import json
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
import torch
from transformers import ByT5Tokenizer

from tests.kit.recipes import tiny_llama
from tests.kit.stand_ins import bert_tokenizer as build_bert_tokenizer
from tests.kit.stand_ins import write_bert, write_llama
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import build_model, build_tokenizer
from trahiv_cli.recipe.schema import DatasetSection, Recipe

TINY_LLAMA = tiny_llama()
LORA = {"r": 4}
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
LABELS = ["bad", "fair", "good"]


def recipe(task="clm", model=TINY_LLAMA, **sections):
    """Make a recipe: `model` is a folder, or the fields of a new config; the rest are sections."""
    if isinstance(model, Path):
        source = {"model_name_or_path": str(model)}
    else:
        source = {"config": model, "tokenizer_name_or_path": "builtin/bytes"}
    if task == "seq-cls":
        sections.setdefault("seq_cls", {"labels": LABELS})
    return Recipe.model_validate(
        {
            "name": "test",
            "task": task,
            "data": {"datasets": [{"path": "builtin/trahiv"}], **sections.pop("data", {})},
            "training": {"max_steps": 1, **sections.pop("training", {})},
            "model": source | sections.pop("model_section", {}),
            **sections,
        }
    )


def built(*args, **sections):
    """Build the model of a `recipe`."""
    wanted = recipe(*args, **sections)
    return build_model(wanted, build_tokenizer(wanted))


def are_equal(ours, theirs):
    """Whether two models have the same weights."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def splits_of(task, datasets, tokenizer, *, share=0.0, peer_seed=1, section=None, **data):
    """Build the splits of a task; by default, nothing is shuffled."""
    data = {"shuffle": False, "eval": {"test_split_size": share}, "datasets": datasets, **data}
    wanted = recipe(task, data=data, **({task.replace("-", "_"): section} if section else {}))
    return build_datasets(wanted, tokenizer, peer_seed=peer_seed)


@pytest.fixture(params=[False, True], ids=["read", "streamed"])
def streaming(request):
    return request.param


@pytest.fixture
def gpu(monkeypatch):
    """Make code believe that there is a GPU; it has no bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)


@pytest.fixture(autouse=True)
def _offline_with_a_cache_of_its_own(tmp_path, monkeypatch):
    # The environment variables are read when the libraries are imported, which is long ago.
    torch.set_num_threads(1)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def byte_tokenizer():
    return ByT5Tokenizer()


@pytest.fixture(scope="session")
def bert_tokenizer():
    return build_bert_tokenizer()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def write_rows(tmp_path):
    """Write a .jsonl file of rows; give back its section: `write_rows(rows, "a.jsonl", fraction=1)`."""

    def write(rows, name="rows.jsonl", **fields):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DatasetSection(path=str(tmp_path / name), **fields)

    return write
