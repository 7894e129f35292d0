"""Samples of masked models and classifiers, rows for TRL's trainers, batches; `clm` is in `test_data.py`.

Messages about columns that do not fit are in `tests/unit/cli/test_broken_recipes.py`.
"""

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from tests.kit.stand_ins import chat_tokenizer
from tests.unit.assets.conftest import STREAMED, recipe, splits_of
from trahiv_cli.assets.collators import build_collator, class_metrics
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection


@pytest.fixture
def build(bert_tokenizer):
    """Build the splits of one dataset, or of several for `sft` and `dpo`."""
    chatty = chat_tokenizer()

    def make(task, *sources, max_length=512, section=None, tokenizer=None, **options):
        section = {"max_length": max_length, **(section or {})}
        if task == "seq-cls":
            section["labels"] = ["bad", "good", "none"]
        usual = bert_tokenizer if task in ("mlm", "seq-cls") else chatty
        return splits_of(task, sources, tokenizer or usual, section=section, **options)

    return make


@STREAMED
def test_maskable_document_is_one_sample(write_rows, build, bert_tokenizer, streaming):
    source = write_rows([{"text": text} for text in ("ab", "abcdefgh", "", None, "[SEP][MASK]")])
    samples = list(build("mlm", source, max_length=6, streaming=streaming).train)
    assert [sample.keys() for sample in samples] == [{"input_ids"}] * 2
    texts = [bert_tokenizer.convert_ids_to_tokens(sample["input_ids"]) for sample in samples]
    assert texts == [["[CLS]", "a", "b", "[SEP]"], ["[CLS]", "a", "b", "c", "d", "[SEP]"]]
    with pytest.raises(AssetError, match=r"No row of .*none\.jsonl' has a text"):
        build("mlm", write_rows([{"text": ""}] * 3, "none.jsonl"), streaming=streaming)


@STREAMED
@pytest.mark.parametrize("said", [["bad", "good", "none"], [0.0, 1.0, 2.0]])
def test_class_is_number_or_name(write_rows, build, said, streaming):
    rows = [{"text": f"text {label}", "label": label, "id": 7} for label in said]
    rows.insert(1, {"text": "", "label": said[0], "id": 7})  # without a text: left out with its class
    samples = list(build("seq-cls", write_rows(rows), streaming=streaming).train)
    assert [sample["labels"] for sample in samples] == [0, 1, 2]
    assert all(sample.keys() == {"input_ids", "labels"} for sample in samples)


@pytest.mark.parametrize(("label", "how"), [(3, {"streaming": True}), ("god", {"num_proc": 2})])
def test_unknown_label_names_its_row(write_rows, build, label, how):
    rows = [{"text": "a", "label": "bad" if isinstance(label, str) else 0} for _ in range(5)]
    rows[2]["label"] = label
    words = f"Row 3 of .* has the label {label!r}, and .* names 3 classes"
    with pytest.raises(AssetError, match=words) as caught:
        list(build("seq-cls", write_rows(rows), **how).train)
    assert "its number from 0" in caught.value.hint


@STREAMED
def test_named_classes_are_matched_by_name(tmp_path, build, streaming):
    def labels_of(*names):
        """The labels of a dataset that has each of its classes once, and names them."""
        rows = [{"text": "a", "label": number} for number in range(len(names))]
        features = Features({"text": Value("string"), "label": ClassLabel(names=list(names))})
        file = str(tmp_path / f"{names[0]}.parquet")
        Dataset.from_list(rows, features=features).to_parquet(file)
        samples = build("seq-cls", DatasetSection(path=file), streaming=streaming).train
        return [sample["labels"] for sample in samples]

    assert labels_of("none", "bad", "good") == [2, 0, 1]
    assert labels_of("x", "y", "z") == [0, 1, 2], "where all have other names, the numbers count"
    with pytest.raises(AssetError, match="classes that `seq_cls.labels` does not name: ugly"):
        labels_of("good", "bad", "ugly")


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
WORSE = [CHAT[0], {"role": "assistant", "content": "5"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
THINKING = {"messages": CHAT, "chat_template_kwargs": {"thinking": True}}
PREFERRED = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": WORSE[1:]}


@STREAMED
@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("sft", {"messages": CHAT, "tools": None, "prompt": "x"}, {"messages": CHAT, "tools": None}),
        ("sft", {"conversations": SHAREGPT, "id": 1}, {"messages": CHAT}),
        ("sft", {"conversations": CHAT, "tools": "[]"}, {"messages": CHAT, "tools": "[]"}),
        ("sft", {"prompt": "a", "completion": "b", "text": "ab"}, {"prompt": "a", "completion": "b"}),
        ("sft", {"text": "a", "id": 1}, {"text": "a"}),
        ("sft", {**THINKING, "id": 1}, THINKING),
        ("dpo", {**PREFERRED, "id": 1}, PREFERRED),
        ("dpo", {"chosen": CHAT, "rejected": WORSE, "messages": CHAT}, {"chosen": CHAT, "rejected": WORSE}),
    ],
)
def test_rows_keep_only_trl_columns(write_rows, build, task, row, expected, streaming):
    assert list(build(task, write_rows([row] * 3), streaming=streaming).train) == [expected] * 3


