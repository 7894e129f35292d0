"""Rows for TRL's trainers: which columns are kept, and what is refused before TRL sees it."""

import re

import pytest
from datasets import Dataset, Features, List, Value

from tests.kit.stand_ins import chat_tokenizer
from tests.unit.assets.conftest import STREAMED, splits_of
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection


def says(role, content, **more):
    return {"role": role, "content": content, **more}


CHAT = [says("user", "2 + 2?"), says("assistant", "4")]
WORSE = [says("user", "2 + 2?"), says("assistant", "5")]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
TURNS = {"prompt": CHAT[:1], "completion": CHAT[1:]}
THINKING = {"messages": CHAT, "chat_template_kwargs": {"thinking": True}}
PREFERRED = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": WORSE[1:]}


@pytest.fixture(scope="module")
def build():
    chatty = chat_tokenizer()

    def make(task, *sources, tokenizer=chatty, **options):
        return splits_of(task, sources, tokenizer, **options)

    return make


@STREAMED
@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("sft", {"messages": CHAT, "id": 1}, {"messages": CHAT}),
        ("sft", {"messages": CHAT, "tools": None, "prompt": "x"}, {"messages": CHAT, "tools": None}),
        ("sft", {"conversations": SHAREGPT, "id": 1}, {"messages": CHAT}),
        ("sft", {"conversations": CHAT, "tools": "[]"}, {"messages": CHAT, "tools": "[]"}),
        ("sft", {"prompt": "a", "completion": "b", "text": "ab"}, {"prompt": "a", "completion": "b"}),
        ("sft", {**TURNS, "id": 1}, TURNS),
        ("sft", {"text": "a", "id": 1}, {"text": "a"}),
        ("sft", {**THINKING, "id": 1}, THINKING),
        ("dpo", {"chosen": "a", "rejected": "b", "score": 1}, {"chosen": "a", "rejected": "b"}),
        ("dpo", {**PREFERRED, "id": 1}, PREFERRED),
        ("dpo", {"chosen": CHAT, "rejected": WORSE, "messages": CHAT}, {"chosen": CHAT, "rejected": WORSE}),
    ],
)
def test_rows_keep_what_trl_reads(write_rows, build, task, row, expected, streaming):
    assert list(build(task, write_rows([row] * 3), streaming=streaming).train) == [expected] * 3


@STREAMED
def test_renamed_columns_make_a_dataset_fit(write_rows, build, streaming):
    columns = {"instruction": "prompt", "output": "completion"}
    source = write_rows([{"instruction": "a", "output": "b", "input": ""}], columns=columns)
    assert list(build("sft", source, streaming=streaming).train) == [{"prompt": "a", "completion": "b"}]


def test_the_text_column_may_have_another_name_and_needs_no_chat_template(write_rows, build):
    section = {"dataset_text_field": "body"}
    splits = build("sft", write_rows([{"body": "a"}]), tokenizer=chat_tokenizer(None), section=section)
    assert list(splits.train) == [{"body": "a"}]


@pytest.mark.parametrize(
    ("task", "row", "message", "hint"),
    [
        ("sft", {"prompt": "a", "response": "b"}, "has no", "{response: completion}"),
        ("sft", {"body": "a"}, "has no", "or name a text column with `sft.dataset_text_field`"),
        ("sft", {"messages": []}, "'messages' of .* holds list", "data.datasets.0.columns"),
        (
            "dpo",
            {"prompt": "2 + 2?", "chosen": CHAT, "rejected": WORSE},
            "'prompt' holds text, 'chosen' holds conversations",
            "`data.datasets.0.columns: {prompt: prompt_text}` leaves it out",
        ),
        ("dpo", {"chosen": "a", "rejected": CHAT}, "do not fit together", "all of them messages"),
    ],
)
def test_columns_that_do_not_fit_say_what_to_do(write_rows, build, task, row, message, hint):
    with pytest.raises(AssetError, match=message) as caught:
        build(task, write_rows([row]))
    assert hint in caught.value.hint


