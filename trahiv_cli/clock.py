"""The swarm's time: the same for all peers, whatever their machines' clocks say, or are set to.

Records in the DHT end, and groups form, at a moment that a peer sets. So a peer reads its machine's clock
once, counts from there with a clock that is never set and that continues while the machine is suspended, and
takes over the time of the swarm that it enters.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from multiprocessing.sharedctypes import RawValue

# The beginning of 2026, before there was a trahiv, and the year 2106; in seconds since 1970.
EARLIEST_S = 1767225600.0
LATEST_S = 2.0**32

_counter = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_began = time.time() - time.clock_gettime(_counter)
# The seconds by which the swarm's time is ahead of this machine's; shared with all forked processes.
_ahead = RawValue(ctypes.c_double, 0.0)


def swarm_time() -> float:
    """Return the swarm's time in seconds since 1970, as `time.time` has it."""
    return _began + time.clock_gettime(_counter) + float(_ahead.value)


def take_over(answers: Iterable[tuple[float, float]]) -> float:
    """Take over the time of other peers if it differs; return by how many seconds the time was changed.

    Each answer has the seconds by which a peer is ahead, and the seconds that the call took. The median time
    counts, or of two middle ones the one nearer to this peer's own: a minority can't mislead it. A time not
    between `EARLIEST_S` and `LATEST_S` is ignored, and so is a difference that the call's delay may explain.
    """
    now = swarm_time()
    found = sorted(answer for answer in answers if EARLIEST_S <= now + answer[0] <= LATEST_S)
    if not found:
        return 0.0
    middle = found[(len(found) - 1) // 2 : len(found) // 2 + 1]
    difference, delay = min(middle, key=lambda one: abs(one[0]))
    if abs(difference) <= 1.0 + delay / 2:  # hivemind refuses only a peer that is more than 3 s apart
        return 0.0
    _ahead.value += difference
    return difference


def ahead_s() -> float:
    """Return the known number of seconds by which the swarm's time is ahead of this machine's clock."""
    return float(_ahead.value)
