"""Visits to a swarm, to look at it or to hand something over; nothing is left of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.acquaintances import Acquaintances
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.roll import Credentials


@contextmanager
def visiting(
    addresses: Sequence[str],
    standing: Credentials | None,
    met: Acquaintances,
    identity: Path | None = None,
) -> Iterator[Node]:
    """Visit a swarm.

    Args:
        addresses: multiaddrs of its peers.
        standing: by what the visitor is let in.
        met: peers that may know where the swarm is now.
        identity: key file of a peer that may be let in when others are not; None: a new one for this visit.

    Raises:
        Unreachable, NotAdmitted: see `Node`.
    """
    section = DhtSection(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=True, nat_port_map=False, auto_nat=False
    )
    with tempfile.TemporaryDirectory(prefix="trahiv-visitor-", ignore_cleanup_errors=True) as passing:
        identity = identity or Path(passing, "identity.key")
        with Node(section, identity, tuple(addresses), met=met, standing=standing, is_visitor=True) as node:
            yield node
