"""What a peer holds, and gives to joiners: weights, optimizer state and what was committed until then.

A state is more than hivemind's: history, ledger and pace belong to the weights, and in modes with local steps
what the swarm agrees on (`OuterState`). A joiner adopts all of it or nothing, if it is what most others say
that they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    RoleAdaptiveCompression,
    TensorRole,
)
from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.ballot import digest_of, joint_digest
from trahiv_cli.optim.history import MOST_STEPS, History
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.swarm.snapshot import Rank, is_plain, views_of
from trahiv_cli.swarm.state_averager import CorrectedStateAverager

if TYPE_CHECKING:
    from trahiv_cli.optim.local_steps import OuterState


class ExactStateAverager(CorrectedStateAverager):
    """Holds weights and optimizer state, and gives them to joiners; averages nothing.

    History, ledger and pace are kept by the optimizer, under `lock_state`. `statistics_codec` encodes the
    inner optimizer's state for joiners; a lossy one only where peers need not hold the same.
    """

    rpc_join_group: Any = None
    rpc_aggregate_part: Any = None  # not served: this averager is in no group
    donor: str = ""  # id of the peer that these weights were last downloaded from
    outer: OuterState | None = None  # what the swarm agrees on, in modes with local steps
    agreed: Sequence[torch.Tensor] | None = None  # the common weights, while the model's are others
    pace: Pace = DEFAULT_PACE  # of the round after this state

    # What the other parts of a peer do: go over to the pace of an adopted state; hear of each state that
    # somebody fetches, with the digest of `common_tensors`; say, in some seconds, whether to take over a
    # donor's state (no digest: it can't be compared).
    set_pace: Callable[[Pace], None] = staticmethod(lambda pace: None)
    note_given: Callable[[History, bytes], None] = staticmethod(lambda history, common: None)
    is_believed: Callable[[History, bytes, str], bool] = staticmethod(lambda history, common, donor: True)

    def __init__(self, *args: Any, statistics_codec: CompressionBase | None = None, **kwargs: Any) -> None:
        self.history, self.ledger = History(), Ledger()
        if statistics_codec is not None:
            rest = kwargs.get("state_compression", NoCompression())
            codec = RoleAdaptiveCompression(parameter=rest, optimizer=statistics_codec, default=rest)
            kwargs["state_compression"] = codec
        super().__init__(*args, **kwargs)

    @property
    def rank(self) -> Rank:
        """The rank of the history."""
        return self.history.rank

    def common_tensors(self) -> list[torch.Tensor]:
        """The weights that are agreed on; in modes with local steps, the outer momentum too."""
        common = super().common_tensors()
        common[: len(self.agreed or ())] = self.agreed or ()
        return common if self.outer is None else [*common, *self.outer.momentum]

    def own_metadata(self) -> dict[str, Any]:
        """Return what is small in the state beside what hivemind has there."""
        own: dict[str, Any] = {
            "history": self.history.to_wire(),
            "ledger": self.ledger.to_wire(),
            "pace": self.pace.to_wire(),
        }
        return own if self.outer is None else own | {"outer_rounds": self.outer.rounds}

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[Any]]:
        metadata, tensors, roles = super()._live_state()
        return metadata | self.own_metadata(), tensors, roles

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[CompressionInfo]]:
        """Copy the state for joiners, and note what is given; see the base class."""
        metadata, [flat], infos = super().get_current_state()
        num_common = sum(info.role is not TensorRole.OPTIMIZER for info in infos)
        common = common_digest((digest_of([one]) for one in views_of(flat, infos)[:num_common]), metadata)
        self.note_given(History.from_wire(metadata["history"]), common)
        return metadata, [flat], infos

    # -- adopted from others -------------------------------------------------------------------------

    def adopt_state(self, metadata: dict[str, Any], tensors: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Adopt a state and the pace that goes with it, whole or not at all; see the base class."""
        before, is_adopted = self.pace, False
        try:
            self.set_pace(Pace.from_wire(metadata.get("pace")))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a pace.") from error
        try:
            is_adopted = super().adopt_state(metadata, tensors, lowest)
        finally:
            if not is_adopted:
                self.set_pace(before)
        return is_adopted

    def is_welcome(self, metadata: dict[str, Any], common: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Whether a state is of a history that is far enough, and what most others say that they hold."""
        try:
            theirs = History.from_wire(metadata.get("history"))
            Ledger.from_wire(metadata.get("ledger"))
        except ValueError as error:
            raise RoundFailed("A peer sent a state without a history, or without a ledger.") from error
        rounds = metadata.get("outer_rounds")
        if self.outer is not None and not (isinstance(rounds, int) and 0 <= rounds <= MOST_STEPS):
            raise RoundFailed("A peer sent a state that does not say which fragment is next.")
        if theirs.step != metadata.get("epoch") or theirs.rank < lowest:
            return False
        _, own, roles = self._live_state()
        has_very_values = all(  # that others hold, too
            is_plain(self.state_compression, CompressionInfo.from_tensor(tensor, key=name, role=role))
            for tensor, (name, role) in zip(own, roles, strict=True)
            if role is not TensorRole.OPTIMIZER
        )
        digest = common_digest((digest_of([one]) for one in common), metadata) if has_very_values else b""
        return self.is_believed(theirs, digest, str(metadata.get("donor", "")))

    def take_note(self, metadata: dict[str, Any]) -> None:
        """Go on with the history of the state that was adopted; with local steps, from the agreed weights."""
        self.history, self.donor = History.from_wire(metadata["history"]), str(metadata.get("donor", ""))
        self.ledger = Ledger.from_wire(metadata["ledger"])
        if self.outer is not None:
            self.outer.rounds = metadata["outer_rounds"]
            for weight, agreed in zip(self.weights, self.outer.anchor, strict=True):
                weight.copy_(agreed)


def common_digest(digests: Iterable[bytes], metadata: Mapping[str, Any]) -> bytes:
    """Digest `common_tensors`, by the digest of each, with ledger, pace and next fragment; 32 bytes."""
    small = [metadata.get(name) for name in ("ledger", "pace", "outer_rounds")]
    return joint_digest([*digests, hashlib.sha256(MSGPackSerializer.dumps(small)).digest()])
