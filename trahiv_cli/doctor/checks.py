"""The result of a check: the finding and, if that is not enough, the requirement and the remedy."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["fine", "poor", "bad"]  # poor: a peer can train, but not as well as it could


class Check(NamedTuple):
    """The result of one check. Its texts are whole sentences or figures for a person."""

    name: str
    verdict: Verdict
    found: str
    wanted: str = ""
    fix: str = ""
