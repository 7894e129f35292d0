"""The judge of fault tests finds what is wrong: else all of them would pass for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.promises import find_broken_promises, find_lost_steps


def ready(peer: str) -> dict[str, Any]:
    return {"event": "ready", "peer": peer, "step": 0, "samples": 0, "digest": "0", "weights": "w0"}


def step(digest: str, parent: str, number: int, **changes: Any) -> dict[str, Any]:
    """A step of peers A and B, of 8 samples each, as A tells it."""
    fields = {
        "event": "step",
        "step": number,
        "digest": digest,
        "parent": parent,
        "weights": f"w{digest}",
        "samples": 16 * number,
        "step_samples": 16,
        "my_samples": 8,
        "held": 8,
        "contributed": {"A": 8, "B": 8},
        "left_out": {},
    }
    return fields | changes


STEPS = [step("1", "0", 1), step("2", "1", 2)]


@pytest.mark.parametrize(
    ("last", "broken"),
    [
        ({}, ""),
        ({"weights": "x"}, "b holds"),
        ({"held": 16}, "b held 16 samples"),
        ({"step_samples": 24}, "b came to 2 by"),
        ({"samples": 40}, "b holds"),
        ({"contributed": {"A": 16}, "step_samples": 16, "left_out": {"B": "its gradient"}}, "b came to 2 by"),
    ],
)
def test_what_another_peer_tells_otherwise_is_found(last: dict[str, Any], broken: str) -> None:
    everything = {"a": [ready("A"), *STEPS], "b": [ready("B"), STEPS[0], STEPS[1] | last]}
    told = find_broken_promises(everything)
    assert any(one.startswith(broken) for one in told) if broken else told == []


@pytest.mark.parametrize(
    ("changes", "is_broken"),
    [
        ({"samples": 40}, True),
        ({"step_samples": 24, "samples": 40}, True),
        ({"contributed": {"B": 16}, "left_out": {"A": "it is not finite"}}, False),
        ({"contributed": {"B": 16}}, True),
    ],
)
def test_samples_that_are_not_counted_or_twice_are_found_but_of_those_that_were_left_out(
    changes: dict[str, Any], is_broken: bool
) -> None:
    assert bool(find_broken_promises({"a": [ready("A"), STEPS[0], STEPS[1] | changes]})) == is_broken


def test_a_step_beside_the_longest_history_is_lost() -> None:
    assert find_lost_steps({"a": [ready("A"), *STEPS], "b": [ready("B"), *STEPS]}) == {}
    assert find_lost_steps({"a": [ready("A"), *STEPS], "b": [ready("B"), step("x", "0", 1)]}) == {"x": ["b"]}
