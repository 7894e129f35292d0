"""What this peer loaded, told to the swarm and compared with what the others loaded.

Base model, adapters, tokenizer and the size of divided data must be the same on all peers. They are compared
by digests when a peer enters, and again when it finds no group.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection

from trahiv_cli.assets.likeness import INITIAL
from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.optim.reports import PeerProgress
from trahiv_cli.swarm.alike import REPUBLISH_S, Likeness, digest, publish_likeness, require_alike, without
from trahiv_cli.swarm.node import Node

logger = logging.getLogger(__name__)


class Comparison:
    """Compares the digests of what this peer loaded, `own`, with those of the others, and publishes them."""

    def __init__(self, node: Node, run_id: str, own: Likeness) -> None:
        self.node, self._run_id, self._own = node, run_id, own
        self._lasting = without(own, INITIAL)  # what stays true while weights are trained
        self._publish_at = 0.0
        self.schema = digest(self._lasting)
        """Peers average only with those that have the same."""
        self.publish()

    def publish(self) -> None:
        """Tell newcomers what this peer loaded, now and then: records go with the peers that hold them."""
        if time.monotonic() >= self._publish_at:
            with contextlib.suppress(SwarmError):  # the next step tries again
                if publish_likeness(self.node, self._run_id, self._own):
                    self._publish_at = time.monotonic() + REPUBLISH_S

    def require_alike(self, others: Collection[PeerProgress], *, has_begun: bool) -> None:
        """Compare before this peer enters; initial weights only if the run has not begun.

        Raises:
            RecipeMismatch: most of them loaded something else.
            SwarmError: the DHT does not answer.
        """
        own = self._lasting if has_begun else self._own
        require_alike(self.node, self._run_id, own, [peer.peer_id for peer in others])

    def repeat(self, others: Collection[PeerProgress]) -> None:
        """Find out whether there is no group because the others loaded something else.

        Of two that entered together, and could not compare before, the one with the greater id leaves.

        Raises:
            RecipeMismatch: they did.
        """
        own = self.node.peer_id
        if len(others) < 2 and own <= min((peer.peer_id for peer in others), default=own):
            return
        try:
            self.require_alike(others, has_begun=True)
        except RecipeMismatch:
            raise
        except SwarmError as error:  # links are bad, which may be why there is no group
            logger.warning("What the others loaded was not compared; that is tried again: %s", error)
