"""Digests of the weights that all peers of a history hold alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trahiv_cli.errors import NotFinite
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.claims import are_finite, state_to_adopt
from trahiv_cli.rounds.vote import digest_of, joint_digest
from trahiv_cli.state.host_copies import host_values
from trahiv_cli.state.peer_state import PeerState, common_digest


class WeightDigests:
    """Digests the tensors that all peers of a history share, each once while it does not change.

    It also finds the peers whose weights to adopt if the members of a round held different ones.
    `SwarmOptimizer` creates one and keeps it.
    """

    def __init__(self, state: PeerState, tracker: SwarmTracker) -> None:
        self._state = state
        self._tracker = tracker
        self._digest = b""
        self._digests: dict[int, bytes] = {}  # of the shared tensors, by `id`
        self.claimed: dict[str, bytes] = {}
        """Digests claimed in a round, by peer id, if they differed and `restore` was not called since."""

    def digest(self, weights: Sequence[torch.Tensor]) -> bytes:
        """Digest `weights`, the shared tensors of a round; report the digest of all shared tensors.

        Raises:
            NotFinite: a shared tensor is not finite. Nothing has left this peer.
        """
        if not self._digest:
            common = self._state.common_tensors()
            history = self._state.committed.now.history
            new = [tensor for tensor in common if id(tensor) not in self._digests]
            for tensor, value in zip(new, host_values(new, self._state.lock_state.changes), strict=True):
                if not are_finite([value]):
                    raise NotFinite(
                        f"The weights of this peer are not finite at step {history.step}; nothing was sent.",
                        hint="run the same command again: it takes the swarm's state, or the last checkpoint",
                    )
                self._digests[id(tensor)] = digest_of([value])
            held = joint_digest(self._digests[id(weight)] for weight in weights)
            self._digest = held[:8]
            of_all = (self._digests[id(one)] for one in common)
            self._tracker.attest(history, common_digest(of_all, self._state.own_metadata()))
        return self._digest

    def forget(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """Forget the digests of `changed` tensors; of all without any, or in modes without local steps."""
        self._digest = b""
        if not changed or self._state.outer is None:
            self._digests = {}
        for tensor in changed:
            self._digests.pop(id(tensor), None)

    def compare(self, claimed: Mapping[str, bytes]) -> None:
        """Record the digests that the members of a round claimed before it, if they differ."""
        self.claimed = dict(claimed) if len(set(claimed.values())) > 1 else {}

    def take_holders(self) -> set[str]:
        """Return ids of the peers whose state to adopt, none if most have this peer's; forget the claims."""
        claimed = self.claimed
        self.claimed = {}
        adopted = state_to_adopt(claimed, self._state.committed.now.history.digest)
        if claimed.get(self._tracker.own_id, adopted) == adopted:
            return set()
        return {peer for peer, state in claimed.items() if state == adopted}
