"""What this peer loaded, told to the swarm and compared with what the others loaded.

Base model, adapters, tokenizer and the size of divided data must be the same on all peers. They are compared
by digests when a peer enters, and again when it finds no group.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.likeness import INITIAL, likeness
from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.optim.reports import PeerProgress
from trahiv_cli.swarm.alike import REPUBLISH_S, Likeness, digest, publish_likeness, require_alike, without
from trahiv_cli.swarm.node import Node
from trahiv_cli.telemetry.events import Events

DIGESTS_S = 120.0

logger = logging.getLogger(__name__)


class Comparison:
    """Compares the digests of what this peer loaded with those of the others."""

    def __init__(self, node: Node, run_id: str, own: Likeness) -> None:
        self.node, self._run_id, self._own = node, run_id, own
        self._lasting = without(own, INITIAL)  # what stays true while weights are trained
        self._publish_at = 0.0

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        processing_class: Any,
        size: Likeness,
        node: Node,
        run_id: str,
        events: Events,
    ) -> Self:
        """Compute the digests, and publish them.

        `model` is as loaded, with float32 trainable weights; `processing_class` is a tokenizer, something
        that has one, or anything else; `size` is that of data that is divided.
        """
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        with events.waiting("the model to be compared with the swarm's", DIGESTS_S):
            known = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
            own = likeness(model, known) | size
        comparison = cls(node, run_id, own)
        comparison.publish()
        return comparison

    @property
    def schema(self) -> bytes:
        """Peers average only with those that have the same."""
        return digest(self._lasting)

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

        Of two that entered together, and could not compare before, one leaves.

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
