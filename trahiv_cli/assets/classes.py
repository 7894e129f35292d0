"""How well a classifier tells its classes apart."""

from __future__ import annotations

import numpy as np
from transformers import EvalPrediction


def class_metrics(evaluated: EvalPrediction) -> dict[str, float]:
    """Measure a classifier on the held-out share; the `compute_metrics` of transformers' Trainer.

    Its `predictions` are logits of shape (rows, classes), or a tuple that begins with them. `f1` is the mean
    over classes of 2 TP / (2 TP + FP + FN). A class that is neither predicted nor right in any row is left
    out of the mean, as in `sklearn.metrics.f1_score(average="macro")`.
    """
    logits = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    labels = np.asarray(evaluated.label_ids)
    predicted = np.asarray(logits).argmax(axis=-1)
    scores = []
    for number in np.union1d(labels, predicted):
        hits = np.sum((predicted == number) & (labels == number))
        scores.append(2 * hits / (np.sum(predicted == number) + np.sum(labels == number)))
    return {"accuracy": float(np.mean(predicted == labels)), "f1": float(np.mean(scores))}