def test_renamed_columns_and_plain_texts_are_read(write_rows, build):
    columns = {"instruction": "prompt", "output": "completion"}
    renamed = write_rows([{"instruction": "a", "output": "b", "input": ""}], columns=columns)
    assert list(build("sft", renamed).train) == [{"prompt": "a", "completion": "b"}]
    plain, section = chat_tokenizer(None), {"dataset_text_field": "body"}
    texts = build("sft", write_rows([{"body": "a"}]), tokenizer=plain, section=section)
    assert list(texts.train) == [{"body": "a"}]
    with pytest.raises(AssetError, match="the tokenizer has no chat template") as caught:
        build("sft", write_rows([{"messages": CHAT}]), tokenizer=plain)
    assert "`data.chat_template: FILE.jinja`" in caught.value.hint


@STREAMED
@pytest.mark.parametrize(
    ("task", "row", "broken", "message"),
    [
        ("sft", {"conversations": SHAREGPT}, {"conversations": []}, "than messages of from and value"),
        ("dpo", {"chosen": "a", "rejected": "b"}, {"rejected": None}, "Row 3 of .* has no 'rejected'"),
        ("sft", THINKING, {"chat_template_kwargs": None}, "Row 3 of .* has no 'chat_template_kwargs'"),
    ],
)
def test_row_unreadable_for_trl_is_named(write_rows, build, task, row, broken, message, streaming):
    source = write_rows([row, row, row | broken, row])
    with pytest.raises(AssetError, match=message) as caught:
        list(build(task, source, streaming=streaming).train)
    assert caught.value.hint == "Fix or remove that row."


REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.role + ': ' + m.content }}{% endfor %}"
)
KEEPS_THE_LAST = "{% set m = messages | last %}{{ m.role + ': ' + m.content }}"


@STREAMED
def test_row_refused_by_template_is_named(write_rows, build, streaming):
    asked = [{"role": "system", "content": "Be brief."}, *CHAT]
    source, plain = write_rows([{"messages": CHAT}] * 1200 + [{"messages": asked}]), chat_tokenizer(REFUSES)
    with pytest.raises(AssetError, match="Row 1,201 of .* by the chat template .*: no system role"):
        list(build("sft", source, tokenizer=plain, streaming=streaming).train)


def test_template_arithmetic_error_names_row(write_rows, build):
    source = write_rows([{"messages": [*CHAT, *CHAT]}, {"messages": CHAT}])
    with pytest.raises(AssetError, match="Row 2 of .* by the chat template .*: .*by zero"):
        build("sft", source, tokenizer=chat_tokenizer("{{ 1 // (messages | length - 2) }}"))


@STREAMED
def test_message_dropped_by_template_warns(write_rows, build, caplog, streaming):
    source, tokenizer = write_rows([{"messages": CHAT}] * 3), chat_tokenizer(KEEPS_THE_LAST)
    assert len(list(build("sft", source, tokenizer=tokenizer, streaming=streaming).train)) == 3
    assert "Row 1 of" in caplog.text and "has a message of the user in 'messages' that" in caplog.text
    assert streaming or "(3 rows: 1, 2, 3)" in caplog.text


def test_all_broken_rows_are_reported_together(write_rows, build):
    broken = [[*CHAT[:1], CHAT[1] | {"content": None}], [CHAT[0] | {"role": "human"}, CHAT[1]], CHAT[:1]]
    source = write_rows([{"messages": messages} for messages in (CHAT, *broken, broken[0])])
    with pytest.raises(AssetError) as caught:
        build("sft", source)
    first, second, third = caught.value.message.splitlines()
    assert first.startswith("Row 2 of") and first.endswith("(2 rows: 2, 5).")
    assert "Row 3" in second and "'human'" in second and "Row 4" in third


def test_skipped_rows_are_counted(write_rows, build, caplog):
    rows = [{"text": text, "label": 0} for text in ("a", "", None, "b")]
    assert len(build("seq-cls", write_rows(rows)).train) == 2
    assert "2 of 4 rows of" in caplog.text


OF_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ PART }}{% endfor %}{% endif %}{% endfor %}"
)


@STREAMED
@pytest.mark.parametrize("written", [None, "part", "part | tojson", "part.text ~ part", "part.text | upper"])
def test_content_parts_unread_by_template_are_refused(write_rows, build, streaming, written):
    whole = [CHAT[0], CHAT[1] | {"content": "Four."}]
    parts = [CHAT[0] | {"content": [{"type": "text", "text": "2 + two?"}]}, whole[1]]
    source = write_rows([{"messages": whole}, {"messages": parts}])
    tokenizer = None if written is None else chat_tokenizer(OF_PARTS.replace("PART", written))
    with pytest.raises(
        AssetError, match="Row 2 of .* has a list as a message's 'content' in 'messages', not"
    ):
        list(build("sft", source, tokenizer=tokenizer, streaming=streaming).train)


