"""Rows for TRL's trainers: which columns are kept, and what is refused before TRL sees it.

The words about columns that do not fit are in `tests/unit/cli/test_broken_recipes.py`.
"""

import pytest
from datasets import Dataset, Features, List, Value

from tests.kit.stand_ins import chat_tokenizer
from tests.unit.assets.conftest import STREAMED, splits_of
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
WORSE = [CHAT[0], {"role": "assistant", "content": "5"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
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
def test_rows_keep_what_trl_reads(write_rows, build, task, row, expected, streaming):
    assert list(build(task, write_rows([row] * 3), streaming=streaming).train) == [expected] * 3


def test_columns_may_have_other_names_and_texts_need_no_chat_template(write_rows, build):
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
def test_a_row_that_trl_could_not_read_is_named(write_rows, build, task, row, broken, message, streaming):
    source = write_rows([row, row, row | broken, row])
    with pytest.raises(AssetError, match=message) as caught:
        list(build(task, source, streaming=streaming).train)
    assert caught.value.hint == "Fix or remove that row."


# -- mixtures -------------------------------------------------------------------------------------


@STREAMED
def test_the_form_of_a_conversation_and_the_kind_of_its_strings_do_not_matter(
    write_rows, build, streaming, tmp_path
):
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
        ({"prompt": "a", "completion": "b"}, "only '.*a.jsonl' has the column 'messages'"),
        ({"messages": CHAT, "tools": "[]"}, "only '.*b.jsonl' has the column 'tools'"),
        ({"messages": [CHAT[0] | {"weight": 1}]}, "'messages' is List.* in one and List.*weight"),
    ],
)
def test_datasets_with_other_columns_are_not_mixed(write_rows, build, other, message, streaming):
    sources = write_rows([{"messages": CHAT}], "a.jsonl"), write_rows([other], "b.jsonl")
    words = f"a\\.jsonl' and '.*b\\.jsonl' cannot be mixed: .*{message}"
    with pytest.raises(AssetError, match=words) as caught:
        build("sft", *sources, streaming=streaming)
    assert "`data.datasets.1.columns`" in caught.value.hint
