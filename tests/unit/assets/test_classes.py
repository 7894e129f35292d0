import numpy as np
import pytest
from transformers import EvalPrediction

from trahiv_cli.assets.classes import class_metrics


def logits(*predicted: int, num_classes: int = 4) -> np.ndarray:
    return np.eye(num_classes)[list(predicted)]


@pytest.mark.parametrize(
    ("predicted", "labels", "accuracy", "f1"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], 1.0, 1.0),
        ([1, 0, 1, 0], [0, 1, 0, 1], 0.0, 0.0),
        # Class 0: 2 hits, 1 predicted in vain; class 1: 1 hit, 1 missed; 2 and 3 never occur.
        ([0, 0, 1, 0], [0, 0, 1, 1], 0.75, (2 * 2 / (3 + 2) + 2 * 1 / (1 + 2)) / 2),
        # Class 2 is predicted and never right: it counts, with 0.
        ([0, 0, 2], [0, 0, 0], 2 / 3, (2 * 2 / (2 + 3) + 0) / 2),
    ],
    ids=["all right", "all wrong", "only classes that occur", "a class predicted in vain"],
)
def test_accuracy_and_macro_f1(predicted: list[int], labels: list[int], accuracy: float, f1: float) -> None:
    measured = class_metrics(EvalPrediction(logits(*predicted), np.array(labels)))
    assert measured == {"accuracy": pytest.approx(accuracy), "f1": pytest.approx(f1)}


def test_logits_may_come_with_more_that_the_model_returns() -> None:
    outputs = (logits(0, 1), np.zeros((2, 3, 8)))
    assert class_metrics(EvalPrediction(outputs, np.array([0, 1])))["accuracy"] == 1.0
