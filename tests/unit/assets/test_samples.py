"""Samples of masked models and classifiers, rows for TRL's trainers, batches; `clm` is in `test_data.py`.

Messages about columns that do not fit are in `tests/unit/cli/test_broken_recipes.py`.
"""

import re
from functools import partial

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import EvalPrediction

from tests.kit.stand_ins import CHATML, chat_tokenizer
from tests.unit.assets.conftest import LABELS, recipe, splits_of
from tests.unit.conftest import refused
from trahiv_cli.assets.collators import build_collator, class_metrics
from trahiv_cli.recipe.schema import DatasetSection


@pytest.fixture
def read(write_rows, bert_tokenizer):
    """Return the samples of rows, or of several datasets."""

    def read(task, rows, template=CHATML, **options):
        datasets = rows if isinstance(rows[0], DatasetSection) else [write_rows(rows)]
        tokenizer = bert_tokenizer if task in ("mlm", "seq-cls") else chat_tokenizer(template)
        return list(splits_of(task, datasets, tokenizer, **options).train)

    return read


@pytest.fixture
def read_both(read, streaming):
    """Return the samples of `read`; a test that uses it runs a second time with a stream."""
    return partial(read, streaming=streaming)


def test_maskable_document_is_one_sample(read_both, bert_tokenizer):
    rows = [{"text": text} for text in ("ab", "abcdefgh", "", None, "[SEP][MASK]")]
    expected = [{"input_ids": bert_tokenizer(text)["input_ids"]} for text in ("ab", "abcd")]
    assert read_both("mlm", rows, section={"max_length": 6}) == expected


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_rows_without_text_are_refused(read_both, task):
    with refused(r"No row of .*rows\.jsonl' has a text"):
        read_both(task, [{"text": ""}])


@pytest.mark.parametrize("classes", [LABELS, [0.0, 1.0, 2.0]])
def test_class_is_number_or_name(read_both, bert_tokenizer, classes):
    rows = [{"text": text, "label": label, "id": 7} for label in classes for text in ("a", "")]
    ids = bert_tokenizer("a")["input_ids"]
    assert read_both("seq-cls", rows) == [{"input_ids": ids, "labels": number} for number in range(3)]


@pytest.mark.parametrize(
    ("labels", "options"), [([0, 3], {"streaming": True}), (["bad", "god"], {"num_proc": 2})]
)
def test_unknown_label_names_its_row(read, labels, options):
    rows = [{"text": "a", "label": label} for label in labels]
    words = f"Row 2 of .* has the label {labels[1]!r}, and .* names 3 classes: bad, fair, good"
    with refused(words, "its number from 0"):
        read("seq-cls", rows, **options)


@pytest.fixture
def labels_of(tmp_path, read_both):
    """Return the labels of a dataset that has each of its classes once, and names them."""

    def labels_of(*names):
        rows = [{"text": "a", "label": number} for number in range(len(names))]
        features = Features({"text": Value("string"), "label": ClassLabel(names=list(names))})
        file = str(tmp_path / "rows.parquet")
        Dataset.from_list(rows, features=features).to_parquet(file)
        return [sample["labels"] for sample in read_both("seq-cls", [DatasetSection(path=file)])]

    return labels_of


def test_named_classes_are_matched_by_name(labels_of):
    assert labels_of("good", "bad", "fair") == [2, 0, 1]


def test_unlike_class_names_are_numbers(labels_of):
    assert labels_of("x", "y", "z") == [0, 1, 2]


def test_class_missing_from_recipe_is_refused(labels_of):
    with refused("classes that `seq_cls.labels` does not name: ugly"):
        labels_of("good", "bad", "ugly")


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Four."}]
WORSE = [CHAT[0], CHAT[1] | {"content": "5"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "Four."}]
THINKING = {"messages": CHAT, "chat_template_kwargs": {"thinking": True}}
PREFERRED = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": WORSE[1:]}


def talks(*conversations):
    return [{"messages": messages} for messages in conversations]


