"""A tiny llama, a byte tokenizer, files of every suffix; nothing here reaches a hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tests.kit.recipes import tiny_llama
from tests.kit.stand_ins import bert_tokenizer as build_bert_tokenizer
from trahiv_cli.recipe.schema import DatasetSection, ModelSection, Recipe

TINY_LLAMA = tiny_llama()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _offline_with_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment variables are read when the libraries are imported, which is long ago.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByT5Tokenizer:
    return ByT5Tokenizer()


@pytest.fixture(scope="session")
def bert_tokenizer() -> PreTrainedTokenizerFast:
    return build_bert_tokenizer()


@pytest.fixture
def llama() -> Callable[..., ModelSection]:
    """Make a section for a tiny llama: `llama(hidden_size=64)` changes its config."""

    def section(**changes: object) -> ModelSection:
        dtype = changes.pop("dtype", "auto")
        return ModelSection(
            config={**TINY_LLAMA, **changes}, tokenizer_name_or_path="builtin/bytes", dtype=dtype
        )

    return section


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Make a recipe around data: `recipe("clm", [source], shuffle=False, section={"max_length": 16})`."""

    def make(
        task: str, sources: list[DatasetSection], *, section: dict | None = None, **data: object
    ) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "test",
                "task": task,
                "model": {"model_name_or_path": "nobody/nothing"},
                "data": {"datasets": [source.model_dump() for source in sources], **data},
                task.replace("-", "_"): section or {},
                "training": {"max_steps": 1},
            }
        )

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., DatasetSection]:
    """Write a .jsonl file of rows; give back its section: `write_rows(rows, "a.jsonl", fraction=1)`."""

    def write(rows: list[dict], name: str = "rows.jsonl", **fields: object) -> DatasetSection:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DatasetSection(path=str(file), **fields)

    return write


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., DatasetSection]:
    """Write a .jsonl file with one document a text; give back its section."""

    def write(texts: list[str], column: str = "text") -> DatasetSection:
        file = tmp_path / "documents.jsonl"
        file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
        return DatasetSection(path=str(file))

    return write
