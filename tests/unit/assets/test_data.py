"""Documents and blocks of `clm`, and what holds for every task: mixtures, held-out shares, orders."""

from itertools import chain

import pytest
from datasets import IterableDataset
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset

from tests.unit.assets.conftest import splits_of
from tests.unit.conftest import refused
from trahiv_cli.recipe.schema import DatasetSection

EOS = 1
# More documents than one batch has (100), of all lengths from 0, so that blocks cross batches.
TEXTS = [f"{number} " * (number % 23) for number in range(250)]


@pytest.fixture
def build(write_rows, byte_tokenizer):
    """Build the splits of a `clm` recipe about texts, or datasets."""

    def make(data, *, packing=True, max_length=16, **options):
        if isinstance(data[0], str):
            data = [write_rows([{"text": text} for text in data])]
        section = {"packing": packing, "max_length": max_length}
        return splits_of("clm", data, byte_tokenizer, section=section, **options)

    return make


def ids(samples):
    return [sample["input_ids"] for sample in samples]


def encoded(*texts):
    return list(chain.from_iterable([*(byte + 3 for byte in text.encode()), EOS] for text in texts if text))


def test_packing_keeps_tokens_in_order(build):
    blocks = ids(build(TEXTS, num_proc=2).train)
    tokens = encoded(*TEXTS)
    assert blocks == [tokens[end - 16 : end] for end in range(16, len(tokens) + 1, 16)]


@pytest.mark.parametrize("order", [list, sorted])
def test_stream_has_same_blocks_as_dataset(build, order):
    options = {"shuffle": order is sorted}
    streamed = build(TEXTS, streaming=True, **options)
    assert isinstance(streamed.train, IterableDataset)
    assert streamed.eval is None
    next(iter(streamed.train))
    blocks = ids(streamed.train)
    assert order(ids(build(TEXTS, **options).train)) == order(blocks)
    assert ids(streamed.train) == blocks


def test_shuffled_multi_file_stream_keeps_tokens(build, put):
    put({f"{number}.txt": f"{number}" * (100 + number) for number in range(4)})
    train = build([DatasetSection(path="*.txt")], streaming=True, shuffle=True).train
    blocks = ids(train)
    assert len(blocks) == (406 + 4) // 16
    assert ids(train) == blocks
    tokens = list(chain(*blocks))
    left = [100 + number - tokens.count(ord(str(number)) + 3) for number in range(4)]
    assert left.count(0) == 3, "the last one's end is cut"


def test_peer_seed_orders_only_streams(build, streaming):
    def order(peer_seed):
        return ids(build(TEXTS, shuffle=True, streaming=streaming, peer_seed=peer_seed).train)

    ours = order(2**200 + 1)
    theirs = order(2**200 + 2)
    assert (ours != theirs) is streaming
    assert sorted(ours) == sorted(theirs)
    assert ours == order(2**200 + 1)


def test_peers_hold_out_same_documents(build):
    texts = [f"document number {number}" for number in range(50)]
    options = {"share": 0.1, "shuffle": True, "packing": False, "max_length": 64}
    ours, theirs = (build(texts, peer_seed=seed, **options) for seed in (1, 2))
    held_out = ids(ours.eval)
    trained = ids(ours.train)
    assert (held_out, trained) == (ids(theirs.eval), ids(theirs.train))
    assert len(held_out) == 5
    assert sorted(held_out + trained) == sorted(map(encoded, texts))


def test_only_document_cannot_be_held_out(build):
    with refused("Of 1 documents, 1 would be held out", "split it into several"):
        build(["only one text"], share=0.1, max_length=4)


def test_json_line_without_utf8_is_refused(put, build, streaming):
    put({"rows.jsonl": b'{"text": "fine"}\n{"text": "na\xefve"}\n'})
    with refused(r"rows\.jsonl could not be read: .*( byte 0xef|UTF-8)"):
        build([DatasetSection(path="rows.jsonl")], max_length=2, streaming=streaming)


def test_unpacked_document_is_truncated_sample(build):
    samples = ids(build(["abc", "", "abcdefgh"], packing=False, max_length=5).train)
    assert samples == [encoded("abc"), encoded("abcde")[:5]]


def test_too_little_text_is_refused(build, streaming):
    with refused("text has 4 tokens, and one sample has 16"):
        build(["abc"], streaming=streaming)


def test_short_held_out_text_is_refused(build):
    with refused("held-out text has 10 tokens"):
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
        write_rows([{"text": "a"}] * 10, "a.jsonl", fraction=fractions[0]),
        write_rows([{"text": "b"}] * 20, "b.jsonl", fraction=fractions[1]),
    ]
    parts = [DatasetConfig(path="json", data_files=one.path, fraction=one.fraction) for one in sources]
    theirs = get_dataset(DatasetMixtureConfig(datasets=parts))["train"]["text"]
    assert "".join(theirs) == expected
    assert ids(build(sources, packing=False).train) == list(map(encoded, expected))


def test_share_below_one_row_is_refused(write_rows, build):
    few = write_rows([{"text": "a"}], "a.jsonl", fraction=1)
    many = write_rows([{"text": "b"}] * 9, "b.jsonl", fraction=0.1)
    words = r"share of 0\.1 of the mixture is less than one row of .*b\.jsonl"
    with refused(words, "`data.datasets.1.fraction`"):
        build([few, many])
