"""The scores of a run: the agreed results of evaluations of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trahiv_cli.progress.history import MOST_STEPS

MOST_SCORE = 1e15  # limit of a score and of its negative; NaN is beyond it, too

BestScore = Literal["lowest", "highest"]
"""Which of two scores is the better one."""


@dataclass(frozen=True)
class Scores:
    """The steps that were evaluated, in ascending order, with the score of each.

    Peers evaluate the weights of a step and claim the result in the next round. Its members agree on the
    median, the lower one of two, as do peers that replay the round.
    """

    of_steps: tuple[tuple[int, float], ...] = ()

    def extend(self, step: int, score: float) -> Scores:
        """Append the score of a later step."""
        return Scores((*self.of_steps, (step, score)))

    def best(self, which: BestScore) -> tuple[int, float] | None:
        """Return the step with the best score, the first of equals, and the score; None if there is none."""
        sign = 1 if which == "lowest" else -1
        return min(self.of_steps, key=lambda one: sign * one[1], default=None)

    def to_wire(self) -> list[list[float]]:
        """Return the scores as a list that MessagePack and JSON carry."""
        return [list(one) for one in self.of_steps]

    @classmethod
    def from_wire(cls, data: object) -> Scores:
        """Read the list that `to_wire` returned, or raise `ValueError`."""
        scores: list[tuple[int, float]] = []
        last = -1
        for one in data if isinstance(data, list) else [None]:
            match one:
                case [int(step), float(score)] if last < step <= MOST_STEPS and abs(score) <= MOST_SCORE:
                    scores.append((step, score))
                    last = step
                case _:
                    raise ValueError("not the scores of a run")
        return cls(tuple(scores))
