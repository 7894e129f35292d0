"""The state of a peer, which it gives to joiners or adopts: weights, optimizer state, committed history.

A state is more than weights: history, ledger and pace belong to them, and in modes with local steps so do the
values that the swarm agrees on (`OuterState`). A joiner adopts all of it or nothing. `state_service` gives it
to other peers, and fetches theirs; this module composes, copies and adopts it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.utils import MSGPackSerializer, nested_flatten
from torch.optim.lr_scheduler import LRScheduler

from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.history import MOST_STEPS, History
from trahiv_cli.progress.ledger import Ledger
from trahiv_cli.progress.pace import Pace
from trahiv_cli.progress.scores import BestScore, Scores
from trahiv_cli.rounds.buffers import Buffers
from trahiv_cli.rounds.codecs import CODECS
from trahiv_cli.rounds.vote import digest_of, joint_digest
from trahiv_cli.shared_memory import shared_bytes
from trahiv_cli.state.inner_optimizer import adopt_optimizer_state
from trahiv_cli.state.outer import OuterState
from trahiv_cli.state.scored import BestWeights, ScoredSchedule
from trahiv_cli.state.snapshot import buffer_bytes, copy_into, is_plain, views_of

Groups = Sequence[dict[str, Any]]


class PeerState:
    """The weights and the optimizer's state of one peer. `SwarmOptimizer` makes it.

    Args:
        committed: the facts that belong to the weights; hold its `lock` while they change together.
        params: groups of trainable float32 tensors on the model's device.
        make_optimizer: makes the inner optimizer for such groups.
        make_schedule: makes a learning-rate schedule of that optimizer, in swarm steps.
        codec: encodes the tensors for joiners.
        offload: whether the inner optimizer steps copies of the weights, in host memory.
        keeps_best: whether the weights with the best score are kept; see `RunSettings`.
    """

    def __init__(
        self,
        params: Groups,
        make_optimizer: Callable[[Groups], torch.optim.Optimizer],
        make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        *,
        committed: CommittedCell,
        buffers: Buffers,
        codec: CompressionBase,
        offload: bool = False,
        keeps_best: BestScore | None = None,
    ) -> None:
        self.set_agreed(None)
        self.committed = committed
        self.lock_state = committed.lock
        self.buffers = buffers
        self.codec = codec
        self.main_parameters = tuple(param for group in params for param in group["params"])
        self.offload_optimizer = offload
        if offload:
            params = [group | {"params": [_host_copy(one) for one in group["params"]]} for group in params]
        self.optimizer = make_optimizer(params)
        self.scheduler: LRScheduler | None = None
        self._scored_schedule: ScoredSchedule | None = None
        if make_schedule is not None:
            schedule = make_schedule(self.optimizer)
            if ScoredSchedule.is_one(schedule):
                self._scored_schedule = ScoredSchedule(schedule)
            else:
                self.scheduler = schedule
        self.best = None if keeps_best is None else BestWeights(keeps_best)
        self.lock_state.watch(weight.device for weight in self.weights if weight.is_cuda)

    @property
    def local_epoch(self) -> int:
        """The step of the swarm that these weights have reached; hivemind's name for it."""
        return self.committed.now.history.step

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters that the inner optimizer moves; copies in host memory if it is offloaded."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def set_agreed(self, agreed: Sequence[torch.Tensor] | None, outer: OuterState | None = None) -> None:
        """Set the weights that all peers hold, if the model has other values; `outer`: with local steps."""
        self.agreed = agreed
        self.outer = outer

    def common_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are the same for all peers of a step: weights first, then buffers.

        In modes with local steps the weights are the agreed ones, and the outer momentum comes last.
        """
        common = self._agreed_tensors()
        return common if self.outer is None else [*common, *self.outer.momentum]

    @property
    def follows_scores(self) -> bool:
        """Whether a part of the state follows from the run's scores."""
        return self.best is not None or self._scored_schedule is not None

    def judge(self, score: float) -> None:
        """Add the agreed score of the present weights; the caller must hold the state's lock."""
        now = self.committed.now
        scores = now.scores.extend(now.history.step, score)
        self.committed.change(scores=scores)
        if self.best is not None:
            self.best.judge(scores, self._agreed_tensors())
        self.move_schedule(now.history.step)

    @torch.no_grad()
    def load_best(self, last_score: float | None = None) -> tuple[int, float] | None:
        """Put the weights and buffers with the best score into the model, for good.

        This peer's own `last_score`, of the present weights, counts, too: no round has followed to agree on
        it.

        Returns:
            Their step and score; None, with nothing changed, if no weights were scored.
        """
        if self.best is None:
            return None
        tensors = self.best.tensors
        scores = self.committed.now.scores
        if last_score is not None:
            scores = scores.extend(self.local_epoch, last_score)
        found = scores.best(self.best.which)
        if not tensors or found is None or found[0] == self.local_epoch:
            return found
        num_weights = len(self.main_parameters)
        for targets in (self.main_parameters, self.agreed or ()):
            for target, value in zip(targets, tensors, strict=False):
                target.copy_(value)
        for agreed, value in zip(self.buffers.common, tensors[num_weights:], strict=True):
            agreed.copy_(value)
        self.buffers.restore()
        return found

    def _agreed_tensors(self) -> list[torch.Tensor]:
        return [*(self.agreed or self.weights), *self.buffers.common]

    def own_metadata(self) -> dict[str, Any]:
        """Return the small values that belong to the state.

        They are history, ledger and pace; in modes with local steps the next fragment; if there are any, the
        scores and the digest of the best weights.
        """
        now = self.committed.now
        own: dict[str, Any] = {
            "history": now.history.to_wire(),
            "ledger": now.ledger.to_wire(),
            "pace": now.pace.to_wire(),
        }
        if self.outer is not None:
            own["outer_rounds"] = self.outer.rounds
        if now.scores.of_steps:
            own["scores"] = now.scores.to_wire()
        if self.best is not None and self.best.tensors:
            own["best"] = self.best.digest
        return own

    def copy(self) -> tuple[dict[str, Any], torch.Tensor, list[CompressionInfo], bytes]:
        """Copy the state of one step for joiners. No step is taken during the copy.

        Returns metadata, one buffer with all tensors as stored (see `snapshot.copy_into`; each tensor that is
        handed to another process takes two open files), the tensors' infos, and the digest of
        `common_tensors`.
        """
        with torch.no_grad(), self.lock_state:
            metadata, tensors, roles = self._live_state()
            num_common = len(self.common_tensors())
            flat = shared_bytes(buffer_bytes(tensors))
            copy_into(flat, tensors, self.lock_state.changes)
        infos = _infos_of(tensors, roles)
        common = common_digest((digest_of([one]) for one in views_of(flat, infos)[:num_common]), metadata)
        return metadata, flat, infos, common

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[TensorRole]]:
        """Return metadata and the tensors themselves, with their roles.

        The tensors are those of `common_tensors`, the optimizer's, and the best weights.
        """
        common = self.common_tensors()
        layout: list[dict[str, Any]] = []
        statistics: list[torch.Tensor] = []
        for value in nested_flatten(self.optimizer.state_dict()):
            if isinstance(value, torch.Tensor):
                layout.append({"type": "tensor", "index": len(statistics)})
                statistics.append(value)
            else:
                layout.append({"type": "value", "value": value})
        best = [] if self.best is None else self.best.tensors
        roles = self._roles_of(common) + [TensorRole.OPTIMIZER] * len(statistics)
        roles += [TensorRole.UNSPECIFIED] * len(best)
        history = self.committed.now.history
        metadata = {"rank": list(history.rank), "epoch": history.step, "optimizer_metadata": layout}
        return metadata | self.own_metadata(), [*common, *statistics, *best], roles

    def _roles_of(self, common: Sequence[torch.Tensor]) -> list[TensorRole]:
        num_weights = len(self.main_parameters)
        others = len(common) - num_weights
        return [TensorRole.PARAMETER] * num_weights + [TensorRole.UNSPECIFIED] * others

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the state, as stored."""
        _, tensors, _ = self._live_state()
        return buffer_bytes(tensors)

    # -- adopting another state ---------------------------------------------------------------------

    def check(self, metadata: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Committed:
        """Return the facts that belong to a state which a peer's `copy` returned. Nothing is changed.

        `metadata` has the id of its `donor`, too; `tensors` are on the CPU.

        Raises:
            RoundFailed: it is not a whole state of this run.
        """
        try:
            history = History.from_wire(metadata.get("history"))
            ledger = Ledger.from_wire(metadata.get("ledger"))
            pace = Pace.from_wire(metadata.get("pace"))
            scores = Scores.from_wire(metadata.get("scores", []))
        except ValueError as error:
            raise RoundFailed(
                "A peer sent a state whose history, ledger, pace or scores can't be read."
            ) from error
        if pace.codec is not None and pace.codec not in CODECS:
            raise RoundFailed("A peer sent a state with a codec that this version does not have.")
        common = self._common_of(tensors, pace)
        shapes = [tensor.shape for tensor in (*self.weights, *self.buffers.common)]
        best = self._best_of(metadata, tensors)
        if [tensor.shape for tensor in best] not in ([], shapes):
            raise RoundFailed("The best weights that a peer sent have other shapes than this model.")
        if pace.has_local_steps:  # the outer momentum of each weight
            shapes += [weight.shape for weight in self.weights]
        rounds = metadata.get("outer_rounds")
        if not isinstance(metadata.get("optimizer_metadata"), (list, tuple)):
            raise RoundFailed("A peer sent a state without its optimizer's layout.")
        if [tensor.shape for tensor in common] != shapes:
            raise RoundFailed("The state that a peer sent has other shapes than this model, or broke off.")
        if not all(bool(tensor.isfinite().all()) for tensor in (*common, *best)):
            raise RoundFailed("The weights that a peer sent are not finite.")
        if pace.has_local_steps and not (isinstance(rounds, int) and 0 <= rounds <= MOST_STEPS):
            raise RoundFailed("A peer sent a state that does not say which fragment is next.")
        if best and self._is_exact(best) and digest_of(best) != metadata["best"]:
            raise RoundFailed("A peer sent best weights of another digest than it said.")
        return Committed(history, ledger, pace, frozenset({str(metadata.get("donor", ""))}) - {""}, scores)

    def _best_of(
        self, metadata: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the best weights of a state, its last tensors; none if it has none."""
        if self.best is None or "best" not in metadata:
            return ()
        return tensors[-len(self.main_parameters) - len(self.buffers.common) :]

    def _is_exact(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no codec rounds these tensors of a state."""
        return all(is_plain(self.codec, info) for info in _infos_of(tensors, self._roles_of(tensors)))

    def _common_of(self, tensors: Sequence[torch.Tensor], pace: Pace) -> Sequence[torch.Tensor]:
        """Return the tensors of a state that its peers have in common; the optimizer's come after them."""
        num_weights = len(self.main_parameters)
        return tensors[: num_weights * (1 + pace.has_local_steps) + len(self.buffers.common)]

    def digest_of(self, metadata: Mapping[str, Any], tensors: Sequence[torch.Tensor], pace: Pace) -> bytes:
        """Digest the common tensors of a checked state; empty bytes if a codec has rounded them."""
        common = self._common_of(tensors, pace)
        is_exact = self._is_exact(common)
        return common_digest((digest_of([one]) for one in common), metadata) if is_exact else b""

    def adopt(
        self,
        committed: Committed,
        metadata: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        *,
        is_wanted: Callable[[], bool],
        set_pace: Callable[[Pace], None],
    ) -> bool:
        """Adopt a state for which `check` returned `committed`.

        Args:
            committed: the facts that belong to the state.
            metadata: see `check`.
            tensors: see `check`.
            is_wanted: called under the lock, right before anything changes.
            set_pace: changes to the pace of the state, under the lock.

        Returns:
            Whether the state was still wanted. If not, nothing was changed.

        Raises:
            RoundFailed: the optimizer's state is not whole, or another optimizer's; nothing was changed.
        """
        common = self._common_of(tensors, committed.pace)
        best = self._best_of(metadata, tensors)
        statistics = tensors[len(common) : len(tensors) - len(best)]
        with torch.no_grad(), self.lock_state.changing():
            if not is_wanted():
                return False
            try:
                adopt_optimizer_state(self.optimizer, metadata["optimizer_metadata"], statistics)
            except ValueError as error:
                raise RoundFailed(f"A peer sent a state that is not whole, or not ours: {error}.") from error
            set_pace(committed.pace)
            for target, tensor in zip(self.common_tensors(), common, strict=True):
                target.copy_(tensor)
            self.buffers.restore()
            if self.best is not None:
                self.best.adopt(best)
            self.committed.change(**vars(committed))
            if self.outer is not None:
                self.outer.continue_at(metadata["outer_rounds"])
                for weight, agreed in zip(self.weights, self.outer.anchor, strict=True):
                    weight.copy_(agreed)
            self.move_schedule(committed.history.step)
        self.write_back()
        return True

    def move_schedule(self, step: int) -> None:
        """Set the learning rates of a step."""
        if self._scored_schedule is not None:
            self._scored_schedule.follow(self.committed.now.scores)
        if self.scheduler is not None and self.scheduler._step_count != step + 1:
            self.scheduler.last_epoch = step - 1
            self.scheduler._step_count = step
            with warnings.catch_warnings():  # a joiner is at a step without having taken one
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.scheduler.step()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the weights into the model, if the optimizer steps copies of them."""
        if self.offload_optimizer:
            for param, stepped in zip(self.main_parameters, self.weights, strict=True):
                param.copy_(stepped, non_blocking=True)


def _host_copy(param: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(param.detach().to("cpu", torch.float32, copy=True))


def _infos_of(tensors: Sequence[torch.Tensor], roles: Sequence[TensorRole]) -> list[CompressionInfo]:
    triples = zip(range(len(tensors)), tensors, roles, strict=True)
    return [CompressionInfo.from_tensor(tensor, key=key, role=role) for key, tensor, role in triples]


def common_digest(digests: Iterable[bytes], metadata: Mapping[str, Any]) -> bytes:
    """Digest `common_tensors`, given the digest of each, with the small values of a state; 32 bytes."""
    small = [metadata.get(name) for name in ("ledger", "pace", "outer_rounds")]
    small += [metadata[name] for name in ("scores", "best") if name in metadata]
    return joint_digest([*digests, hashlib.sha256(MSGPackSerializer.dumps(small)).digest()])
