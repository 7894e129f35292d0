"""What a preview says of data, and which data is refused before it is trained on.

How the usual samples of each task look is compared with a picture in `tests/unit/cli`.
"""

import json
import logging

import datasets
import pytest
from datasets import Dataset
from transformers import ByT5Tokenizer

from tests.kit.stand_ins import CHATML, CHATML_MARKED, bert_tokenizer, chat_tokenizer, write_bert, write_llama
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.train import preview as preview_module
from trahiv_cli.train.preparing import heeding, preparing, require_trained_tokens
from trahiv_cli.train.preview import Bin, Piece, Preview, build_preview, pieces_of, require_trainable

MODELS = {
    "plain": write_llama,
    "marked": lambda folder: write_llama(folder, chat_template=CHATML_MARKED),
    "bert": write_bert,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write one of `MODELS` where it is not there yet."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: root / name if (root / name).exists() else MODELS[name](root / name)


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
def look(model, warned, tmp_path, monkeypatch):
    """Preview rows: `look("sft", rows, max_length=64)`; the order is that of the rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def preview(task, rows, *, model_name="plain", num_shown=3, data=None, **section):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = recipe_of(task, model(model_name), file, section, **(data or {}))
        return build_preview(recipe, num_shown, lambda message, hint: warned.append((message, hint)))

    return preview


def chat(*turns):
    """A conversation that the user begins."""
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}


def texts(sample, *, trained=True):
    """What is trained in each part of a sample, or what is not."""
    return [
        "".join(piece.text for piece in part.pieces if piece.is_trained is trained) for part in sample.parts
    ]


def names(sample):
    return [part.name for part in sample.parts]


# -- from tokens to text ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [chat_tokenizer(), ByT5Tokenizer()])
@pytest.mark.parametrize("untrained", range(1, 12))
def test_characters_stay_whole_wherever_training_begins(tokenizer, untrained):
    text = "so é 🙂 z"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = pieces_of(tokenizer, [(token, place >= untrained) for place, token in enumerate(ids)])
    assert "".join(piece.text for piece in pieces) == text and "\ufffd" not in pieces[0].text
    if untrained in (3, 4):  # a byte of two belongs to the later piece
        assert [piece.text for piece in pieces] == ["so ", "é 🙂 z"]


def test_special_tokens_are_shown_and_told_apart():
    tokenizer = bert_tokenizer()
    trained = zip(tokenizer("ab")["input_ids"], [False, False, True, False], strict=True)
    assert pieces_of(tokenizer, list(trained)) == (
        Piece("[CLS]", False, is_special=True),
        Piece("a", False),
        Piece("b", True),
        Piece("[SEP]", False, is_special=True),
    )


# -- each task ----------------------------------------------------------------------------------------


def test_of_a_text_all_but_its_first_token_is_trained_and_figures_need_no_sample(look):
    (sample,) = look("sft", [{"text": "abc"}]).samples
    assert (texts(sample, trained=False), texts(sample)) == (["a"], ["bc<|im_end|>"])
    preview = look("sft", [{"text": "abc"}], num_shown=0)
    assert (preview.samples, preview.num_rows) == ((), 1)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_samples_that_go_on_in_the_next_row_are_not_cut(look, strategy):
    preview = look("sft", [{"text": "x" * 30}] * 2, max_length=16, packing=True, packing_strategy=strategy)
    assert (preview.num_cut, preview.num_untrained, preview.num_tokens) == (None, None, 62)
    assert preview.histogram()[-1] == Bin(29, 31, 2)


CUT = [
    {"prompt": "ab", "completion": "cd"},
    {"prompt": "ab", "completion": "cdefghij"},
    {"prompt": "abcdefgh", "completion": "ij"},
]


def test_what_is_cut_is_counted_and_what_then_trains_nothing_is_left_out(look, warned):
    preview = look("sft", CUT, max_length=6)
    assert preview.lengths == (5, 11, 11)
    assert (preview.num_cut, preview.num_untrained, preview.num_rows) == (2, 1, 2)
    assert [texts(sample) for sample in preview.samples] == [["cd<|im_end|>"], ["cdef"]]
    assert [sample.num_cut for sample in preview.samples] == [0, 5]
    assert preview.histogram()[-1] == Bin(7, None, 2)
    packed = look("sft", CUT, max_length=6, packing=True)
    assert (packed.num_cut, packed.num_untrained, packed.num_rows) == (2, 1, 3)
    assert not warned
    nothing = look("sft", CUT[2:] * 3, max_length=6, num_shown=2)
    assert (nothing.num_rows, nothing.num_untrained) == (0, 3)
    shown = [(texts(sample, trained=False), sample.is_left_out) for sample in nothing.samples]
    assert shown == [(["abcdef"], True)] * 2
    ((message, hint),) = warned
    assert message.startswith("None of the 3 samples trains a token")
    assert "`sft.max_length` (it is 6)" in hint


def test_a_preference_is_cut_where_the_model_sees_it_cut(look):
    rows = [
        {"prompt": "abcd", "chosen": "efgh", "rejected": "i"},
        {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"},
    ]
    preview = look("dpo", rows, max_length=6)
    (sample,) = preview.samples
    assert names(sample) == ["prompt", "chosen", "rejected"]
    assert (texts(sample), sample.num_cut) == (["", "ef", "i<|im_end|>"], 3)
    assert (preview.num_cut, preview.num_untrained) == (2, 1)


def test_a_document_for_each_sample_is_cut(look):
    preview = look("clm", [{"text": "abc"}, {"text": "efghijk"}], max_length=4, packing=False)
    assert [texts(sample) for sample in preview.samples] == [["bc<|im_end|>"], ["fgh"]]
    assert (preview.num_cut, preview.lengths) == (1, (4, 8))


def test_hidden_words_are_shown_hidden_and_as_they_were_the_same_each_time(look):
    rows = [{"text": "abcdefghij" * 4}] * 20
    preview = look("mlm", rows, model_name="bert", max_length=32)
    for sample in preview.samples:
        assert names(sample) == ["the model sees", "and is to guess"]
        hidden, guessed = texts(sample)
        assert "[MASK]" in hidden and len(guessed) == sample.num_trained
        assert texts(sample, trained=False)[0] == texts(sample, trained=False)[1]
    assert (preview.lengths, preview.num_cut) == ((42,) * 20, 20)
    assert 0.08 < preview.trained_share < 0.22
    assert look("mlm", rows, model_name="bert", max_length=32) == preview


def test_a_text_is_shown_with_its_class_and_classes_are_counted(look, warned):
    rows = [{"text": "good", "label": "up"}, {"text": "bad", "label": 0}, {"text": "worse", "label": 0}]
    preview = look("seq-cls", rows, model_name="bert", labels=["down", "up", "none"], num_shown=1)
    (sample,) = preview.samples
    shown = ["".join(piece.text for piece in part.pieces) for part in sample.parts]
    assert shown == ["[CLS]good[SEP]", "up"] and not warned
    assert preview.classes == {"down": 2, "up": 1, "none": 0}


# -- how much is looked at ----------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "section"), [("sft", {}), ("clm", {"packing": False})])
def test_only_the_first_samples_are_looked_at(look, monkeypatch, task, section):
    monkeypatch.setattr(preview_module, "LOOKED_AT", 3)
    preview = look(task, [{"text": f"{number} is a text"} for number in range(5)], num_shown=9, **section)
    assert (preview.num_samples, preview.num_looked_at, len(preview.samples)) == (5, 3, 3)
    assert len(preview.lengths) == 3


@pytest.mark.parametrize("task", ["dpo", "clm"])
def test_a_stream_has_no_known_number_of_samples(look, task):
    row = {"text": "abc"} if task == "clm" else {"prompt": "a", "chosen": "b", "rejected": "c"}
    section = {"max_length": 4} if task == "clm" else {}
    preview = look(task, [row] * 4, data={"streaming": True}, **section)
    assert (preview.num_samples, preview.num_looked_at, len(preview.lengths)) == (None, 4, 4)


@pytest.mark.parametrize(
    ("lengths", "max_length", "num_cut", "expected"),
    [
        ((), 8, 0, []),
        ((3, 5), 8, 0, [(3, 3, 1), (4, 4, 0), (5, 5, 1)]),
        ((3, 5, 9, 20), 5, 2, [(3, 3, 1), (4, 4, 0), (5, 5, 1), (6, None, 2)]),
        ((1, 100), 1024, 0, [(1, 16, 1), *((n + 1, n + 16, 0) for n in (16, 32, 48, 64, 80)), (97, 100, 1)]),
        ((9, 9), 8, 2, [(9, None, 2)]),
        ((9, 9), 8, None, [(9, 9, 2)]),
    ],
)
def test_lengths_are_counted_in_bins(lengths, max_length, num_cut, expected):
    known = dict.fromkeys(("num_samples", "num_looked_at", "num_untrained", "num_rows", "num_tokens"), 9)
    words = {"name": "test", "task": "sft", "setting": "sft.max_length", "length_of": "sample"}
    more = {"samples": (), "num_trained": 0, "is_packed": False, "num_cut": num_cut}
    preview = Preview(**known, **words, **more, max_length=max_length, lengths=lengths)
    assert preview.histogram() == [Bin(*each) for each in expected]


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
        (NULL, ADDS, {}, "chat template can't write a conversation", "data.chat_template"),
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

NOTHING, SOMETHING = ({"input_ids": [1, 2], "labels": [-100, label]} for label in (-100, 2))


@pytest.mark.parametrize(
    ("task", "samples", "why"),
    [
        ("clm", [{"input_ids": [1, 2]}], ""),
        ("seq-cls", [{"input_ids": [1, 2], "labels": 0}], ""),
        ("sft", [NOTHING] * 99 + [SOMETHING], ""),
        ("sft", [{"input_ids": [1, 2, 3, 4], "labels": [1, -100, 3, 4], "seq_lengths": [2, 2]}], ""),
        ("dpo", [{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}], ""),
        ("sft", [NOTHING] * 100 + [SOMETHING], "none of the first 100 samples trains a token"),
        ("sft", [{"input_ids": [1, 2], "labels": [1, -100]}], "trains a token"),  # the first: nobody's next
        ("sft", [{"input_ids": [1, 2, 3], "labels": [1, -100, 3], "seq_lengths": [2, 1]}], "trains a token"),
        ("dpo", [{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": []}], "trains a token"),
        ("sft", [], "No sample is left to train on: at 64 tokens, each was cut off"),
    ],
)
def test_data_that_trains_nothing_is_refused(task, samples, why):
    labels = {"labels": ["a", "b"]} if task == "seq-cls" else {}
    recipe, said = recipe_of(task, section={"max_length": 64, **labels}), ""
    try:
        require_trained_tokens(recipe, samples)
    except AssetError as error:
        said = error.message
        assert f"`{task}.max_length` (it is 64)" in error.hint and "`trahiv preview RECIPE`" in error.hint
    assert why in said and bool(why) == bool(said)


@pytest.mark.parametrize(
    ("task", "row", "packing"),
    [
        ("sft", CUT[2], {}),
        ("sft", CUT[2], {"packing": True}),
        ("dpo", {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"}, {}),
    ],
    ids=["cut", "cut and packed", "preferences"],
)
def test_data_that_trains_nothing_once_it_is_cut_is_refused_before_anybody_is_invited(
    model, task, row, packing
):
    recipe = recipe_of(task, model("plain"), section={"max_length": 6, **packing})
    splits = Splits(Dataset.from_list([row] * 8), None)
    with pytest.raises(AssetError, match=r"No sample is left|There is nothing to learn"):
        require_trainable(recipe, build_tokenizer(recipe), splits)
