"""Peers compare digests of their loaded models, tokenizers and data before they train together.

Equal recipes can still load different models: a branch has another revision, or a folder was changed.
Averaging over different base models gives adapters that fit neither. So a peer that differs is refused with
the reason. It also gets into no group, because groups compare the digests, too. Two peers that differ and
enter within the same second compare again when they find no group.

The digests cover:

- the number of samples or shards, if peers divide the data,
- names, shapes, dtypes and values of frozen weights, and of saved buffers that training does not move,
- names, shapes and dtypes of trained weights, and of saved buffers that training moves,
- the tokenizer's vocabulary, special tokens and chat template.

They do not cover:

- the values of weights that are quantized while they are loaded, because processors round them differently;
  a digest of their files, or the hub's commit, stands for them,
- the initial values of trained weights, because a GPU, or another kind of processor, draws others; newcomers
  get the swarm's.

A recipe's agreement covers the settings that shape a step. Without a recipe, peers compare them here, too
(`compared.py`).
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
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.net.keys import MAX_RECORD_BYTES, likeness_key
from trahiv_cli.progress.reports import PeerProgress
from trahiv_cli.rounds.buffers import moving_buffers, persistent_buffers
from trahiv_cli.swarm.node import Node

logger = logging.getLogger(__name__)

FROZEN = "frozen weights"
TRAINABLE = "trained weights"
TOKENIZER = "tokenizer"
# For divided data: peers with different counts would train some samples twice and others never.
SAMPLES = "number of samples"
SHARDS = "number of shards"
VALUES = "values of samples"

UNLISTED = "other settings"
"""Name of the digest of all parts that do not fit into a record."""


class Comparison:
    """Publishes the parts of a peer that must be equal on all peers, and compares them with the others'.

    `InSwarm.create_optimizer` creates one per call of `train`. `own` maps each part's name to a short
    printable text: its SHA-256 in hexadecimal, or the value itself.
    """

    def __init__(self, node: Node, run_id: str, own: dict[str, str]) -> None:
        self.node = node
        self._key = likeness_key(run_id)
        self._own = _fitting(own)
        self._publish_at = 0.0
        self.schema = hashlib.sha256(repr(sorted(self._own.items())).encode()).digest()[:8]
        """Only peers with the same 8 bytes average with each other."""
        self.publish()

    def publish(self) -> None:
        """Publish again every 5 minutes, because records are lost with the peers that store them."""
        if time.monotonic() >= self._publish_at:
            with contextlib.suppress(SwarmError):  # retried after the next step
                # An hour is longer than any step: only steps trigger the next publication.
                if self.node.publish(self._key, self._own, 3600.0):
                    self._publish_at = time.monotonic() + 300.0

    def require_alike(self, others: Collection[PeerProgress]) -> None:
        """Raise `RecipeMismatch` if most others differ from this peer, with all differences from one of them.

        Peers that published nothing are ignored.
        """
        published = self.node.fetch(self._key)
        theirs: list[dict[str, str]] = []
        for peer in (peer.peer_id for peer in others if peer.peer_id in published):
            record = published[peer]
            texts = [*record, *record.values()] if isinstance(record, dict) else [None]
            if all(isinstance(text, str) and text.isprintable() for text in texts):
                # Earlier versions also publish "initial weights", which they compare before the first step.
                theirs.append({part: text for part, text in record.items() if part != "initial weights"})
            else:
                ignore_peer(peer, "the parts that it compares can't be read")
        unlike = [differing for record in theirs if (differing := _differing(self._own, record))]
        if len(unlike) * 2 <= len(theirs):
            return
        names = [name for name, _, _ in unlike[0]]
        raise RecipeMismatch(
            f"This peer and the swarm do not train the same; they differ in: {', '.join(names)}. "
            "Nothing was averaged.",
            hint="; ".join(dict.fromkeys(map(_hint_for, names))),
            differences=tuple(unlike[0]),
        )

    def repeat(self, others: Collection[PeerProgress]) -> None:
        """Compare again after no group was found; raise `RecipeMismatch` if most others differ.

        Two peers that entered together could not compare before; the one with the greater id leaves.
        """
        own = self.node.peer_id
        if len(others) < 2 and own <= min((peer.peer_id for peer in others), default=own):
            return
        try:
            self.require_alike(others)
        except RecipeMismatch:
            raise
        except SwarmError as error:  # bad links, perhaps also the reason for the missing group
            logger.warning("The others' parts were not compared; that is tried again: %s", error.message)


def _hint_for(part: str) -> str:
    if part in (FROZEN, TRAINABLE, TOKENIZER):
        return (
            "use the same model and tokenizer: the same `model.revision` (a commit, not a branch), or a "
            "fresh copy of the folder"
        )
    if part in (SAMPLES, SHARDS, VALUES):
        return (
            "bring the same data; or, so that each peer reads data of its own, let all begin with "
            '`swarm.divide_data: false` (in Python: swarm={"divide_data": False})'
        )
    return "give these the same values on all peers; docs/rounds.md lists the exceptions"


def _fitting(own: dict[str, str]) -> dict[str, str]:
    """Return the parts that fit into a record, and one digest of all others."""
    fitting = dict(own)
    others = {}
    while sum(len(f"{part}{text}".encode()) + 6 for part, text in fitting.items()) > MAX_RECORD_BYTES - 100:
        part, text = fitting.popitem()
        others[part] = text
    if others:
        fitting[UNLISTED] = hashlib.sha256(repr(sorted(others.items())).encode()).hexdigest()
    return fitting


def _differing(own: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str, str]]:
    """List the parts that differ: name, own text, their text; digests are shortened.

    A part is left out if one peer does not list it and may have it among its `UNLISTED` parts.
    """

    def shown(text: str | None) -> str:
        return "not set" if text is None else text[: 12 if len(text) == 64 else None]

    both = own, theirs
    return [
        (part, shown(own.get(part)), shown(theirs.get(part)))
        for part in {**own, **theirs}
        if own.get(part) != theirs.get(part) and all(part in one or UNLISTED not in one for one in both)
    ]


def asset_digests(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Digest a fresh model and its tokenizer for comparison; takes a second per 1.5 GB of frozen weights.

    Returns:
        SHA-256 in hexadecimal by `FROZEN`, `TRAINABLE` (without values), and with a tokenizer `TOKENIZER`.
    """
    frozen = hashlib.sha256()
    trainable = hashlib.sha256()
    is_quantized = False
    moving = moving_buffers(model)
    for name, tensor in sorted([*model.named_parameters(), *persistent_buffers(model).items()]):
        layout = f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode()
        is_trained = tensor.requires_grad or name in moving
        (trainable if is_trained else frozen).update(layout)
        if not is_trained and type(tensor).__module__.startswith("bitsandbytes"):
            is_quantized = True
        elif not is_trained and tensor.numel():
            values = tensor.detach().cpu().contiguous().view(-1)
            frozen.update(values.view(torch.uint8).numpy().data)
    if is_quantized:
        frozen.update(origin_of(model))
    digests = {FROZEN: frozen.hexdigest(), TRAINABLE: trainable.hexdigest()}
    if tokenizer is not None:
        content = {
            "vocab": tokenizer.get_vocab(),
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "template": tokenizer.chat_template,
        }
        digests[TOKENIZER] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return digests


def origin_of(model: torch.nn.Module) -> bytes:
    """Return the origin of quantized weights: the hub's commit, or a digest of the folder's files."""
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