@pytest.mark.parametrize(
    ("task", "expected", "unread"),
    [
        ("sft", {"messages": CHAT, "tools": None}, {"prompt": "x"}),
        ("sft", {"prompt": "a", "completion": "b"}, {"text": "ab"}),
        ("sft", {"text": "a"}, {"id": 1}),
        ("sft", THINKING, {"id": 1}),
        ("dpo", PREFERRED, {"id": 1}),
        ("dpo", {"chosen": CHAT, "rejected": WORSE}, {"messages": CHAT}),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, {"id": 1}),
        ("kto", {"chosen": "a", "rejected": "b"}, {"id": 1}),
        ("reward", PREFERRED, {"id": 1}),
    ],
)
def test_rows_keep_only_trl_columns(read_both, task, expected, unread):
    assert read_both(task, [expected | unread]) == [expected]


def test_long_prompts_are_left_out(read, caplog):
    rows = [{"prompt": "a" * number, "answer": number} for number in (3, 30)]
    section = {"rewards": "number", "max_completion_length": 16, "max_length": 32}
    assert read("grpo", [rows[0] | {"id": 1}, rows[1] | {"id": 2}], section=section) == rows[:1]
    assert "1 of 2 prompts have more than 16 tokens" in caplog.text
    with refused("No prompt has at most 16 tokens", "Raise"):
        read("grpo", rows[1:], section=section)


def test_chatml_conversations_become_messages(read_both):
    row = {"conversations": CHAT, "tools": "[]"}
    assert read_both("sft", [row]) == [{"messages": CHAT, "tools": "[]"}]


def test_plain_text_needs_no_chat_template(read):
    row = {"body": "a"}
    assert read("sft", [row], None, section={"dataset_text_field": "body"}) == [row]


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def of_parts(written):
    """Make a chat template that also takes a list as a message's content, and writes its parts like this."""
    return (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        f"{{% for part in m.content %}}{{{{ {written} }}}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
    )


def in_parts(*texts):
    return [CHAT[0] | {"content": [{"type": "text", "text": text} for text in texts]}, CHAT[1]]


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (talks(CHAT), None, "the tokenizer has no chat template(.|\n)*`data.chat_template: FILE.jinja`"),
        (
            [THINKING, THINKING | {"chat_template_kwargs": None}],
            CHATML,
            "Row 2 of .* has no 'chat_template_kwargs'.*\n.* Fix or remove that row.$",
        ),
        (
            talks(*[CHAT] * 1200, [{"role": "system", "content": "Be brief."}, *CHAT]),
            REFUSES_SYSTEM,
            "Row 1,201 of .* by the chat template .*: no system role",
        ),
        (
            talks(CHAT * 2, CHAT),
            "{{ 1 // (messages | length - 2) }}",
            "Row 2 of .* by the chat template .*: .*by zero",
        ),
        *(
            (
                talks(CHAT, in_parts("2 + two?")),
                template,
                "Row 2 of .* has a list as a message's 'content' in 'messages', not",
            )
            for template in (
                CHATML,
                of_parts("part"),
                of_parts("part | tojson"),
                of_parts("part.text ~ part"),
                of_parts("part.text | upper"),
            )
        ),
    ],
)
def test_row_unfit_for_template_is_refused(read_both, rows, template, message):
    with refused(message):
        read_both("sft", rows, template)


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        (in_parts(" 2 + ", "2?"), of_parts("part.text | trim")),
        (
            [CHAT[0] | {"content": 'Say "é"\n'}, CHAT[1]],
            "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        ),
        ([CHAT[0] | {"role": "alice"}, CHAT[1]], {"default": CHATML, "tool_use": "{{ 'alice' }}"}),
    ],
    ids=["parts", "quoted", "role of another template"],
)
def test_row_fit_for_template_is_kept(read_both, caplog, messages, template):
    assert read_both("sft", talks(messages), template) == talks(messages)
    assert not caplog.text


def test_message_dropped_by_template_warns(read_both, caplog, streaming):
    rows = talks(CHAT, CHAT, CHAT)
    assert read_both("sft", rows, "{{ messages[-1].content }}") == rows
    assert re.search("Row 1 of .* has a message of the user in 'messages' that", caplog.text)
    assert streaming or "(3 rows: 1, 2, 3)" in caplog.text


def test_all_broken_rows_are_reported_together(read):
    silent = [CHAT[0], CHAT[1] | {"content": None}]
    unknown = [CHAT[0] | {"role": "human"}, CHAT[1]]
    with refused(r"^Row 2 of .* \(2 rows: 2, 5\)\.\nRow 3 of .*'human'.*\nRow 4 of .* in 'messages'\.\n"):
        read("sft", talks(CHAT, silent, unknown, CHAT[:1], silent))


