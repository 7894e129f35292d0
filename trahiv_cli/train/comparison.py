"""Peers compare what they loaded before they train together, as digests that are cheap to compare.

A recipe cannot know what came of its model on this machine: another revision of a branch, a folder that was
changed. Averaging over different bases gives adapters that fit neither. So an unlike peer is refused with the
reason, and gets into no group: groups compare the digests, too. Two unlike peers that enter within the same
second compare again when they find no group.

Covered: the number of samples, where they are divided; names, shapes, dtypes and values of all weights that
are not trained; names and shapes of those that are, and where all are, the values that they begin with; the
tokenizer's vocabulary, special tokens and chat template. Not covered: the values of weights that are
quantized while they are loaded, because processors round them differently; the files or the hub commit that
they came from stand for them. Nor the values that adapters begin with: a GPU draws other ones than a CPU, and
newcomers get the swarm's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.optim.reports import PeerProgress
from trahiv_cli.swarm.node import Node, likeness_key
from trahiv_cli.swarm.records import disbelieve

logger = logging.getLogger(__name__)

LIKENESS_TTL_S = 3600.0  # longer than any step: it is published again with steps, not by the clock
REPUBLISH_S = 300.0

OTHER_MODEL = (
    "use the same model and tokenizer: the same `model.revision` (a commit, not a branch), or a fresh copy "
    "of the folder; for a new model, the same versions of torch and transformers"
)
OTHER_DATA = (
    "bring the same data; or, so that each peer reads data of its own, let all begin with "
    '`swarm.divide_data: false` (in Python: swarm={"divide_data": False})'
)

FROZEN, TRAINABLE, INITIAL = "frozen weights", "trained weights", "initial weights"
TOKENIZER = "tokenizer"
# Of data that is divided: peers that count it differently would train some samples twice, others never.
SAMPLES, SHARDS = "number of samples", "number of shards"


class Comparison:
    """Compares digests of what this peer loaded with those of the others, and publishes them.

    `own` has the SHA-256 of each part in hexadecimal; of `SAMPLES` and `SHARDS` the number itself.
    """

    def __init__(self, node: Node, run_id: str, own: dict[str, str]) -> None:
        self.node, self._key, self._own = node, likeness_key(run_id), own
        # What stays true while weights are trained.
        self._lasting = {part: digest for part, digest in own.items() if part != INITIAL}
        self._publish_at = 0.0
        self.schema = hashlib.sha256(repr(sorted(self._lasting.items())).encode()).digest()[:8]
        """Peers average only with those that have the same 8 bytes."""
        self.publish()

    def publish(self) -> None:
        """Publish again now and then: records go with the peers that hold them."""
        if time.monotonic() >= self._publish_at:
            with contextlib.suppress(SwarmError):  # the next step tries again
                if self.node.publish(self._key, self._own, LIKENESS_TTL_S):
                    self._publish_at = time.monotonic() + REPUBLISH_S

    def require_alike(self, others: Collection[PeerProgress], *, has_begun: bool) -> None:
        """Raise `RecipeMismatch`, with every difference, if most others loaded something else.

        Those that published nothing are passed over. Initial weights may differ in a run that has begun.
        """
        own, published = self._lasting if has_begun else self._own, self.node.fetch(self._key)
        theirs: list[dict[str, str]] = []
        for peer in (peer.peer_id for peer in others if peer.peer_id in published):
            record = published[peer]
            if isinstance(record, dict) and all(isinstance(value, str) for value in record.values()):
                theirs.append(record)
            else:
                disbelieve(peer, "what it says that it loaded can't be read")
        unlike = [record for record in theirs if any(record.get(part) != own[part] for part in own)]
        if len(unlike) * 2 <= len(theirs):
            return
        parts = [part for part in own if unlike[0].get(part) != own[part]]
        raise RecipeMismatch(
            f"What this peer loaded is not what the swarm trains: its {' and '.join(parts)} differ. "
            "Nothing was averaged.",
            hint=OTHER_DATA if set(parts) <= {SAMPLES, SHARDS} else OTHER_MODEL,
            differences=tuple((part, own[part][:12], unlike[0].get(part, "")[:12]) for part in parts),
        )

    def repeat(self, others: Collection[PeerProgress]) -> None:
        """Raise `RecipeMismatch` if there is no group because the others loaded something else.

        Of two that entered together, and could not compare before, the one with the greater id leaves.
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


def likeness(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Digest what peers must have in common of a fresh model; a second for each 1.5 GB of frozen weights.

    Returns:
        SHA-256 in hexadecimal by `FROZEN`, `TRAINABLE` (names and shapes), where nothing is frozen
        `INITIAL`, which only matters while the swarm is at step 0, and with a tokenizer `TOKENIZER`.
    """
    frozen, trainable, initial = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    is_quantized = False
    all_trained = all(weight.requires_grad for weight in model.parameters())
    for name, weight in sorted(model.named_parameters()):
        layout = f"{name} {tuple(weight.shape)} {weight.dtype};".encode()
        (trainable if weight.requires_grad else frozen).update(layout)
        if not weight.requires_grad and type(weight).__module__.startswith("bitsandbytes"):
            is_quantized = True
        elif all_trained or not weight.requires_grad:
            values = weight.detach().cpu().contiguous().view(-1)
            if values.numel():
                (initial if weight.requires_grad else frozen).update(values.view(torch.uint8).numpy().data)
    if is_quantized:
        frozen.update(origin_of(model))
    digests = {FROZEN: frozen.hexdigest(), TRAINABLE: trainable.hexdigest()}
    if all_trained:
        digests[INITIAL] = initial.hexdigest()
    if tokenizer is not None:
        told = {
            "vocab": tokenizer.get_vocab(),
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "template": tokenizer.chat_template,
        }
        digests[TOKENIZER] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return digests


def origin_of(model: torch.nn.Module) -> bytes:
    """Name where quantized weights came from: the hub's commit, or a digest of the folder's files."""
    config: Any = getattr(model, "config", None)
    if commit := getattr(config, "_commit_hash", None):
        return str(commit).encode()
    digest = hashlib.sha256()
    folder = Path(str(getattr(config, "_name_or_path", "")))
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.digest()
