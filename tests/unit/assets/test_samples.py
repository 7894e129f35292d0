"""Samples of masked models and of classifiers; those of `clm` are in `test_data.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from transformers import PreTrainedTokenizerFast

from trahiv_cli.assets.data import Splits, build_datasets
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection, Recipe

Rows = Callable[..., DatasetSection]
Build = Callable[..., Splits]
STREAMED = pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
TEXTS = [{"text": f"text number {n} " * (n % 5)} for n in range(40)]


@pytest.fixture
def build(recipe: Callable[..., Recipe], bert_tokenizer: PreTrainedTokenizerFast) -> Build:
    def make(
        task: str, source: DatasetSection, *, share: float = 0.0, peer_seed: int = 1, **section: object
    ) -> Splits:
        data = {name: section.pop(name) for name in ("streaming", "shuffle", "num_proc") if name in section}
        data = {"shuffle": False, "eval": {"test_split_size": share}, **data}
        made = recipe(task, [source], section=section, **data)
        return build_datasets(made, bert_tokenizer, seed=42, peer_seed=peer_seed)

    return make


# -- mlm ------------------------------------------------------------------------------------------


@STREAMED
def test_a_document_is_one_sample_with_special_tokens_cut_to_length(
    write_rows: Rows, build: Build, bert_tokenizer: PreTrainedTokenizerFast, streaming: bool
) -> None:
    source = write_rows([{"text": "ab"}, {"text": "abcdefgh"}])
    samples = list(build("mlm", source, max_length=6, streaming=streaming).train)
    assert [sample.keys() for sample in samples] == [{"input_ids"}] * 2
    texts = [bert_tokenizer.convert_ids_to_tokens(sample["input_ids"]) for sample in samples]
    assert texts == [["[CLS]", "a", "b", "[SEP]"], ["[CLS]", "a", "b", "c", "d", "[SEP]"]]


@STREAMED
def test_documents_with_nothing_to_hide_are_left_out(write_rows: Rows, build: Build, streaming: bool) -> None:
    source = write_rows([{"text": "a"}, {"text": ""}, {"text": None}, {"text": "[SEP][MASK]"}])
    assert len(list(build("mlm", source, streaming=streaming).train)) == 1


@STREAMED
def test_data_without_any_text_is_refused(write_rows: Rows, build: Build, streaming: bool) -> None:
    with pytest.raises(AssetError, match=r"No row of .*rows\.jsonl' has a text"):
        build("mlm", write_rows([{"text": ""}] * 3), streaming=streaming)


def test_the_held_out_share_is_masked_once_and_alike_on_every_peer(
    write_rows: Rows, build: Build, bert_tokenizer: PreTrainedTokenizerFast
) -> None:
    ours, theirs = (
        build("mlm", write_rows(TEXTS), share=0.5, peer_seed=seed, shuffle=True) for seed in (1, 2)
    )
    held_out = list(ours.eval)
    assert held_out == list(theirs.eval)
    assert len(held_out) == 16 and len(ours.train) == 16  # 8 texts are empty
    trained = {tuple(sample["input_ids"]) for sample in ours.train}
    for sample in held_out:
        hidden = [label for label in sample["labels"] if label != -100]
        assert hidden and len(sample["labels"]) == len(sample["input_ids"])
        assert not set(hidden) & set(bert_tokenizer.all_special_ids)
        seen = zip(sample["input_ids"], sample["labels"], strict=True)
        assert tuple(token if label == -100 else label for token, label in seen) not in trained


def test_a_held_out_document_is_masked_by_its_place_and_not_by_its_neighbours(
    write_rows: Rows, build: Build
) -> None:
    sources = [write_rows([{"text": "the same text " * 9}] * n, f"{n}.jsonl") for n in (200, 400)]
    few, many = (list(build("mlm", source, share=0.5).eval) for source in sources)
    assert few == many[: len(few)]  # 100 are one batch of the mapping, 200 are two
    assert few[0] != few[1]


# -- seq-cls --------------------------------------------------------------------------------------

LABELS = ["bad", "good", "none"]


@STREAMED
@pytest.mark.parametrize("said", [[0, 1, 2], ["bad", "good", "none"], [0.0, 1.0, 2.0]])
def test_a_class_is_a_number_or_a_name(
    write_rows: Rows, build: Build, said: list[object], streaming: bool
) -> None:
    source = write_rows([{"text": f"text {label}", "label": label, "id": 7} for label in said])
    samples = list(build("seq-cls", source, labels=LABELS, streaming=streaming).train)
    assert [sample["labels"] for sample in samples] == [0, 1, 2]
    assert all(sample.keys() == {"input_ids", "labels"} for sample in samples)


def test_rows_without_a_text_are_left_out_with_their_class(write_rows: Rows, build: Build) -> None:
    source = write_rows([{"text": "", "label": 0}, {"text": "good", "label": 1}])
    assert [sample["labels"] for sample in build("seq-cls", source, labels=LABELS).train] == [1]


@STREAMED
@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            3,
            r"Row 3 of .*rows\.jsonl' has the label 3, and `seq_cls\.labels` names 3 classes: bad, good",
        ),
        (-1, "has the label -1"),
        (0.5, "has the label 0.5"),
        (None, "Row 3 of .* has no label"),
    ],
)
def test_a_label_out_of_range_names_its_row(
    write_rows: Rows, build: Build, label: object, message: str, streaming: bool
) -> None:
    rows = [{"text": "a", "label": 0}] * 5
    rows[2] = {"text": "a", "label": label}
    with pytest.raises(AssetError, match=message) as caught:
        list(build("seq-cls", write_rows(rows), labels=LABELS, streaming=streaming).train)
    assert "a number from 0 to 2" in caught.value.hint


def test_an_unknown_name_of_a_class_is_refused_in_another_process_too(write_rows: Rows, build: Build) -> None:
    rows = [{"text": "a", "label": name} for name in ("good", "bad", "god", "none")]
    with pytest.raises(AssetError, match="Row 3 of .* has the label 'god'") as caught:
        build("seq-cls", write_rows(rows), labels=LABELS, num_proc=2)
    assert caught.value.hint


@STREAMED
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bad", "good", "none"], [0, 1, 2]),
        (["none", "bad", "good"], [2, 0, 1]),
        (["good", "bad"], [1, 0]),
        (["x", "y", "z"], [0, 1, 2]),
    ],
    ids=["same order", "another order", "not all", "other names"],
)
def test_a_dataset_that_names_its_classes_is_read_by_name(
    tmp_path: Path, build: Build, names: list[str], expected: list[int], streaming: bool
) -> None:
    rows = [{"text": "a", "label": number} for number in range(len(names))]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    file = tmp_path / "rows.parquet"
    Dataset.from_list(rows, features=features).to_parquet(str(file))
    splits = build("seq-cls", DatasetSection(path=str(file)), labels=LABELS, streaming=streaming)
    assert [sample["labels"] for sample in splits.train] == expected


def test_classes_that_the_recipe_does_not_name_are_refused(tmp_path: Path, build: Build) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["good", "bad", "ugly"])})
    file = tmp_path / "rows.parquet"
    Dataset.from_list([{"text": "a", "label": 0}], features=features).to_parquet(str(file))
    with pytest.raises(AssetError, match="classes that `seq_cls.labels` does not name: ugly"):
        build("seq-cls", DatasetSection(path=str(file)), labels=LABELS)


@pytest.mark.parametrize(
    ("column", "hint"),
    [
        ("txt", "Set `seq_cls.dataset_text_field` to 'txt'."),
        ("labels", "`seq_cls.dataset_label_field` to 'labels'"),
    ],
)
def test_a_missing_column_names_the_setting(write_rows: Rows, build: Build, column: str, hint: str) -> None:
    row = {"text": "a", "label": 0}
    row[column] = row.pop("text" if column == "txt" else "label")
    with pytest.raises(AssetError, match="has no column") as caught:
        build("seq-cls", write_rows([row]), labels=LABELS)
    assert hint in caught.value.hint
