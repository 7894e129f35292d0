from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
)

from trahiv_cli.assets.collators import build_collator
from trahiv_cli.recipe.schema import DatasetSection, Recipe

Recipes = Callable[..., Recipe]
EOS = 1
SOURCE = [DatasetSection(path="nobody/nothing")]
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def sample(tokenizer: PreTrainedTokenizerFast, text: str) -> dict[str, list[int]]:
    return {"input_ids": tokenizer(text)["input_ids"]}


def test_a_batch_pads_by_position_and_learns_the_end_of_text(
    recipe: Recipes, byte_tokenizer: ByT5Tokenizer
) -> None:
    collate = build_collator(recipe("clm", SOURCE, section={"packing": False}), byte_tokenizer)
    batch = collate([{"input_ids": [5, 0, EOS]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[5, 0, EOS], [7, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, EOS], [7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_batch_of_blocks_needs_no_mask(recipe: Recipes, byte_tokenizer: ByT5Tokenizer) -> None:
    collate = build_collator(recipe("clm", SOURCE), byte_tokenizer)
    batch = collate([{"input_ids": [5, 6]}, {"input_ids": [7, EOS]}])
    assert batch.keys() == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_hidden_tokens_are_the_only_labels_and_differ_each_time(
    recipe: Recipes, bert_tokenizer: PreTrainedTokenizerFast
) -> None:
    collate = build_collator(recipe("mlm", SOURCE), bert_tokenizer)
    samples = [sample(bert_tokenizer, "a long enough text " * 20), sample(bert_tokenizer, "short")]
    torch.manual_seed(0)
    first, second = collate(samples), collate(samples)
    assert first.keys() == {"input_ids", "labels", "attention_mask"}
    ids = torch.tensor(samples[0]["input_ids"])
    hidden = first["labels"][0] != -100
    assert torch.equal(first["labels"][0][hidden], ids[hidden])
    assert torch.equal(first["input_ids"][0][~hidden], ids[~hidden])
    assert 0.05 < hidden.float().mean() < 0.3
    special = torch.isin(ids, torch.tensor(bert_tokenizer.all_special_ids))
    assert not hidden[special].any()
    assert (first["labels"][1][7:] == -100).all() and not first["attention_mask"][1][7:].any()
    assert not torch.equal(first["labels"], second["labels"])


def test_no_batch_hides_nothing(recipe: Recipes, bert_tokenizer: PreTrainedTokenizerFast) -> None:
    collate = build_collator(recipe("mlm", SOURCE, section={"mlm_probability": 0.05}), bert_tokenizer)
    samples = [sample(bert_tokenizer, "ab")]
    assert all((collate(samples)["labels"] != -100).any() for _ in range(30))


def test_what_was_masked_before_stays_as_it_is(
    recipe: Recipes, bert_tokenizer: PreTrainedTokenizerFast
) -> None:
    collate = build_collator(recipe("mlm", SOURCE), bert_tokenizer)
    batch = collate(
        [
            {"input_ids": [2, 4, 9, 3], "labels": [-100, 8, -100, -100]},
            {"input_ids": [2, 4, 3], "labels": [-100, 7, -100]},
        ]
    )
    assert batch["input_ids"].tolist() == [[2, 4, 9, 3], [2, 4, 3, bert_tokenizer.pad_token_id]]
    assert batch["labels"].tolist() == [[-100, 8, -100, -100], [-100, 7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_a_batch_of_classes_is_padded(recipe: Recipes, bert_tokenizer: PreTrainedTokenizerFast) -> None:
    collate = build_collator(recipe("seq-cls", SOURCE, section={"labels": ["no", "yes"]}), bert_tokenizer)
    batch = collate([{"input_ids": [2, 9, 3], "labels": 1}, {"input_ids": [2, 3], "labels": 0}])
    assert batch["input_ids"].tolist() == [[2, 9, 3], [2, 3, bert_tokenizer.pad_token_id]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("task", "section", "samples", "model"),
    [
        ("mlm", {}, [{"input_ids": [2, 9, 3]}], BertForMaskedLM),
        ("mlm", {}, [{"input_ids": [2, 4, 3], "labels": [-100, 9, -100]}], BertForMaskedLM),
        (
            "seq-cls",
            {"labels": ["no", "yes"]},
            [{"input_ids": [2, 9, 3], "labels": 1}],
            BertForSequenceClassification,
        ),
    ],
    ids=["masked anew", "masked before", "classes"],
)
def test_a_model_takes_a_batch_as_it_is(
    recipe: Recipes,
    bert_tokenizer: PreTrainedTokenizerFast,
    task: str,
    section: dict,
    samples: list[dict],
    model: type,
) -> None:
    batch = build_collator(recipe(task, SOURCE, section=section), bert_tokenizer)(samples)
    loss = model(BertConfig(vocab_size=len(bert_tokenizer), **TINY))(**batch).loss
    assert torch.isfinite(loss)


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_trl_brings_its_own_collators(recipe: Recipes, byte_tokenizer: ByT5Tokenizer, task: str) -> None:
    assert build_collator(recipe(task, SOURCE), byte_tokenizer) is None
