"""Why a swarm does not take this peer in, as the person who started it reads it."""

from __future__ import annotations

from trahiv_cli.errors import NotAdmitted
from trahiv_cli.swarm.door import Door
from trahiv_cli.swarm.policy import TAKEN_OUT


def not_admitted(objection: str) -> NotAdmitted:
    """Explain to a peer that has a certificate why it is no member.

    Args:
        objection: see `Policy.objection`; empty: the certificate is of another swarm.
    """
    if objection == TAKEN_OUT:
        return NotAdmitted(
            "The owner of this swarm has taken this peer out. What it trained is kept, and goes to nobody.",
            hint="ask the owner; who is invited again comes with another folder: --output-dir DIR",
        )
    return NotAdmitted(
        f"The swarm does not take this peer for a member: {objection or 'its invitation is to another one'}.",
        hint="ask the owner, or a member, for a fresh invitation",
    )


def why_refused(door: Door) -> NotAdmitted:
    """Explain to a peer, by what its door was told, why all peers that answered refused it."""
    if door.is_open:
        return NotAdmitted(
            "The swarm is closed: it answers members alone.",
            hint="ask a member for its invitation, and type: trahiv join --peer trahiv1:...",
        )
    if door.was_open:
        return NotAdmitted(
            "That swarm is open to everybody, and this peer belongs to a closed one. Nobody was joined.",
            hint="to join it all the same, give it a folder of its own with --output-dir DIR, and an address",
        )
    return not_admitted(door.objection)
