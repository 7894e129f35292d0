"""What a preview says of data, and which data is refused before it is trained on.

How the usual samples of each task look is compared with a picture in `tests/unit/cli`.
"""

import contextlib
import json
import logging

import datasets
import pytest
from datasets import Dataset
from transformers import ByT5Tokenizer

from tests.kit.stand_ins import CHATML, CHATML_MARKED, chat_tokenizer, write_bert, write_llama
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.train import preview as preview_module
from trahiv_cli.train.preview import build_preview, pieces_of, require_trainable
from trahiv_cli.train.tasks import heeding, preparing


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models, by the tasks that they are for."""
    folder = tmp_path_factory.mktemp("models")
    llama, bert = write_llama(folder / "llama", chat_template=CHATML_MARKED), write_bert(folder / "bert")
    return {"sft": llama, "dpo": llama, "clm": llama, "mlm": bert, "seq-cls": bert}


def recipe_of(task, model="nobody/nothing", path="nobody/nothing", section=None, **data):
    return Recipe.model_validate(
        {
            "name": "test",
            "task": task,
            "model": {"model_name_or_path": str(model)},
            "data": {"datasets": [{"path": str(path)}], "shuffle": False, **data},
            task.replace("-", "_"): section or {},
            "training": {"max_steps": 1},
            "hivemind_config": {"opt": {"run_id": "test"}},
        }
    )


@pytest.fixture
def warned():
    return []


@pytest.fixture
def look(models, warned, tmp_path, monkeypatch):
    """Preview rows: `look("sft", rows, max_length=64)`; the order is that of the rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def preview(task, rows, *, num_shown=3, data=None, **section):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = recipe_of(task, models[task], file, section, **(data or {}))
        return build_preview(recipe, num_shown, lambda message, hint: warned.append((message, hint)))

    return preview


def chat(*turns):
    """A conversation that the user begins."""
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}


def trained_in(sample):
    """What is trained in each part of a sample."""
    return ["".join(piece.text for piece in part.pieces if piece.trained) for part in sample.parts]


# -- what is shown and counted ------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [chat_tokenizer(), ByT5Tokenizer()])
def test_characters_stay_whole_wherever_training_begins(tokenizer):
    text = "so é 🙂 z"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for untrained in range(1, 12):
        pieces = pieces_of(tokenizer, [(token, place >= untrained) for place, token in enumerate(ids)])
        assert "".join(piece.text for piece in pieces) == text and "\ufffd" not in pieces[0].text
        if untrained in (3, 4):  # a byte of two belongs to the later piece
            assert [piece.text for piece in pieces] == ["so ", "é 🙂 z"]


CUT = [
    {"prompt": "ab", "completion": "cd"},
    {"prompt": "ab", "completion": "cdefghij"},
    {"prompt": "abcdefgh", "completion": "ij"},
]
PAIRS = [
    {"prompt": "abcd", "chosen": "efgh", "rejected": "i"},
    {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"},
]
LONG, DOCUMENTS = [{"text": "x" * 30}] * 2, [{"text": "abc"}, {"text": "efghijk"}]
SIX, PACKED = {"max_length": 6}, {"packing": True, "max_length": 6}
FOUR = {"packing": False, "max_length": 4}


@pytest.mark.parametrize(
    ("task", "rows", "section", "shown", "num_rows", "num_full"),
    [  # shown: what is trained in each part
        ("sft", [{"text": "abc"}], {}, [["bc<|im_end|>"]], 1, 0),
        ("sft", CUT, SIX, [["cd<|im_end|>"], ["cdef"]], 2, 1),
        ("sft", CUT, PACKED, [["cdef"], [""], ["cd<|im_end|>"]], 3, 2),
        ("sft", LONG, PACKED | {"packing_strategy": "wrapped"}, None, 11, 0),
        ("dpo", PAIRS, SIX, [["", "ef", "i<|im_end|>"]], 1, 1),
        ("clm", DOCUMENTS, FOUR, [["bc<|im_end|>"], ["fgh"]], 2, 2),
    ],
    ids=["a text", "cut", "packed", "joined", "preferences", "documents"],
)
def test_what_is_trained_is_shown_and_what_is_cut_or_left_out_is_counted(
    look, warned, task, rows, section, shown, num_rows, num_full
):
    preview = look(task, rows, **section)
    assert (preview.looked_at, preview.rows, preview.full_samples) == (len(rows), num_rows, num_full)
    assert shown is None or [trained_in(sample) for sample in preview.samples] == shown
    assert not warned and bool(preview.lengths) == (rows is not LONG)


def test_hidden_words_are_the_same_each_time_and_classes_are_counted(look):
    words, names = [{"text": "abcdefghij" * 4}] * 20, ["down", "up", "none"]
    hidden = look("mlm", words, max_length=32)
    assert look("mlm", words, max_length=32) == hidden and hidden.full_samples == 20
    assert 0.08 < hidden.trained_tokens / hidden.tokens < 0.22
    rated = [{"text": "good", "label": "up"}, {"text": "bad", "label": 0}]
    assert look("seq-cls", rated, labels=names).classes == {"down": 1, "up": 1, "none": 0}


@pytest.mark.parametrize(
    ("task", "section"), [("sft", {}), ("dpo", {"max_length": 4}), ("clm", {"packing": False})]
)
@pytest.mark.parametrize("streaming", [True, False])
def test_only_the_first_samples_are_looked_at_and_a_stream_has_no_known_number(
    look, monkeypatch, task, section, streaming
):
    monkeypatch.setattr(preview_module, "LOOKED_AT", 3)
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} if task == "dpo" else {"text": "is a text"}
    preview = look(task, [row] * 5, num_shown=9, data={"streaming": streaming}, **section)
    assert preview.num_samples == (None if streaming else 5)
    assert preview.looked_at == preview.rows == len(preview.samples) == 3


