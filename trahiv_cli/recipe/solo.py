"""How `swarm.solo` is said: `never`, `always` or `after N seconds`."""

from __future__ import annotations

import math
import re

EXPECTED = "never, always or after N seconds"

PATTERN = r"^(never|always|after ([0-9]{1,9}(\.[0-9]{1,3})?) seconds?)$"
"""What is read, for editors too."""

_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(
    r"(?:after\s+)?([0-9]{1,5}(?:\.[0-9]{1,3})?)\s*(s|sec|seconds?|m|min|minutes?|h|hours?)?"
)
_NEVER = frozenset({"never", "false", "no", "off"})
_ALWAYS = frozenset({"always", "true", "yes", "on"})


def read_solo(text: str) -> float | None:
    """Read it as seconds: `math.inf` for `never`, 0 for `always`, None if it is said otherwise."""
    match = re.fullmatch(PATTERN, text)
    if match is None:
        return None
    return {"never": math.inf, "always": 0.0}[text] if match[2] is None else float(match[2])


def write_solo(seconds: float) -> str:
    """Write seconds in the one way that `read_solo` reads: equal waits make equal agreements.

    Args:
        seconds: as from `read_solo`.
    """
    if seconds in (0.0, math.inf):
        return "always" if seconds == 0 else "never"
    number = int(seconds) if seconds.is_integer() else seconds
    return f"after {number} second{'' if seconds == 1 else 's'}"


def about_solo(value: object) -> str:
    """Say what to write instead of `value`, which is not read: `5 min` is meant as 300 seconds."""
    word = str(value).strip().lower()
    match = _DURATION.fullmatch(word)
    if match and float(match[1]) > 0:  # a bare 0 may mean "at once" or "off"
        return f"write `{write_solo(round(float(match[1]) * _UNIT_S[(match[2] or 's')[0]], 3))}`"
    if word in _NEVER | _ALWAYS:
        return f"write `{'never' if word in _NEVER else 'always'}`"
    return "for example `after 300 seconds`"