def test_skipped_rows_are_counted(read, caplog):
    read("seq-cls", [{"text": text, "label": 0} for text in ("a", "", None, "b")])
    assert "2 of 4 rows of" in caplog.text


def test_conversation_forms_are_equivalent(write_rows, read_both, tmp_path):
    message = {"role": Value("large_string"), "content": Value("large_string")}
    large = str(tmp_path / "large.parquet")
    Dataset.from_list(talks(CHAT), features=Features({"messages": List(message)})).to_parquet(large)
    sources = [
        write_rows(talks(CHAT), "a.jsonl"),
        write_rows(talks([dict(reversed(one.items())) for one in CHAT]), "b.jsonl"),
        write_rows([{"conversations": SHAREGPT, "id": 1}], "c.jsonl"),
        DatasetSection(path=large),
    ]
    assert read_both("sft", sources) == talks(CHAT) * 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "'messages' is List.* in the one and missing in the other"),
        ({"messages": CHAT, "tools": "[]"}, "'tools' is missing in the one and Value.*string"),
        ({"messages": [CHAT[1] | {"weight": 1}]}, "'messages' is List.* in the one and List.*weight"),
    ],
)
def test_datasets_with_unlike_columns_are_refused(write_rows, read_both, other, message):
    sources = [write_rows(talks(CHAT), "a.jsonl"), write_rows([other], "b.jsonl")]
    words = rf"a\.jsonl' and '.*b\.jsonl' cannot be mixed: .*{message}"
    with refused(words, "`data.datasets.1.columns`"):
        read_both("sft", sources)


def test_batch_padding_keeps_eos_label(byte_tokenizer):
    collate = build_collator(recipe(clm={"packing": False}), byte_tokenizer)
    batch = collate([{"input_ids": [5, 0]}, {"input_ids": [7]}])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 0], [7, 0]],
        "labels": [[5, 0], [7, -100]],
        "attention_mask": [[1, 1], [1, 0]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_packed_batch_needs_no_mask(byte_tokenizer):
    batch = build_collator(recipe(), byte_tokenizer)([{"input_ids": [5, 6]}])
    assert batch.keys() == {"input_ids", "labels"}


LONG = "a long text " * 20


@pytest.fixture
def mask(bert_tokenizer):
    """Make a batch of texts for `mlm`."""
    collate = build_collator(recipe("mlm"), bert_tokenizer)
    return lambda *texts: collate([{"input_ids": bert_tokenizer(text)["input_ids"]} for text in texts])


def test_padding_is_never_masked(mask):
    batch = mask(LONG, "short")
    hidden = batch["labels"] != -100
    assert hidden.any()
    assert not hidden[batch["attention_mask"] == 0].any()


def test_masked_tokens_are_drawn_anew(mask):
    assert not torch.equal(mask(LONG)["input_ids"], mask(LONG)["input_ids"])


def test_masked_tokens_ignore_batch(mask):
    torch.manual_seed(0)
    together = mask(LONG, LONG)["labels"]
    torch.manual_seed(0)
    alone = [mask(LONG)["labels"] for _ in together]
    assert torch.equal(torch.cat(alone), together)


def test_short_batch_always_has_label(mask):
    assert all((mask("a")["labels"] != -100).any() for _ in range(30))


@pytest.mark.parametrize(
    ("predicted", "labels", "accuracy", "f1"),
    [
        # Class 0: 2 hits, 1 predicted in vain; class 1: 1 hit, 1 missed; 2 and 3 never occur.
        ([0, 0, 1, 0], [0, 0, 1, 1], 0.75, (4 / 5 + 2 / 3) / 2),
        # Class 2 is predicted and never right: it counts, with 0.
        ([0, 0, 2], [0, 0, 0], 2 / 3, 0.4),
    ],
)
def test_accuracy_and_macro_f1(predicted, labels, accuracy, f1):
    logits = np.eye(4)[predicted]
    for outputs in (logits, (logits, logits)):  # a model may return more
        metrics = class_metrics(EvalPrediction(outputs, np.array(labels)))
        assert metrics == pytest.approx({"accuracy": accuracy, "f1": f1})
