"""What a check says: what was found and, if that is not enough, what is wanted and what to do."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["fine", "poor", "bad"]  # poor: a peer can train, but not as well as it could


class Check(NamedTuple):
    """One thing that was looked at. The texts are whole sentences or figures for a person."""

    name: str
    verdict: Verdict
    found: str
    wanted: str = ""
    fix: str = ""
