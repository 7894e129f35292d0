"""What two peers must have alike before they may average, as digests that are cheap to compare.

A recipe names a model and a revision; it cannot know what came of them on this machine: another revision
of a branch, a folder that was changed, a tokenizer with one token more. Averaging over unlike bases gives
adapters that fit neither.

Covered: names, shapes, dtypes and values of all weights that are not trained; names and shapes of those
that are, and where all are, the values that they begin with; the tokenizer's vocabulary, special tokens and
chat template. Not covered: the values of weights that are quantized while they are loaded, because
processors round them differently; the files or the hub commit that they came from stand for them. Nor the
values that adapters begin with: a GPU draws other ones than a CPU, and newcomers get the swarm's.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

CHUNK_BYTES = 1 << 20

FROZEN, TRAINABLE, INITIAL = "frozen weights", "trained weights", "initial weights"
TOKENIZER = "tokenizer"


def likeness(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Digest what must be alike; about a second for each 1.5 GB of frozen weights.

    Args:
        model: with its adapters, before a checkpoint is loaded; nothing is changed.
        tokenizer: None where the caller has none.

    Returns:
        SHA-256 in hexadecimal by `FROZEN`, `TRAINABLE` (names and shapes), where nothing is frozen
        `INITIAL`, which only matters while the swarm is at step 0, and with a tokenizer `TOKENIZER`.
    """
    frozen, trainable, initial = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    is_quantized = False
    all_trained = all(weight.requires_grad for weight in model.parameters())
    for name, weight in sorted(model.named_parameters()):
        place = f"{name} {tuple(weight.shape)} {weight.dtype};".encode()
        if weight.requires_grad:
            trainable.update(place)
            if all_trained:
                _add(initial, weight)
            continue
        frozen.update(place)
        if _is_quantized(weight):
            is_quantized = True
        else:
            _add(frozen, weight)
    if is_quantized:
        frozen.update(_origin(model))
    digests = {FROZEN: frozen.hexdigest(), TRAINABLE: trainable.hexdigest()}
    if all_trained:
        digests[INITIAL] = initial.hexdigest()
    if tokenizer is not None:
        digests[TOKENIZER] = _tokenizer_digest(tokenizer)
    return digests


def _is_quantized(weight: torch.nn.Parameter) -> bool:
    return type(weight).__module__.startswith("bitsandbytes")


@torch.no_grad()
def _add(digest: Any, weight: torch.Tensor) -> None:
    flat = weight.detach().cpu().contiguous().view(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy())


def _origin(model: torch.nn.Module) -> bytes:
    """Name where quantized weights came from: the hub's commit, or a digest of the folder's files."""
    config: Any = getattr(model, "config", None)
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit).encode()
    digest = hashlib.sha256()
    folder = Path(str(getattr(config, "_name_or_path", "")))
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.digest()


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    told = {
        "vocab": tokenizer.get_vocab(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
