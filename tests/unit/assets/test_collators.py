import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from tests.unit.assets.conftest import recipe
from trahiv_cli.assets.collators import build_collator, class_metrics

EOS = 1


def test_a_batch_pads_by_position_and_learns_the_end_of_text(byte_tokenizer):
    collate = build_collator(recipe(clm={"packing": False}), byte_tokenizer)
    batch = collate([{"input_ids": [5, 0, EOS]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[5, 0, EOS], [7, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, EOS], [7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    packed = build_collator(recipe(), byte_tokenizer)([{"input_ids": [5, 6]}, {"input_ids": [7, EOS]}])
    assert packed.keys() == {"input_ids", "labels"}, "all are of one length"


def test_hidden_tokens_are_the_only_labels_and_differ_each_time(bert_tokenizer):
    collate = build_collator(recipe("mlm"), bert_tokenizer)
    samples = [{"input_ids": bert_tokenizer(text)["input_ids"]} for text in ("a long text " * 20, "short")]
    torch.manual_seed(0)
    first, second = collate(samples), collate(samples)
    assert first.keys() == {"input_ids", "labels", "attention_mask"}
    hidden = first["labels"] != -100
    assert hidden.any() and not hidden[first["attention_mask"] == 0].any()
    assert not torch.equal(first["input_ids"], second["input_ids"])
    short = [{"input_ids": bert_tokenizer("a")["input_ids"]}]
    assert all((collate(short)["labels"] != -100).any() for _ in range(30)), "its loss would be NaN"


@pytest.mark.parametrize(
    ("task", "labels", "padded"),
    [("mlm", ([-100, 8, -100, -100], [-100, 7, -100]), [-100, 7, -100, -100]), ("seq-cls", (1, 0), 0)],
    ids=["masked before", "classes"],
)
def test_a_batch_of_samples_with_labels_is_padded(bert_tokenizer, task, labels, padded):
    rows = zip(([2, 4, 9, 3], [2, 4, 3]), labels, strict=True)
    samples = [{"input_ids": ids, "labels": label} for ids, label in rows]
    batch = build_collator(recipe(task), bert_tokenizer)(samples)
    assert batch["input_ids"].tolist() == [[2, 4, 9, 3], [2, 4, 3, bert_tokenizer.pad_token_id]]
    assert batch["labels"].tolist() == [labels[0], padded]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("predicted", "labels", "accuracy", "f1"),
    [
        # Class 0: 2 hits, 1 predicted in vain; class 1: 1 hit, 1 missed; 2 and 3 never occur.
        ([0, 0, 1, 0], [0, 0, 1, 1], 0.75, (2 * 2 / (3 + 2) + 2 * 1 / (1 + 2)) / 2),
        # Class 2 is predicted and never right: it counts, with 0.
        ([0, 0, 2], [0, 0, 0], 2 / 3, (2 * 2 / (2 + 3) + 0) / 2),
    ],
    ids=["only classes that occur", "a class predicted in vain"],
)
def test_accuracy_and_macro_f1(predicted, labels, accuracy, f1):
    logits, expected = np.eye(4)[predicted], {"accuracy": pytest.approx(accuracy), "f1": pytest.approx(f1)}
    for outputs in (logits, (logits, np.zeros((2, 3, 8)))):  # a model may return more
        assert class_metrics(EvalPrediction(outputs, np.array(labels))) == expected
