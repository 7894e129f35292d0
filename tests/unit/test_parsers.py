"""What reads a network's bytes, or a user's file, answers or refuses; see `tests.fuzz`."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import PARSERS, attempt, mutated


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_whole_is_taken(name):
    for sample in PARSERS[name].samples:
        PARSERS[name].parse(sample)


BEYOND = {
    "lists": b"[" * 3000,
    "objects": b'{"a":' * 3000,
    "a long number": b"9" * 5000,
    "a field of NaN": bytes.fromhex("9192cb7ff800000000000080"),
}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("what", BEYOND)
def test_what_was_found_stays_found(name, what):
    """What `python -m tests.fuzz` had some parser end by another error than its own."""
    assert attempt(PARSERS[name], BEYOND[what]) == ""


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_damaged_is_answered_or_refused(name, data):
    parser = PARSERS[name]
    damaged = st.builds(mutated, st.sampled_from(parser.samples), st.randoms(use_true_random=False))
    assert attempt(parser, data.draw(st.one_of(damaged, st.binary(max_size=400)))) == ""
