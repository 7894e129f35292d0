"""The judge of fault tests finds what is wrong: else all of them would pass for nothing."""

from __future__ import annotations

import json
import math
from typing import Any

from hivemind.proto import averaging_pb2, runtime_pb2

from tests.kit.faults import (
    PHASES,
    ask_too_much,
    codec_raises,
    corrupt_part,
    cut_links,
    damage,
    drop_peer,
    lie_about_time,
    lie_in_claim,
    lie_in_report,
    poison,
    stall,
)
from tests.kit.faulty_peer import find_broken_promises, find_lost_steps


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


def test_a_run_as_promised_has_nothing_broken_and_nothing_lost() -> None:
    steps = [step("1", "0", 1), step("2", "1", 2)]
    everything = {"a": [ready("A"), *steps], "b": [ready("B"), *steps]}
    assert find_broken_promises(everything) == []
    assert find_lost_steps(everything) == {}


def test_other_weights_at_the_same_step_are_found() -> None:
    everything = {"a": [ready("A"), step("1", "0", 1)], "b": [ready("B"), step("1", "0", 1, weights="x")]}
    (told,) = find_broken_promises(everything)
    assert told.startswith("b holds")


def test_samples_that_are_not_counted_or_twice_are_found_but_of_those_that_were_left_out() -> None:
    assert find_broken_promises({"a": [ready("A"), step("1", "0", 1, held=16)]})
    assert find_broken_promises({"a": [ready("A"), step("1", "0", 1, step_samples=24)]})
    assert find_broken_promises({"a": [ready("A"), step("1", "0", 1), step("2", "1", 2, samples=40)]})
    said = step("1", "0", 1, contributed={"B": 16}, left_out={"A": "its gradient is not finite"})
    assert find_broken_promises({"a": [ready("A"), said]}) == []


def test_a_step_beside_the_longest_history_is_lost() -> None:
    everything = {
        "a": [ready("A"), step("1", "0", 1), step("2", "1", 2)],
        "b": [ready("B"), step("x", "0", 1)],
    }
    assert find_lost_steps(everything) == {"x": ["b"]}


def test_faults_are_json() -> None:
    faults = [
        *(drop_peer(2, phase) for phase in PHASES),
        corrupt_part(),
        stall(2.5),
        poison(norm=math.nan),
        codec_raises(),
        cut_links("folder"),
        lie_in_claim({"samples": 2**64 - 1}, num_isolated=8),
        lie_in_report({"leases": [0, 2**62]}),
        lie_about_time(math.nan),
        ask_too_much("votes"),
    ]
    for fault in faults:
        told = json.loads(json.dumps(fault.to_json(), allow_nan=False))
        assert told["fault"] == type(fault).__name__
    assert poison(norm=math.nan).to_json()["norm"] == "nan"


def test_damage_changes_one_bit_of_a_copy() -> None:
    part = runtime_pb2.Tensor(buffer=bytes(range(16)))
    message = averaging_pb2.AveragingData(peer_id=b"checksum", tensor_part=part)
    changed = damage(message)
    assert message.tensor_part.buffer == bytes(range(16))
    assert changed.peer_id == b"checksum"
    pairs = zip(message.tensor_part.buffer, changed.tensor_part.buffer, strict=True)
    assert sum((a ^ b).bit_count() for a, b in pairs) == 1