@STREAMED
def test_content_parts_read_by_template_are_kept(write_rows, build, streaming, caplog):
    asked = [{"type": "text", "text": " 2 + "}, {"type": "text", "text": "2?"}]
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Four."}]
    source = write_rows([{"messages": talk}] * 2)
    tokenizer = chat_tokenizer(OF_PARTS.replace("PART", "part.text | trim"))
    assert len(list(build("sft", source, tokenizer=tokenizer, streaming=streaming).train)) == 2
    assert not caplog.text


def test_json_quoted_content_gives_no_warning(write_rows, build, caplog):
    source = write_rows([{"messages": [CHAT[0] | {"content": 'Say "é"\n'}, CHAT[1]]}])
    build(
        "sft", source, tokenizer=chat_tokenizer("{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    )
    assert not caplog.text


@pytest.mark.parametrize("role", ["user", "alice"])
def test_roles_match_any_template(write_rows, build, role):
    source, tokenizer = write_rows([{"messages": [CHAT[0] | {"role": role}, CHAT[1]]}]), chat_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ 'alice' }}"}
    assert len(build("sft", source, tokenizer=tokenizer).train) == 1


@STREAMED
def test_conversation_forms_are_equivalent(write_rows, build, streaming, tmp_path):
    message = {"role": Value("large_string"), "content": Value("large_string")}
    large = Dataset.from_list([{"messages": CHAT}], features=Features({"messages": List(message)}))
    large.to_parquet(str(tmp_path / "large.parquet"))
    turned = [{"content": message["content"], "role": message["role"]} for message in CHAT]
    sources = (
        write_rows([{"messages": CHAT}], "a.jsonl"),
        write_rows([{"messages": turned}], "b.jsonl"),
        write_rows([{"conversations": SHAREGPT}], "c.jsonl"),
        DatasetSection(path=str(tmp_path / "large.parquet")),
    )
    assert list(build("sft", *sources, streaming=streaming).train) == [{"messages": CHAT}] * 4


@STREAMED
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "'messages' is List.* in the one and missing in the other"),
        ({"messages": CHAT, "tools": "[]"}, "'tools' is missing in the one and Value.*string"),
        (
            {"messages": [one | {"weight": 1} for one in CHAT]},
            "'messages' is List.* in the one and List.*weight",
        ),
    ],
)
def test_datasets_with_unlike_columns_are_refused(write_rows, build, other, message, streaming):
    sources = write_rows([{"messages": CHAT}], "a.jsonl"), write_rows([other], "b.jsonl")
    words = f"a\\.jsonl' and '.*b\\.jsonl' cannot be mixed: .*{message}"
    with pytest.raises(AssetError, match=words) as caught:
        build("sft", *sources, streaming=streaming)
    assert "`data.datasets.1.columns`" in caught.value.hint


def test_batch_padding_keeps_eos_label(byte_tokenizer):
    collate = build_collator(recipe(clm={"packing": False}), byte_tokenizer)
    batch = collate([{"input_ids": [5, 0, 1]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[5, 0, 1], [7, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, 1], [7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    packed = build_collator(recipe(), byte_tokenizer)([{"input_ids": [5, 6]}, {"input_ids": [7, 1]}])
    assert packed.keys() == {"input_ids", "labels"}, "all are of one length"


def test_only_masked_tokens_are_labels(bert_tokenizer):
    collate = build_collator(recipe("mlm"), bert_tokenizer)
    samples = [{"input_ids": bert_tokenizer(text)["input_ids"]} for text in ("a long text " * 20, "short")]
    torch.manual_seed(0)
    first, second = collate(samples), collate(samples)
    assert first.keys() == {"input_ids", "labels", "attention_mask"}
    hidden = first["labels"] != -100
    assert hidden.any() and not hidden[first["attention_mask"] == 0].any()
    assert not torch.equal(first["input_ids"], second["input_ids"])
    torch.manual_seed(0)
    alone = [collate([sample])["labels"][0] for sample in samples]
    assert torch.equal(pad_sequence(alone, True, -100), first["labels"]), "as in a batch of any size"
    short = [{"input_ids": bert_tokenizer("a")["input_ids"]}]
    assert all((collate(short)["labels"] != -100).any() for _ in range(30)), "its loss would be NaN"


@pytest.mark.parametrize(
    ("predicted", "labels", "accuracy", "f1"),
    [
        # Class 0: 2 hits, 1 predicted in vain; class 1: 1 hit, 1 missed; 2 and 3 never occur.
        ([0, 0, 1, 0], [0, 0, 1, 1], 0.75, (2 * 2 / (3 + 2) + 2 * 1 / (1 + 2)) / 2),
        # Class 2 is predicted and never right: it counts, with 0.
        ([0, 0, 2], [0, 0, 0], 2 / 3, (2 * 2 / (2 + 3) + 0) / 2),
    ],
    ids=["only classes that occur", "a class predicted in vain"],
)
def test_accuracy_and_macro_f1(predicted, labels, accuracy, f1):
    logits, expected = np.eye(4)[predicted], {"accuracy": pytest.approx(accuracy), "f1": pytest.approx(f1)}
    for outputs in (logits, (logits, np.zeros((2, 3, 8)))):  # a model may return more
        assert class_metrics(EvalPrediction(outputs, np.array(labels))) == expected
