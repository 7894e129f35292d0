"""What a peer holds in common with the others, as a digest, and whose state it takes over if it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trahiv_cli.errors import NotFinite
from trahiv_cli.optim.ballot import digest_of, joint_digest
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.soundness import are_finite, state_to_adopt
from trahiv_cli.optim.state import ExactStateAverager, common_digest
from trahiv_cli.swarm.host_copies import host_values

STATE_DIGEST_BYTES = 8


class Equality:
    """Digests the tensors that all peers of a history hold alike, each once while it does not change.

    Args:
        state: has the tensors.
        tracker: tells the others.
    """

    def __init__(self, state: ExactStateAverager, tracker: SwarmTracker) -> None:
        self._state, self._tracker = state, tracker
        self._digest = b""
        self._digests: dict[int, bytes] = {}
        """Digests of the tensors that are held in common, by index."""
        self._claimed: dict[str, bytes] = {}
        """What the members of the last round that found them unequal claimed to hold, by id."""

    def digest(self, weights: Sequence[torch.Tensor]) -> bytes:
        """Digest what a round is about, and report what all peers of this history hold.

        Args:
            weights: some of the state's common tensors.

        Raises:
            NotFinite: a common tensor is not finite. Nothing has left this peer.
        """
        if not self._digest:
            common, history = self._state.common_tensors(), self._state.history
            new = [index for index in range(len(common)) if index not in self._digests]
            values = host_values([common[index] for index in new], self._state.lock_state.changes)
            for index, value in zip(new, values, strict=True):
                if not are_finite([value]):
                    raise NotFinite(
                        f"The weights of this peer are not finite at step {history.step}; nothing was sent.",
                        hint="run the same command again: it takes the swarm's state, or the last checkpoint",
                    )
                self._digests[index] = digest_of([value])
            digests = {id(tensor): self._digests[index] for index, tensor in enumerate(common)}
            self._digest = joint_digest(digests[id(weight)] for weight in weights)[:STATE_DIGEST_BYTES]
            self._tracker.attest(history, common_digest(digests.values(), self._state.own_metadata()))
        return self._digest

    def begin_step(self) -> None:
        """The history has moved: what is held in common is to be said anew."""
        self._digest = b""

    def forget(self, indices: range | None = None) -> None:
        """These weights have changed, and their outer momenta; None: all tensors."""
        outer = self._state.outer
        if indices is None or outer is None:
            self._digests = {}
            return
        first_momentum = len(self._state.common_tensors()) - len(outer.momentum)
        for index in indices:
            self._digests.pop(index, None)
            self._digests.pop(first_momentum + index, None)

    def compare(self, claimed: Mapping[str, bytes]) -> None:
        """Note what the members of a round claimed to hold before it, if that was not the same."""
        if len(set(claimed.values())) > 1:
            self._claimed = dict(claimed)

    @property
    def is_lost(self) -> bool:
        """Whether members of a group held something else than others, and nothing was done about it yet."""
        return bool(self._claimed)

    def restore(self) -> set[str]:
        """Return ids of those whose state to take over, none if most hold this peer's; forget the claims."""
        claimed, self._claimed = self._claimed, {}
        adopted = state_to_adopt(claimed, self._state.history.digest)
        if claimed.get(self._tracker.own_id, adopted) == adopted:
            return set()
        return {peer for peer, state in claimed.items() if state == adopted}