# -- what TRL says ------------------------------------------------------------------------------------

FAILS = CHATML.replace("{{ message['role'] }}", "{{ raise_exception('roles must alternate') }}")
ADDS = CHATML.replace("{{ message['content'] }}", "{{ '> ' + message['content'] }}")
NULL = {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "Yes"}]}
ONLY = {"assistant_only_loss": True}


@pytest.mark.parametrize(
    ("row", "template", "section", "message", "hint"),
    [
        (chat("Hi", "Yes"), CHATML, ONLY, "{% generation %}", "`sft.assistant_only_loss`"),
        (chat("Hi"), CHATML_MARKED, ONLY, "no assistant tokens", "`sft.assistant_only_loss`"),
        (chat("Hi", "Yes"), FAILS, {}, "roles must alternate", "data.chat_template"),
        (NULL, ADDS, {}, "could not be prepared: ", "data.chat_template"),
    ],
    ids=["unmarked", "no answer", "refused by the template", "broken in the template"],
)
def test_what_trl_refuses_is_said(look, row, template, section, message, hint):
    with pytest.raises(AssetError) as refused:
        look("sft", [row], data={"chat_template": template}, **section)
    assert message in refused.value.message and hint in refused.value.hint


def test_what_trl_warns_of_is_passed_on_once_and_a_mistake_of_ours_is_not_taken_for_the_data_s(warned):
    with heeding(lambda *said: warned.append(said)):
        for text in ("[RANK 0] it may not learn to stop", "[RANK 0] it may not learn to stop", "another"):
            logging.getLogger("trl.trainer").warning(text)
    logging.getLogger("trl.trainer").warning("afterwards")
    assert [message for message, _ in warned] == ["it may not learn to stop", "another"]
    assert all("trahiv preview" in hint for _, hint in warned)
    with pytest.raises(TypeError), preparing():
        raise TypeError("of ours")


# -- what is refused before training ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "row", "section", "is_refused"),
    [
        ("clm", {"input_ids": [1, 2]}, {}, False),
        ("seq-cls", {"input_ids": [1, 2], "labels": 0}, {"labels": ["a", "b"]}, False),
        ("sft", CUT[1], SIX, False),
        ("sft", CUT[2], SIX, True),
        ("sft", CUT[2], PACKED, True),
        ("dpo", PAIRS[0], SIX, False),
        ("dpo", PAIRS[1], SIX, True),
    ],
)
def test_data_that_trains_nothing_once_it_is_cut_is_refused(models, task, row, section, is_refused):
    recipe = recipe_of(task, models[task], section=section)
    tokenizer, splits = build_tokenizer(recipe), Splits(Dataset.from_list([row] * 8), None)
    with contextlib.ExitStack() as stack:
        if is_refused:
            refused = stack.enter_context(pytest.raises(AssetError, match="none of the first 8 samples"))
        require_trainable(recipe, tokenizer, splits)
    assert not is_refused or f"`{task}.max_length` (it is " in refused.value.hint
