from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from datasets import IterableDataset
from transformers import ByT5Tokenizer
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset

from trahiv_cli.assets.data import Splits, build_datasets
from trahiv_cli.assets.samples import DOCUMENTS_PER_BATCH
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.builtin import TEXT, text_files
from trahiv_cli.recipe.schema import DatasetSection, Recipe

Jsonl = Callable[..., DatasetSection]
Recipes = Callable[..., Recipe]
Build = Callable[..., Splits]
STREAMED = pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
EOS = 1
# More documents than one batch has, of all lengths from 0, so that blocks cross batches.
TEXTS = [f"{number} " * (number % 23) for number in range(2 * DOCUMENTS_PER_BATCH + 50)]


@pytest.fixture
def build(recipe: Recipes, byte_tokenizer: ByT5Tokenizer) -> Build:
    """Build the splits of a `clm` recipe about one dataset."""

    def make(
        source: DatasetSection,
        *,
        share: float = 0.0,
        packing: bool = True,
        max_length: int = 16,
        peer_seed: int = 1,
        **data: object,
    ) -> Splits:
        data = {"shuffle": False, "eval": {"test_split_size": share}, **data}
        section = {"packing": packing, "max_length": max_length}
        made = recipe("clm", [source], section=section, **data)
        return build_datasets(made, byte_tokenizer, seed=42, peer_seed=peer_seed)

    return make


def ids(samples: object) -> list[list[int]]:
    return [sample["input_ids"] for sample in samples]  # type: ignore[attr-defined]


def encoded(texts: list[str]) -> list[int]:
    return list(chain.from_iterable([*(byte + 3 for byte in text.encode()), EOS] for text in texts if text))


@STREAMED
def test_packing_keeps_every_token_once_and_in_order(jsonl: Jsonl, build: Build, streaming: bool) -> None:
    blocks = ids(build(jsonl(TEXTS), streaming=streaming).train)
    stream = encoded(TEXTS)
    assert {len(block) for block in blocks} == {16}
    assert len(blocks) == len(stream) // 16
    assert list(chain(*blocks)) == stream[: 16 * len(blocks)]


def test_tokenizing_in_two_processes_changes_nothing(jsonl: Jsonl, build: Build) -> None:
    alone = build(jsonl(TEXTS))
    assert ids(build(jsonl(TEXTS), num_proc=2).train) == ids(alone.train)


def test_a_stream_starts_again_with_the_same_blocks(jsonl: Jsonl, build: Build) -> None:
    train = build(jsonl(TEXTS), streaming=True).train
    assert isinstance(train, IterableDataset)
    next(iter(train))
    assert ids(train) == ids(train)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_has_the_same_blocks_as_the_dataset_read_at_once(
    jsonl: Jsonl, build: Build, shuffle: bool
) -> None:
    at_once = build(jsonl(TEXTS), shuffle=shuffle)
    streamed = build(jsonl(TEXTS), shuffle=shuffle, streaming=True)
    assert sorted(ids(streamed.train)) == sorted(ids(at_once.train))
    assert streamed.eval is None


def test_a_stream_of_several_files_loses_no_token_when_shuffled(build: Build, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * (100 + number))
    train = build(DatasetSection(path=str(tmp_path / "*.txt")), streaming=True, shuffle=True).train
    passes = [ids(train) for _ in range(2)]
    assert len(passes[0]) == (406 + 4) // 16
    assert passes[0] == passes[1]
    seen = [sum(block.count(ord(str(number)) + 3) for block in passes[0]) for number in range(4)]
    assert sum(count == 100 + number for number, count in enumerate(seen)) == 3  # the last one's end is cut


@STREAMED
def test_each_peer_reads_a_stream_in_an_order_of_its_own_and_divides_the_rest(
    jsonl: Jsonl, build: Build, streaming: bool
) -> None:
    def order(peer_seed: int) -> list[list[int]]:
        splits = build(jsonl(TEXTS), shuffle=True, streaming=streaming, peer_seed=peer_seed)
        return ids(splits.train)

    ours, theirs = order(2**200 + 1), order(2**200 + 2)
    assert (ours != theirs) is streaming
    assert sorted(ours) == sorted(theirs)
    assert ours == order(2**200 + 1)


def test_all_peers_hold_out_the_same_documents(jsonl: Jsonl, build: Build) -> None:
    texts = [f"document number {number}" for number in range(50)]
    ours, theirs = (
        build(
            jsonl(texts),
            share=0.1,
            shuffle=True,
            packing=False,
            max_length=64,
            peer_seed=seed,
        )
        for seed in (1, 2)
    )
    assert ours.eval is not None and theirs.eval is not None
    held_out, trained = ids(ours.eval), ids(ours.train)
    assert held_out == ids(theirs.eval)
    assert trained == ids(theirs.train)
    assert len(held_out) == 5
    assert sorted(held_out + trained) == sorted(encoded([text]) for text in texts)


def test_at_least_one_document_is_held_out(jsonl: Jsonl, build: Build) -> None:
    splits = build(jsonl(["one text", "another text"]), share=0.01, max_length=4)
    assert splits.eval is not None and len(splits.eval) > 0


