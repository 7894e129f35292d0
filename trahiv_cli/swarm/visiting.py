"""Visits to a swarm, to look at it or to hand something over; nothing is left of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.acquaintances import Acquaintances
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.roll import Standing


@contextmanager
def visiting(
    addresses: Sequence[str],
    standing: Standing | None,
    met: Acquaintances,
    identity: Path | None = None,
) -> Iterator[Node]:
    """Visit a swarm.

    Args:
        addresses: of its peers.
        standing: by what the visitor is let in.
        met: peers that may know where the swarm is now.
        identity: key file of one who was there before, and may be let in when others are not; None: a
            passing one.

    Raises:
        Unreachable, NotAdmitted: see `Node`.
    """
    passing = Path(tempfile.mkdtemp(prefix="trahiv-visitor-"))
    section = DhtSection(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=True, nat_port_map=False, auto_nat=False
    )
    try:
        identity = identity or passing / "identity.key"
        with Node(section, identity, tuple(addresses), met=met, standing=standing, is_visitor=True) as node:
            yield node
    finally:
        shutil.rmtree(passing, ignore_errors=True)
