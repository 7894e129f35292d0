"""The judge of fault tests finds what is wrong: else all of them would pass for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.promises import find_broken_promises, find_lost_steps


def ready(peer: str) -> dict[str, Any]:
    return {"event": "ready", "peer": peer, "step": 0, "samples": 0, "digest": "0", "weights": "w0"}


def step(digest: str, parent: str, number: int, **changes: Any) -> dict[str, Any]:
    """A step of peers A and B, of 8 samples each, as A tells it."""
    place = {"step": number, "digest": digest, "weights": f"w{digest}", "samples": 16 * number}
    brought = {
        "step_samples": 16,
        "my_samples": 8,
        "held": 8,
        "contributed": {"A": 8, "B": 8},
        "left_out": {},
    }
    return {"event": "step", "parent": parent} | place | brought | changes


STEPS = [step("1", "0", 1), step("2", "1", 2)]


@pytest.mark.parametrize(
    ("peers", "last", "broken"),
    [
        ("ab", {}, ""),
        ("ab", {"weights": "x"}, "b holds"),
        ("ab", {"contributed": {"A": 16}, "left_out": {"B": "its gradient"}}, "b came to 2 by"),
        ("b", {"held": 16}, "b held 16 samples"),
        ("b", {"contributed": {"A": 16}}, "b held 8 samples"),
        ("b", {"contributed": {"A": 16}, "left_out": {"B": "it is not finite"}}, ""),
        ("b", {"step_samples": 24, "samples": 40}, "b counted 24 samples"),
        ("b", {"samples": 40}, "step 2 does not add 16"),
    ],
)
def test_what_does_not_fit_is_found(peers: str, last: dict[str, Any], broken: str) -> None:
    everything = {"a": [ready("A"), *STEPS], "b": [ready("B"), STEPS[0], STEPS[1] | last]}
    told = find_broken_promises({peer: everything[peer] for peer in peers})
    assert any(one.startswith(broken) for one in told) if broken else told == []


def test_a_step_beside_the_longest_history_is_lost() -> None:
    assert find_lost_steps({"a": [ready("A"), *STEPS], "b": [ready("B"), *STEPS]}) == {}
    assert find_lost_steps({"a": [ready("A"), *STEPS], "b": [ready("B"), step("x", "0", 1)]}) == {"x": ["b"]}