@STREAMED
@pytest.mark.parametrize(
    ("task", "row", "broken", "message"),
    [
        ("sft", {"text": "a"}, {"text": None}, "Row 3 of .* has no 'text'"),
        ("sft", {"messages": CHAT}, {"messages": [says("", "a")]}, "something else in 'messages'"),
        ("sft", {"conversations": SHAREGPT}, {"conversations": []}, "than messages of from and value"),
        ("dpo", {"chosen": "a", "rejected": "b"}, {"rejected": None}, "Row 3 of .* has no 'rejected'"),
        ("sft", THINKING, {"chat_template_kwargs": None}, "Row 3 of .* has no 'chat_template_kwargs'"),
    ],
)
def test_a_row_that_trl_could_not_read_is_named(write_rows, build, task, row, broken, message, streaming):
    source = write_rows([row, row, row | broken, row])
    with pytest.raises(AssetError, match=message) as caught:
        list(build(task, source, streaming=streaming).train)
    assert caught.value.hint == "Fix or remove that row."


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("sft", {"messages": CHAT}),
        ("sft", {"conversations": SHAREGPT}),
        ("dpo", {"chosen": CHAT, "rejected": WORSE}),
    ],
)
def test_conversations_need_a_chat_template(write_rows, build, task, row):
    with pytest.raises(AssetError, match="the tokenizer has no chat template") as caught:
        build(task, write_rows([row]), tokenizer=chat_tokenizer(None))
    assert "`data.chat_template: FILE.jinja`" in caught.value.hint


def test_a_loss_of_what_texts_do_not_have_is_refused(write_rows, build):
    with pytest.raises(AssetError) as caught:
        build("sft", write_rows([{"text": "a"}]), section={"completion_only_loss": True})
    assert "`sft.completion_only_loss: auto`" in caught.value.hint


# -- mixtures -------------------------------------------------------------------------------------


@STREAMED
def test_the_order_of_a_message_and_the_form_of_a_conversation_do_not_matter(write_rows, build, streaming):
    turned = [{"content": message["content"], "role": message["role"]} for message in CHAT]
    sources = (
        write_rows([{"messages": CHAT}], "a.jsonl"),
        write_rows([{"messages": turned}], "b.jsonl"),
        write_rows([{"conversations": SHAREGPT}], "c.jsonl"),
    )
    assert list(build("sft", *sources, streaming=streaming).train) == [{"messages": CHAT}] * 3


def test_large_strings_mix_with_others(write_rows, build, tmp_path):
    message = {"role": Value("large_string"), "content": Value("large_string")}
    large = Dataset.from_list([{"messages": CHAT}], features=Features({"messages": List(message)}))
    large.to_parquet(str(tmp_path / "large.parquet"))
    sources = (DatasetSection(path=str(tmp_path / "large.parquet")), write_rows([{"messages": CHAT}]))
    assert list(build("sft", *sources).train) == [{"messages": CHAT}] * 2


@STREAMED
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "only '.*a.jsonl' has the column 'messages'"),
        ({"messages": CHAT, "tools": "[]"}, "only '.*b.jsonl' has the column 'tools'"),
        (
            {"messages": [says("user", "a", weight=1)]},
            "the column 'messages' is List.* in one and List.*weight",
        ),
    ],
)
def test_datasets_with_other_columns_are_not_mixed(write_rows, build, other, message, streaming):
    sources = write_rows([{"messages": CHAT}], "a.jsonl"), write_rows([other], "b.jsonl")
    with pytest.raises(AssetError, match=message) as caught:
        build("sft", *sources, streaming=streaming)
    assert re.search(r"a\.jsonl' and '.*b\.jsonl' cannot be mixed", caught.value.message)
    assert "`data.datasets.1.columns`" in caught.value.hint
