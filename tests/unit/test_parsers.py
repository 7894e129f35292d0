"""What reads a network's bytes, or a user's file, answers or refuses; see `tests.kit.fuzz`."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hivemind.utils import MSGPackSerializer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic.v1 import BaseModel

from tests.kit.fuzz import PARSERS, attempt, damaged
from tests.kit.lies import lies
from trahiv_cli.swarm.snapshot import unpacked

FOUND = (b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, bytes.fromhex("9192cb7ff800000000000080"))
"""What hours of damaged inputs had some parser end by another error than its own."""


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_whole_is_taken_and_what_was_found_stays_found(name):
    for sample in PARSERS[name].samples:
        PARSERS[name].parse(sample)
    for content in FOUND:
        assert attempt(PARSERS[name], content) == "", content[:9]


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_damaged_is_answered_or_refused(name, data):
    assert attempt(PARSERS[name], data.draw(damaged(PARSERS[name]))) == ""


# -- every field of every message of a peer -------------------------------------------------------

MESSAGES = [
    *("a report", "a history", "a ledger", "spans", "a pace", "a claim", "a statement", "a vote"),
    *("an offer of a state", "a manifest", "the header of a round"),
]
MAY_BE_ANYTHING = {"norm"}
"""Fields that are judged by other rules: a norm that is no number is a claim, and left out."""


def out_of_bounds(value: Any, name: str = "") -> Iterator[str]:
    """Numbers of what was read that nobody can count with: not finite, or too large to be packed."""
    if is_dataclass(value):
        for field in fields(value):
            yield from out_of_bounds(getattr(value, field.name), field.name)
    elif isinstance(value, BaseModel):
        yield from out_of_bounds(value.dict())
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from out_of_bounds(one, str(key))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from out_of_bounds(one, name)
    elif isinstance(value, (int, float)) and name not in MAY_BE_ANYTHING:
        if not math.isfinite(value) or abs(value) >= 2**63:
            yield f"{name}={value}"


@pytest.mark.parametrize("name", MESSAGES)
def test_whatever_a_field_says_the_message_is_refused_or_its_numbers_are_in_bounds(name):
    parser = PARSERS[name]
    for tree in map(unpacked, parser.samples):
        for what, changed in lies(tree):
            content = MSGPackSerializer.dumps(changed)
            assert attempt(parser, content) == "", what
            try:
                read = parser.parse(content)
            except parser.refusals:
                continue
            assert not list(out_of_bounds(read)), what
