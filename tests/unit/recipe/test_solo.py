"""`swarm.solo` is read in one way, written in one way, and what comes near it is answered with that way."""

import math
import re

import pytest
from pydantic import ValidationError

from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.recipe.solo import PATTERN, about_solo, read_solo, write_solo


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [
        *(("never", math.inf, "never"), ("always", 0, "always"), ("after 0 seconds", 0, "always")),
        *((f"after {text}", 1, "after 1 second") for text in ("1 second", "1 seconds", "1.0 seconds")),
        *(
            ("after 0.25 seconds", 0.25, "after 0.25 seconds"),
            ("after 300.0 seconds", 300, "after 300 seconds"),
        ),
        ("after 999999999.999 seconds", 999999999.999, "after 999999999.999 seconds"),
    ],
)
def test_equal_waits_are_one_value(text, seconds, written):
    section = SwarmSection(solo=text)
    assert (section.solo, section.solo_after_s) == (written, seconds)
    assert read_solo(written) == seconds
    assert re.search(PATTERN, written)


@pytest.mark.parametrize(
    "value",
    ["", "Never", "sometimes", "300", "after 300", "after 300 s", "after 300  seconds", "after -1 seconds"]
    + ["after 1e3 seconds", "after 9999999999 seconds", "after inf seconds", "never\n", "after .5 seconds"]
    + ["after \u0663 seconds", 300, 0, 1.5, math.inf, True, None, [], {}],
)
def test_nothing_else_is_read(value):
    with pytest.raises(ValidationError, match="expected never, always or after N seconds"):
        SwarmSection(solo=value)


MEANT = {
    "after 300 seconds": [300, "300", "after 300", "300s", "After 5 min", "after 5 minutes"],
    "after 1.5 seconds": [1.5],
    "after 0.42 seconds": ["0.007 minutes"],
    "after 359999996.4 seconds": ["99999.999 hours"],
    "never": [False, "off", "no", "NEVER"],
    "always": [True, " yes "],
}


@pytest.mark.parametrize(("meant", "values"), MEANT.items())
def test_what_was_meant_is_written_out(meant, values):
    assert {about_solo(value) for value in values} == {f"write `{meant}`"}
    assert write_solo(read_solo(meant)) == meant


@pytest.mark.parametrize("value", [0, "0 s", -5, "sometimes", "99999999 s", None, []])
def test_what_may_mean_anything_gets_an_example(value):
    assert about_solo(value) == "for example `after 300 seconds`"
