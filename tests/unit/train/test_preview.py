"""What a preview says of data, and which data is refused before it is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.kit.stand_ins import CHATML, CHATML_MARKED, bert_tokenizer, chat_tokenizer, write_bert, write_llama
from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.train import preview as preview_module
from trahiv_cli.train.pieces import Tokens, pieces_of
from trahiv_cli.train.preparing import preparing, require_trained_tokens
from trahiv_cli.train.preview import build_preview
from trahiv_cli.train.seen import Bin, Piece, Preview, Sample
from trahiv_cli.train.tasks import build_trainer

Look = Callable[..., Preview]
Warned = list[tuple[str, str]]

MODELS = {
    "plain": lambda folder: write_llama(folder),
    "marked": lambda folder: write_llama(folder, chat_template=CHATML_MARKED),
    "none": lambda folder: write_llama(folder, chat_template=None),
    "bert": lambda folder: write_bert(folder),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write one of `MODELS` where it is not there yet."""
    root = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        return root / name if (root / name).exists() else MODELS[name](root / name)

    return write


@pytest.fixture
def warned() -> Warned:
    return []


@pytest.fixture
def look(
    model: Callable[[str], Path], warned: Warned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Look:
    """Preview rows: `look("sft", rows, max_length=64)`; the order is that of the rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def preview(
        task: str,
        rows: Sequence[dict[str, Any]],
        *,
        model_name: str = "plain",
        num_shown: int = 3,
        data: dict[str, Any] | None = None,
        **section: Any,
    ) -> Preview:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {
            "name": "test",
            "task": task,
            "model": {"model_name_or_path": str(model(model_name))},
            "data": {"datasets": [{"path": str(file)}], "shuffle": False, **(data or {})},
            task.replace("-", "_"): section,
            "training": {"max_steps": 1},
        }
        recipe = Recipe.model_validate(fields)
        return build_preview(recipe, num_shown, lambda message, hint: warned.append((message, hint)))

    return preview


def chat(*turns: str) -> dict[str, Any]:
    """A conversation that the user begins."""
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}


def texts(sample: Sample, *, trained: bool = True) -> list[str]:
    """What is trained in each part of a sample, or what is not."""
    return [
        "".join(piece.text for piece in part.pieces if piece.is_trained is trained) for part in sample.parts
    ]


def names(sample: Sample) -> list[str]:
    return [part.name for part in sample.parts]


# -- from tokens to text ------------------------------------------------------------------------------


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space begins a word, and what is not in the vocabulary is spelt in bytes."""
    vocab = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocab += [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocab)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]  # type: ignore[list-item]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT's: its decoder puts the spaces in."""
    words = ["[UNK]", "[MASK]", "the", "un", "##happy", "cat", ","]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[MASK]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", mask_token="[MASK]")


TOKENIZERS = {
    "bytes": chat_tokenizer,
    "byt5": ByT5Tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}


@pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=list(TOKENIZERS))
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_characters_stay_whole_wherever_training_begins(
    tokenizer: PreTrainedTokenizerBase, every: int
) -> None:
    text = "ein é und 🙂 z"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    trained = [place // every % 2 == 1 for place in range(len(ids))]
    pieces = pieces_of(tokenizer, Tokens(ids, trained))
    assert "".join(piece.text for piece in pieces) == text
    assert {"é", "🙂"} <= set("".join(piece.text for piece in pieces))


@pytest.mark.parametrize(
    ("tokenizer", "text", "untrained", "expected"),
    [
        (chat_tokenizer(), "so é", 3, ["so ", "é"]),
        (chat_tokenizer(), "so é", 4, ["so ", "é"]),  # one of its two bytes: it belongs to the later one
        (chat_tokenizer(), "so no", 2, ["so", " no"]),
        (ByT5Tokenizer(), "so é", 4, ["so ", "é"]),
        (sentencepiece_tokenizer(), "so no", 3, ["so", " no"]),
        (sentencepiece_tokenizer(), "so é", 5, ["so ", "é"]),
        (wordpiece_tokenizer(), "the unhappy cat", 1, ["the ", "unhappy cat"]),
        (wordpiece_tokenizer(), "the unhappy cat", 2, ["the un", "happy cat"]),
    ],
)
def test_a_space_goes_with_its_token(
    tokenizer: PreTrainedTokenizerBase, text: str, untrained: int, expected: list[str]
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    trained = [place >= untrained for place in range(len(ids))]
    assert [piece.text for piece in pieces_of(tokenizer, Tokens(ids, trained))] == expected


def test_special_tokens_are_shown_and_told_apart() -> None:
    tokenizer = bert_tokenizer()
    ids = tokenizer("ab")["input_ids"]
    assert pieces_of(tokenizer, Tokens(ids, [False, False, True, False])) == (
        Piece("[CLS]", False, is_special=True),
        Piece("a", False),
        Piece("b", True),
        Piece("[SEP]", False, is_special=True),
    )


# -- sft ----------------------------------------------------------------------------------------------


def test_of_prompt_and_completion_the_completion_is_trained(look: Look) -> None:
    preview = look("sft", [{"prompt": "2 + 2 =", "completion": " 4"}])
    (sample,) = preview.samples
    assert texts(sample) == [" 4<|im_end|>"]
    assert texts(sample, trained=False) == ["2 + 2 ="]
    assert (sample.num_tokens, sample.num_trained) == (10, 3)
    assert (preview.num_tokens, preview.num_trained, preview.num_untrained) == (10, 3, 0)


def test_of_a_text_all_but_its_first_token_is_trained(look: Look) -> None:
    (sample,) = look("sft", [{"text": "abc"}]).samples
    assert (texts(sample, trained=False), texts(sample)) == (["a"], ["bc<|im_end|>"])


def test_of_a_conversation_what_the_template_marks_is_trained(look: Look) -> None:
    rows = [chat("Hi", "Hello é", "Bye", "🙂")]
    preview = look("sft", rows, model_name="marked", assistant_only_loss=True)
    (sample,) = preview.samples
    assert texts(sample) == ["Hello é<|im_end|>🙂<|im_end|>"]
    assert "<|im_start|>user\nHi<|im_end|>" in texts(sample, trained=False)[0]


def test_a_packed_row_shows_where_samples_begin(look: Look) -> None:
    rows = [{"prompt": "ab", "completion": "cde"}] * 5  # 6 tokens each
    preview = look("sft", rows, max_length=16, packing=True)
    first, second, third = preview.samples
    assert names(first) == ["sample 1", "sample 2"]
    assert texts(first) == ["cde<|im_end|>"] * 2
    assert (names(third), second.num_tokens, third.num_tokens) == ([""], 12, 6)
    assert (preview.num_samples, preview.num_rows, preview.num_tokens) == (5, 3, 30)
    assert preview.packing_efficiency == 30 / 48
    assert preview.lengths == (6,) * 5


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_samples_that_go_on_in_the_next_row_are_not_cut(look: Look, strategy: str) -> None:
    rows = [{"text": "x" * 30}] * 2
    preview = look("sft", rows, max_length=16, packing=True, packing_strategy=strategy)
    assert (preview.num_cut, preview.num_untrained) == (None, None)
    assert preview.num_tokens == 62
    assert preview.histogram()[-1] == Bin(29, 31, 2)


CUT = [
    {"prompt": "ab", "completion": "cd"},
    {"prompt": "ab", "completion": "cdefghij"},
    {"prompt": "abcdefgh", "completion": "ij"},
]


def test_what_is_cut_is_counted_and_what_then_trains_nothing_is_left_out(look: Look) -> None:
    preview = look("sft", CUT, max_length=6)
    assert preview.lengths == (5, 11, 11)
    assert (preview.num_cut, preview.num_untrained, preview.num_rows) == (2, 1, 2)
    assert [texts(sample) for sample in preview.samples] == [["cd<|im_end|>"], ["cdef"]]
    assert [sample.num_cut for sample in preview.samples] == [0, 5]
    assert preview.histogram()[-1] == Bin(7, None, 2)


def test_packed_samples_that_train_nothing_are_counted(look: Look) -> None:
    preview = look("sft", CUT, max_length=6, packing=True)
    assert (preview.num_cut, preview.num_untrained, preview.num_rows) == (2, 1, 3)


def test_data_that_trains_nothing_is_shown_with_a_warning(look: Look, warned: Warned) -> None:
    preview = look("sft", CUT[2:] * 3, max_length=6, num_shown=2)
    assert preview.trains_nothing
    assert (preview.num_rows, preview.num_untrained) == (0, 3)
    assert [(texts(sample, trained=False), sample.is_left_out) for sample in preview.samples] == [
        (["abcdef"], True)
    ] * 2
    ((message, hint),) = warned
    assert message.startswith("None of the 3 samples trains a token")
    assert "`sft.max_length` (it is 6)" in hint


# -- the other tasks ----------------------------------------------------------------------------------


def test_a_preference_is_shown_as_prompt_and_both_answers(look: Look) -> None:
    rows = [{"prompt": "2+2=", "chosen": " 4", "rejected": " 5é"}]
    preview = look("dpo", rows)
    (sample,) = preview.samples
    assert names(sample) == ["prompt", "chosen", "rejected"]
    assert texts(sample) == ["", " 4<|im_end|>", " 5é<|im_end|>"]
    assert texts(sample, trained=False)[0] == "2+2="
    assert (preview.lengths, preview.num_tokens, preview.num_trained) == ((9,), 16, 8)


def test_a_preference_is_cut_where_the_model_sees_it_cut(look: Look, warned: Warned) -> None:
    rows = [
        {"prompt": "abcd", "chosen": "efgh", "rejected": "i"},
        {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"},
    ]
    preview = look("dpo", rows, max_length=6)
    (sample,) = preview.samples
    assert (texts(sample), sample.num_cut) == (["", "ef", "i<|im_end|>"], 3)
    assert (preview.num_cut, preview.num_untrained, warned) == (2, 1, [])


def test_blocks_show_where_documents_end(look: Look) -> None:
    preview = look("clm", [{"text": "abc"}, {"text": "d"}, {"text": "efghijk"}], max_length=8)
    (sample,) = preview.samples
    assert names(sample) == ["document 1", "document 2", "document 3"]
    assert texts(sample) == ["bc<|im_end|>", "d<|im_end|>", "ef"]
    assert (preview.num_rows, preview.packing_efficiency, preview.num_cut) == (1, 1.0, None)
    assert (preview.length_of, preview.lengths) == ("document", (4, 2, 8))


def test_a_document_for_each_sample_is_cut(look: Look) -> None:
    preview = look("clm", [{"text": "abc"}, {"text": "efghijk"}], max_length=4, packing=False)
    assert [texts(sample) for sample in preview.samples] == [["bc<|im_end|>"], ["fgh"]]
    assert (preview.num_cut, preview.lengths) == (1, (4, 8))


def test_hidden_words_are_shown_hidden_and_as_they_were(look: Look) -> None:
    rows = [{"text": "abcdefghij" * 4}] * 20
    preview = look("mlm", rows, model_name="bert", max_length=32)
    for sample in preview.samples:
        assert names(sample) == ["the model sees", "and is to guess"]
        hidden, guessed = texts(sample)
        assert "[MASK]" in hidden
        assert len(guessed) == sample.num_trained
        assert texts(sample, trained=False)[0] == texts(sample, trained=False)[1]
    assert preview.lengths == (42,) * 20
    assert preview.num_cut == 20
    assert 0.08 < preview.trained_share < 0.22


def test_the_same_words_are_hidden_each_time(look: Look) -> None:
    rows = [{"text": "abcdefghij" * 4}] * 3
    assert look("mlm", rows, model_name="bert") == look("mlm", rows, model_name="bert")


def test_a_text_is_shown_with_its_class_and_classes_are_counted(look: Look) -> None:
    rows = [{"text": "good", "label": "up"}, {"text": "bad", "label": 0}, {"text": "worse", "label": 0}]
    preview = look("seq-cls", rows, model_name="bert", labels=["down", "up", "none"], num_shown=1)
    (sample,) = preview.samples
    assert [("".join(piece.text for piece in part.pieces)) for part in sample.parts] == [
        "[CLS]good[SEP]",
        "up",
    ]
    assert preview.classes == {"down": 2, "up": 1, "none": 0}
    assert not preview.trains_nothing


# -- how much is looked at ----------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["sft", "clm"])
def test_only_the_first_samples_are_looked_at(look: Look, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setattr(preview_module, "LOOKED_AT", 3)
    rows = [{"text": f"{number} is a text"} for number in range(5)]
    preview = look(task, rows, num_shown=9, **({"packing": False} if task == "clm" else {}))
    assert (preview.num_samples, preview.num_looked_at, len(preview.samples)) == (5, 3, 3)
    assert len(preview.lengths) == 3


@pytest.mark.parametrize("task", ["sft", "dpo", "clm"])
def test_a_stream_has_no_known_number_of_samples(look: Look, task: str) -> None:
    rows = [{"text": "abc"}] if task != "dpo" else [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    section = {"max_length": 4} if task == "clm" else {}
    preview = look(task, rows * 4, data={"streaming": True}, **section)
    assert (preview.num_samples, preview.num_looked_at, len(preview.lengths)) == (None, 4, 4)
    assert len(preview.samples) == 3


def test_figures_alone_need_no_sample(look: Look) -> None:
    preview = look("sft", [{"text": "abc"}], num_shown=0)
    assert (preview.samples, preview.num_rows) == ((), 1)


@pytest.mark.parametrize(
    ("lengths", "max_length", "num_cut", "expected"),
    [
        ((), 8, 0, []),
        ((1, 2, 2), 8, 0, [(1, 1, 1), (2, 2, 2)]),
        ((3, 5), 8, 0, [(3, 3, 1), (4, 4, 0), (5, 5, 1)]),
        (
            (3, 8, 9, 20),
            8,
            2,
            [(3, 3, 1), *((each, each, 0) for each in (4, 5, 6, 7)), (8, 8, 1), (9, None, 2)],
        ),
        ((1, 100), 1024, 0, [(1, 16, 1), *((n + 1, n + 16, 0) for n in (16, 32, 48, 64, 80)), (97, 100, 1)]),
        ((9, 9), 8, 2, [(9, None, 2)]),
        ((9, 9), 8, None, [(9, 9, 2)]),
    ],
)
def test_lengths_are_counted_in_bins(
    lengths: tuple[int, ...],
    max_length: int,
    num_cut: int | None,
    expected: list[tuple[int, int | None, int]],
) -> None:
    preview = Preview(
        name="test",
        task="sft",
        max_length=max_length,
        setting="sft.max_length",
        num_samples=len(lengths),
        samples=(),
        num_looked_at=len(lengths),
        length_of="sample",
        lengths=lengths,
        num_cut=num_cut,
        num_untrained=0,
        num_rows=len(lengths),
        num_tokens=sum(lengths),
        num_trained=0,
        is_packed=False,
    )
    assert [(each.first, each.last, each.count) for each in preview.histogram()] == expected


# -- what TRL says ------------------------------------------------------------------------------------

ENDS_UNTRAINED = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
FAILS = CHATML.replace("{{ message['role'] }}", "{{ raise_exception('roles must alternate') }}")
ADDS = CHATML.replace("{{ message['content'] }}", "{{ '> ' + message['content'] }}")


@pytest.mark.parametrize(
    ("row", "data", "section", "message", "hint"),
    [
        (
            chat("Hi", "Yes"),
            {},
            {"assistant_only_loss": True},
            "{% generation %}",
            "`sft.assistant_only_loss`",
        ),
        (
            chat("Hi"),
            {"chat_template": CHATML_MARKED},
            {"assistant_only_loss": True},
            "no assistant tokens",
            "`sft.assistant_only_loss`",
        ),
        (chat("Hi", "Yes"), {"chat_template": FAILS}, {}, "roles must alternate", "data.chat_template"),
        (
            {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "Yes"}]},
            {"chat_template": ADDS},
            {},
            "chat template can't write a conversation",
            "data.chat_template",
        ),
    ],
    ids=["unmarked", "no answer", "refused by the template", "broken in the template"],
)
def test_what_trl_refuses_is_said(
    look: Look, row: dict[str, Any], data: dict[str, Any], section: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(AssetError) as refused:
        look("sft", [row], data=data, **section)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_what_trl_warns_of_is_passed_on_once(look: Look, warned: Warned) -> None:
    look("sft", [chat("Hi", "Yes")] * 2, data={"chat_template": ENDS_UNTRAINED}, assistant_only_loss=True)
    ((message, hint),) = warned
    assert "may not learn to stop" in message and "trahiv preview" in hint


def test_what_is_not_known_of_trl_passes_as_it_was_said() -> None:
    with pytest.raises(AssetError, match="could not be prepared: never heard of") as refused, preparing():
        raise ValueError("never heard\nof")
    assert "trahiv preview" in refused.value.hint


def test_a_mistake_of_ours_is_not_taken_for_one_of_the_data() -> None:
    with pytest.raises(TypeError), preparing():
        raise TypeError("of ours")


# -- what is refused before training ------------------------------------------------------------------


@pytest.fixture
def refusal(model: Callable[[str], Path]) -> Callable[..., str]:
    """Ask whether samples are refused, for a task with `max_length` 64; give back why."""

    def ask(task: str, samples: list[dict[str, Any]], columns: dict[str, Any] | None = None) -> str:
        section = {"max_length": 64, **({"labels": ["a", "b"]} if task == "seq-cls" else {})}
        recipe = Recipe.model_validate(
            {
                "name": "test",
                "task": task,
                "model": {"model_name_or_path": "nobody/nothing"},
                "data": {"datasets": [{"path": "nobody/nothing"}]},
                task.replace("-", "_"): section,
                "training": {"max_steps": 1},
            }
        )
        try:
            require_trained_tokens(
                recipe, Dataset.from_list(samples) if samples else Dataset.from_dict(columns or {})
            )
        except AssetError as error:
            return f"{error.message} {error.hint}"
        return ""

    return ask


@pytest.mark.parametrize(
    ("task", "sample"),
    [
        ("clm", {"input_ids": [1, 2]}),
        ("mlm", {"input_ids": [1, 2]}),
        ("seq-cls", {"input_ids": [1, 2], "labels": 0}),
        ("sft", {"input_ids": [1, 2], "labels": [-100, 2]}),
        ("sft", {"input_ids": [1, 2, 3, 4], "labels": [1, -100, 3, 4], "seq_lengths": [2, 2]}),
        ("dpo", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}),
    ],
)
def test_data_that_trains_something_is_accepted(
    refusal: Callable[..., str], task: str, sample: dict[str, Any]
) -> None:
    assert refusal(task, [sample]) == ""


@pytest.mark.parametrize(
    ("task", "sample"),
    [
        ("sft", {"input_ids": [1, 2], "labels": [-100, -100]}),
        ("sft", {"input_ids": [1, 2], "labels": [1, -100]}),  # nobody is asked for the first token
        ("sft", {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "seq_lengths": [2, 1]}),
        ("dpo", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": []}),
    ],
)
def test_data_that_trains_nothing_is_refused(
    refusal: Callable[..., str], task: str, sample: dict[str, Any]
) -> None:
    why = refusal(task, [sample] * 101)
    assert "none of the first 100 samples trains a token" in why
    assert f"`{task}.max_length` (it is 64)" in why
    assert "`trahiv preview RECIPE`" in why


def test_one_sample_in_a_hundred_is_enough(refusal: Callable[..., str]) -> None:
    nothing = {"input_ids": [1, 2], "labels": [-100, -100]}
    something = {"input_ids": [1, 2], "labels": [-100, 2]}
    assert refusal("sft", [nothing] * 99 + [something]) == ""
    assert refusal("sft", [nothing] * 100 + [something]) != ""


def test_no_sample_at_all_is_refused(refusal: Callable[..., str]) -> None:
    why = refusal("sft", [], {"input_ids": [], "labels": []})
    assert "No sample is left to train on: at 64 tokens, each was cut off before its answer." in why


@pytest.mark.parametrize(
    ("task", "row", "section"),
    [
        ("sft", CUT[2], {"max_length": 6}),
        ("sft", CUT[2], {"max_length": 6, "packing": True}),
        ("dpo", {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"}, {"max_length": 6}),
    ],
    ids=["cut", "cut and packed", "preferences"],
)
def test_a_trainer_is_not_made_of_data_that_trains_nothing(
    model: Callable[[str], Path], tmp_path: Path, task: str, row: dict[str, Any], section: dict[str, Any]
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "task": task,
            "model": {"model_name_or_path": str(model("plain"))},
            "data": {"datasets": [{"path": "nobody/nothing"}]},
            task: section,
            "training": {"max_steps": 1},
            "hivemind_config": {"opt": {"run_id": "test"}},
        }
    )
    splits = Splits(Dataset.from_list([row] * 3), None)
    with pytest.raises(AssetError, match=r"No sample is left|There is nothing to learn"):
        build_trainer(recipe, tmp_path, build_tokenizer(recipe), splits)
