"""A paused peer: only its node runs, until the user resumes it."""

from __future__ import annotations

import time
from collections.abc import Callable

from trahiv_cli.errors import PeerBroken
from trahiv_cli.run.announcing import published, reach_reported
from trahiv_cli.run.leaving import Leaving, Left
from trahiv_cli.run.own_status import OwnStatus
from trahiv_cli.run.requests import ControlRequests
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events


def wait_while_paused(
    node: Node,
    requests: ControlRequests,
    own_status: OwnStatus,
    packed: bytes,
    events: Events,
    leaving: Leaving,
    invite: Callable[[], object],
    limit_s: float,
) -> float:
    """Wait while this peer is paused; its node still serves joiners, and peers that need a relay.

    Heavy libraries are not loaded yet, and nothing is on the GPU. A paused peer publishes its `packed` run,
    and calls `invite` to announce how others join. Returns the seconds of the pause.

    Raises:
        PeerBroken: the node has ended.
        NotAdmitted: the swarm's owner has removed this peer.
        Left: this peer should leave, or has waited for `limit_s`.
    """
    status = own_status.current
    began_at = time.monotonic()

    def leave_if_due() -> None:
        if requests.is_to_finish or time.monotonic() >= began_at + limit_s:
            leaving.leave("finish" if requests.is_to_finish else "budget")
            raise Left

    leave_if_due()
    if not requests.pause_reason():
        return 0.0
    reported = ""
    publishing = published(node, packed, own_status, events)
    with leaving.interruptible(), publishing, reach_reported(node, events):
        invite()
        while why := requests.pause_reason():
            if why != reported:
                events.emit("paused", step=status.step, why=why, run_id=status.run_id, peer_id=node.peer_id)
            reported = why
            time.sleep(1.0)
            leave_if_due()
            node.require_membership()
            if not node.is_alive():
                raise PeerBroken(
                    "This peer's DHT process has ended while the peer was paused.",
                    hint="nothing to do where a command trains: it starts again by itself, still paused",
                )
    leave_if_due()
    paused_s = time.monotonic() - began_at
    events.emit("resumed", step=status.step, seconds=round(paused_s, 1))
    return paused_s