def test_nothing_is_held_out_of_a_single_document(jsonl: Jsonl, build: Build) -> None:
    with pytest.raises(AssetError, match="Of 1 documents, 1 would be held out") as caught:
        build(jsonl(["only one text"]), share=0.1, max_length=4)
    assert "split it into several" in caught.value.hint


@STREAMED
def test_lines_of_json_that_are_not_utf8_are_found_when_they_are_read(
    tmp_path: Path, build: Build, streaming: bool
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "na\xefve"}\n')
    with pytest.raises(AssetError, match=r"rows\.jsonl could not be read: .* byte 0xef"):
        build(DatasetSection(path=str(tmp_path / "rows.jsonl")), max_length=2, streaming=streaming)


def test_without_packing_a_document_is_a_sample_cut_to_length(jsonl: Jsonl, build: Build) -> None:
    samples = ids(build(jsonl(["abc", "", "abcdefgh"]), packing=False, max_length=5).train)
    assert samples == [encoded(["abc"]), encoded(["abcdefgh"])[:5]]


@STREAMED
@pytest.mark.parametrize(("texts", "packing", "tokens"), [(["abc"], True, 4), (["", ""], False, 0)])
def test_too_little_text_for_one_sample_is_refused(
    jsonl: Jsonl,
    build: Build,
    texts: list[str],
    packing: bool,
    tokens: int,
    streaming: bool,
) -> None:
    with pytest.raises(AssetError, match=f"text has {tokens} tokens"):
        build(jsonl(texts), packing=packing, streaming=streaming)


def test_too_little_held_out_text_is_told_apart(jsonl: Jsonl, build: Build) -> None:
    with pytest.raises(AssetError, match="held-out text has 10 tokens"):
        build(jsonl(["nine char"] * 20), share=0.01)


def test_several_datasets_are_read_one_after_the_other(
    jsonl: Jsonl, recipe: Recipes, byte_tokenizer: ByT5Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text("more")
    sources = [jsonl(["some"]), DatasetSection(path=str(tmp_path / "more.txt"))]
    mixed = recipe("clm", sources, section={"max_length": 10}, shuffle=False)
    splits = build_datasets(mixed, byte_tokenizer, seed=0, peer_seed=0)
    assert ids(splits.train) == [encoded(["some", "more"])]


def shares(recipe: Recipes, tokenizer: ByT5Tokenizer, sources: list[DatasetSection]) -> list[str]:
    """The first letters of the texts in a mixture, in order."""
    mixed = recipe("clm", sources, section={"packing": False}, shuffle=False)
    splits = build_datasets(mixed, tokenizer, seed=0, peer_seed=0)
    return [chr(sample[0] - 3) for sample in ids(splits.train)]


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        ((3, 1), "a" * 10 + "b" * 3),  # 10 rows of 3 in 4 make 13.3; 3.3 are rounded
        ((0.5, 0.5), "a" * 10 + "b" * 10),
        ((1, 3), "a" * 7 + "b" * 20),  # the second is used up: 6.7 of the first
    ],
)
def test_a_mixture_has_the_shares_that_trl_would_give_it(
    write_rows: Callable[..., DatasetSection],
    recipe: Recipes,
    byte_tokenizer: ByT5Tokenizer,
    fractions: tuple[float, float],
    expected: str,
) -> None:
    sources = [
        write_rows([{"text": f"a{n}"} for n in range(10)], "a.jsonl", fraction=fractions[0]),
        write_rows([{"text": f"b{n}"} for n in range(20)], "b.jsonl", fraction=fractions[1]),
    ]
    mixture = DatasetMixtureConfig(
        datasets=[
            DatasetConfig(path="json", data_files=source.path, fraction=source.fraction) for source in sources
        ]
    )
    assert "".join(text[0] for text in get_dataset(mixture)["train"]["text"]) == expected
    assert "".join(shares(recipe, byte_tokenizer, sources)) == expected


def test_a_share_of_less_than_a_row_is_refused(
    write_rows: Callable[..., DatasetSection], recipe: Recipes, byte_tokenizer: ByT5Tokenizer
) -> None:
    sources = [
        write_rows([{"text": "a"}], "a.jsonl", fraction=1),
        write_rows([{"text": "b"}] * 9, "b.jsonl", fraction=0.1),
    ]
    with pytest.raises(
        AssetError, match=r"share of 0\.1 of the mixture is less than one row of .*b\.jsonl"
    ) as caught:
        shares(recipe, byte_tokenizer, sources)
    assert "`data.datasets.1.fraction`" in caught.value.hint


def test_the_built_in_text_makes_blocks_without_a_cache(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(text_files(), key=lambda file: file.stat().st_size)[-20:]
    monkeypatch.setattr("trahiv_cli.recipe.builtin.text_files", lambda: files)
    splits = build(DatasetSection(path=TEXT), share=0.1, max_length=128)
    assert splits.eval is not None and len(splits.eval) > 10
    assert len(splits.train) > 1000
    assert not (tmp_path / "cache").exists()
