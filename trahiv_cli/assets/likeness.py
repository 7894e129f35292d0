"""What two peers must have in common before they may average, as digests that are cheap to compare.

A recipe cannot know what came of its model on this machine: another revision of a branch, a folder that was
changed. Averaging over different bases gives adapters that fit neither.

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

FROZEN, TRAINABLE, INITIAL = "frozen weights", "trained weights", "initial weights"
TOKENIZER = "tokenizer"


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
