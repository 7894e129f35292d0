import numpy as np
import pytest
from transformers import EvalPrediction

from trahiv_cli.assets.classes import class_metrics


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
