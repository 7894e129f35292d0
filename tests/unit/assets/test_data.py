"""Documents and blocks of `clm`, and what holds for every task: mixtures, held-out shares, orders."""

from itertools import chain

import pytest
from datasets import IterableDataset
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset

from tests.unit.assets.conftest import STREAMED, splits_of
from trahiv_cli.assets.samples import DOCUMENTS_PER_BATCH
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection

EOS = 1
# More documents than one batch has, of all lengths from 0, so that blocks cross batches.
TEXTS = [f"{number} " * (number % 23) for number in range(2 * DOCUMENTS_PER_BATCH + 50)]


@pytest.fixture
def build(write_rows, byte_tokenizer):
    """Build the splits of a `clm` recipe about texts, or datasets."""

    def make(*data, packing=True, max_length=16, **options):
        if not isinstance(data[0], DatasetSection):
            data = (write_rows([{"text": text} for text in data[0]]),)
        section = {"packing": packing, "max_length": max_length}
        return splits_of("clm", data, byte_tokenizer, section=section, **options)

    return make


def ids(samples):
    return [sample["input_ids"] for sample in samples]


def encoded(texts):
    return list(chain.from_iterable([*(byte + 3 for byte in text.encode()), EOS] for text in texts if text))


def test_packing_keeps_tokens_in_order(build):
    blocks, stream = ids(build(TEXTS, num_proc=2).train), encoded(TEXTS)
    assert {len(block) for block in blocks} == {16}
    assert len(blocks) == len(stream) // 16
    assert list(chain(*blocks)) == stream[: 16 * len(blocks)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_stream_has_same_blocks_as_dataset(build, shuffle):
    at_once, streamed = (build(TEXTS, shuffle=shuffle, streaming=streaming) for streaming in (False, True))
    assert isinstance(streamed.train, IterableDataset) and streamed.eval is None
    next(iter(streamed.train))
    ours, theirs = ids(at_once.train), ids(streamed.train)
    assert sorted(ours) == sorted(theirs) if shuffle else ours == theirs
    assert ids(streamed.train) == theirs


def test_shuffled_multi_file_stream_keeps_tokens(build, tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * (100 + number))
    train = build(DatasetSection(path=str(tmp_path / "*.txt")), streaming=True, shuffle=True).train
    passes = [ids(train) for _ in range(2)]
    assert len(passes[0]) == (406 + 4) // 16
    assert passes[0] == passes[1]
    seen = [sum(block.count(ord(str(number)) + 3) for block in passes[0]) for number in range(4)]
    assert sum(count == 100 + number for number, count in enumerate(seen)) == 3  # the last one's end is cut


@STREAMED
def test_peer_seed_orders_only_streams(build, streaming):
    def order(peer_seed):
        return ids(build(TEXTS, shuffle=True, streaming=streaming, peer_seed=peer_seed).train)

    ours, theirs = order(2**200 + 1), order(2**200 + 2)
    assert (ours != theirs) is streaming
    assert sorted(ours) == sorted(theirs)
    assert ours == order(2**200 + 1)


def test_peers_hold_out_same_documents(build):
    texts = [f"document number {number}" for number in range(50)]
    options = {"share": 0.1, "shuffle": True, "packing": False, "max_length": 64}
    ours, theirs = (build(texts, peer_seed=seed, **options) for seed in (1, 2))
    held_out, trained = ids(ours.eval), ids(ours.train)
    assert held_out == ids(theirs.eval)
    assert trained == ids(theirs.train)
    assert len(held_out) == 5
    assert sorted(held_out + trained) == sorted(encoded([text]) for text in texts)
    assert len(build(["one text", "another text"], share=0.01, max_length=4).eval) > 0
    with pytest.raises(AssetError, match="Of 1 documents, 1 would be held out") as caught:
        build(["only one text"], share=0.1, max_length=4)
    assert "split it into several" in caught.value.hint


@STREAMED
def test_json_line_without_utf8_is_refused(tmp_path, build, streaming):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "na\xefve"}\n')
    with pytest.raises(AssetError, match=r"rows\.jsonl could not be read: .*( byte 0xef|UTF-8)"):
        build(DatasetSection(path=str(tmp_path / "rows.jsonl")), max_length=2, streaming=streaming)


def test_unpacked_document_is_truncated_sample(build):
    samples = ids(build(["abc", "", "abcdefgh"], packing=False, max_length=5).train)
    assert samples == [encoded(["abc"]), encoded(["abcdefgh"])[:5]]


@STREAMED
def test_too_little_text_is_refused(build, streaming):
    with pytest.raises(AssetError, match="text has 4 tokens, and one sample has 16"):
        build(["abc"], streaming=streaming)
    with pytest.raises(AssetError, match=r"No row of .*rows\.jsonl' has a text"):
        build(["", ""], streaming=streaming)
    with pytest.raises(AssetError, match="held-out text has 10 tokens"):
        build(["nine char"] * 20, share=0.01)


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        ((3, 1), "a" * 10 + "b" * 3),  # 10 rows of 3 in 4 make 13.3; 3.3 are rounded
        ((1, 3), "a" * 7 + "b" * 20),  # the second is used up: 6.7 of the first
    ],
)
def test_mixture_shares_match_trl(write_rows, build, fractions, expected):
    sources = [
        write_rows([{"text": f"a{n}"} for n in range(10)], "a.jsonl", fraction=fractions[0]),
        write_rows([{"text": f"b{n}"} for n in range(20)], "b.jsonl", fraction=fractions[1]),
    ]
    parts = [DatasetConfig(path="json", data_files=one.path, fraction=one.fraction) for one in sources]
    theirs = get_dataset(DatasetMixtureConfig(datasets=parts))["train"]["text"]
    ours = [chr(sample[0] - 3) for sample in ids(build(*sources, packing=False).train)]
    assert "".join(text[0] for text in theirs) == "".join(ours) == expected
    few = write_rows([{"text": "a"}], "a.jsonl", fraction=1)
    many = write_rows([{"text": "b"}] * 9, "b.jsonl", fraction=0.1)
    words = r"share of 0\.1 of the mixture is less than one row of .*b\.jsonl"
    with pytest.raises(AssetError, match=words) as caught:
        build(few, many)
    assert "`data.datasets.1.fraction`" in caught.value.hint
