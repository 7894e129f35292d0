"""The swarm's time: the same for all peers, whatever their machines' clocks say, or are set to.

Records in the DHT live until a moment that their author names, and groups form at one: where clocks differ,
records are dead on arrival or outlive their author. So a peer reads its machine's clock once, counts from
there by one that is never set and goes on while the machine is suspended, and takes over the time of the
swarm that it enters.
"""

from __future__ import annotations

import ctypes
import time
from multiprocessing.sharedctypes import RawValue

TOLERATED_S = 1.0
"""A difference that is left alone. hivemind refuses a peer that is more than 3 s apart."""

_COUNTER = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_began = time.time() - time.clock_gettime(_COUNTER)
_ahead = RawValue(ctypes.c_double, 0.0)
"""By how many seconds the swarm's time is ahead of this machine's; shared with all that is forked."""


def swarm_time() -> float:
    """Return the swarm's time in seconds since 1970, as `time.time` has it."""
    return _began + time.clock_gettime(_COUNTER) + float(_ahead.value)


def take_over(theirs: float, asked_at: float, answered_at: float) -> float:
    """Go over to the time of a peer, if it is another one.

    Args:
        theirs: its time, in seconds since 1970, when it answered.
        asked_at: `swarm_time` when it was asked.
        answered_at: `swarm_time` when its answer was there.

    Returns:
        By how many seconds the time was changed: 0 if the answer's delay may be all of the difference.
    """
    difference = theirs - (asked_at + answered_at) / 2
    if abs(difference) <= TOLERATED_S + (answered_at - asked_at) / 2:
        return 0.0
    _ahead.value += difference
    return difference
