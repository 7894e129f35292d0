from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from transformers import ByT5Tokenizer

from trahiv_cli.assets.data import DOCUMENTS_PER_BATCH, Splits, build_collator, build_datasets
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import ClmSection, DataSection, DatasetSection, EvalSection

Jsonl = Callable[..., DatasetSection]
EOS = 1
# More documents than one batch has, of all lengths from 0, so that blocks cross batches.
TEXTS = [f"{number} " * (number % 23) for number in range(2 * DOCUMENTS_PER_BATCH + 50)]


def build(
    source: DatasetSection,
    tokenizer: ByT5Tokenizer,
    *,
    share: float = 0.0,
    shuffle: bool = False,
    streaming: bool = False,
    num_proc: int | None = None,
    packing: bool = True,
    max_length: int = 16,
    peer_seed: int = 1,
) -> Splits:
    data = DataSection(
        datasets=[source],
        eval=EvalSection(test_split_size=share),
        shuffle=shuffle,
        streaming=streaming,
        num_proc=num_proc,
    )
    clm = ClmSection(packing=packing, max_length=max_length)
    return build_datasets(data, clm, tokenizer, seed=42, peer_seed=peer_seed)


def ids(samples: object) -> list[list[int]]:
    return [sample["input_ids"] for sample in samples]  # type: ignore[attr-defined]


def encoded(texts: list[str]) -> list[int]:
    return list(chain.from_iterable([*(byte + 3 for byte in text.encode()), EOS] for text in texts if text))


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
def test_packing_keeps_every_token_once_and_in_order(
    jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer, streaming: bool
) -> None:
    blocks = ids(build(jsonl(TEXTS), byte_tokenizer, streaming=streaming).train)
    stream = encoded(TEXTS)
    assert {len(block) for block in blocks} == {16}
    assert len(blocks) == len(stream) // 16
    assert list(chain(*blocks)) == stream[: 16 * len(blocks)]


def test_tokenizing_in_two_processes_changes_nothing(jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer) -> None:
    alone = build(jsonl(TEXTS), byte_tokenizer)
    assert ids(build(jsonl(TEXTS), byte_tokenizer, num_proc=2).train) == ids(alone.train)


def test_a_stream_starts_again_with_the_same_blocks(jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer) -> None:
    train = build(jsonl(TEXTS), byte_tokenizer, streaming=True).train
    assert isinstance(train, IterableDataset)
    next(iter(train))
    assert ids(train) == ids(train)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_has_the_same_blocks_as_the_dataset_read_at_once(
    jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer, shuffle: bool
) -> None:
    at_once = build(jsonl(TEXTS), byte_tokenizer, shuffle=shuffle)
    streamed = build(jsonl(TEXTS), byte_tokenizer, shuffle=shuffle, streaming=True)
    assert sorted(ids(streamed.train)) == sorted(ids(at_once.train))
    assert streamed.eval is None


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
def test_each_peer_has_an_order_of_its_own(
    jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer, streaming: bool
) -> None:
    def order(peer_seed: int) -> list[list[int]]:
        splits = build(jsonl(TEXTS), byte_tokenizer, shuffle=True, streaming=streaming, peer_seed=peer_seed)
        return ids(splits.train)

    ours, theirs = order(2**200 + 1), order(2**200 + 2)
    assert ours != theirs
    assert sorted(ours) == sorted(theirs)
    assert ours == order(2**200 + 1)


def test_all_peers_hold_out_the_same_documents(jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer) -> None:
    texts = [f"document number {number}" for number in range(50)]
    ours, theirs = (
        build(
            jsonl(texts),
            byte_tokenizer,
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
    assert trained != ids(theirs.train)
    assert len(held_out) == 5
    assert sorted(held_out + trained) == sorted(encoded([text]) for text in texts)


def test_at_least_one_document_is_held_out(jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer) -> None:
    splits = build(jsonl(["one text", "another text"]), byte_tokenizer, share=0.01, max_length=4)
    assert splits.eval is not None and len(splits.eval) > 0


def test_nothing_is_held_out_of_a_single_document(jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer) -> None:
    with pytest.raises(AssetError, match="Of 1 documents, 1 would be held out") as caught:
        build(jsonl(["only one text"]), byte_tokenizer, share=0.1, max_length=4)
    assert "split it into several" in caught.value.hint


def test_without_packing_a_document_is_a_sample_cut_to_length(
    jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer
) -> None:
    samples = ids(build(jsonl(["abc", "", "abcdefgh"]), byte_tokenizer, packing=False, max_length=5).train)
    assert samples == [encoded(["abc"]), encoded(["abcdefgh"])[:5]]


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize(("texts", "packing", "tokens"), [(["abc"], True, 4), (["", ""], False, 0)])
def test_too_little_text_for_one_sample_is_refused(
    jsonl: Jsonl,
    byte_tokenizer: ByT5Tokenizer,
    texts: list[str],
    packing: bool,
    tokens: int,
    streaming: bool,
) -> None:
    with pytest.raises(AssetError, match=f"text has {tokens} tokens"):
        build(jsonl(texts), byte_tokenizer, packing=packing, streaming=streaming)


def test_too_little_held_out_text_is_told_apart(jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer) -> None:
    with pytest.raises(AssetError, match="held-out text has 10 tokens"):
        build(jsonl(["nine char"] * 20), byte_tokenizer, share=0.01)


def test_several_datasets_are_read_one_after_the_other(
    jsonl: Jsonl, byte_tokenizer: ByT5Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text("more")
    sources = [jsonl(["some"]), DatasetSection(path=str(tmp_path / "more.txt"))]
    clm = ClmSection(max_length=10)
    splits = build_datasets(
        DataSection(datasets=sources, shuffle=False), clm, byte_tokenizer, seed=0, peer_seed=0
    )
    assert ids(splits.train) == [encoded(["some", "more"])]


def test_the_built_in_text_makes_blocks_without_a_cache(
    byte_tokenizer: ByT5Tokenizer, tmp_path: Path
) -> None:
    splits = build(DatasetSection(path="builtin/python-stdlib"), byte_tokenizer, share=0.02, max_length=128)
    assert splits.eval is not None and len(splits.eval) > 10
    assert len(splits.train) > 5000
    assert not (tmp_path / "cache").exists()


def test_a_batch_pads_by_position_and_learns_the_end_of_text(byte_tokenizer: ByT5Tokenizer) -> None:
    collate = build_collator(ClmSection(packing=False), byte_tokenizer)
    batch = collate([{"input_ids": [5, 0, EOS]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[5, 0, EOS], [7, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, EOS], [7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_batch_of_blocks_needs_no_mask(byte_tokenizer: ByT5Tokenizer) -> None:
    batch = build_collator(ClmSection(), byte_tokenizer)([{"input_ids": [5, 6]}, {"input_ids": [7, EOS]}])
    assert batch.keys() == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])
