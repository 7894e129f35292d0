"""Peers compare what they loaded before they train together: the digests of `assets.likeness`.

A peer whose base model, adapters, tokenizer or number of samples are not the swarm's is refused with the
reason, and gets into no group: groups compare the digests, too. Two unlike peers that enter within the same
second compare again when they find no group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.swarm.node import Node, likeness_key
from trahiv_cli.swarm.records import disbelieve

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

# Of data that is divided: peers that count it differently would train some samples twice, others never.
SAMPLES, SHARDS = "number of samples", "number of shards"

# What must be alike -> SHA-256 in hexadecimal; of `SAMPLES` and `SHARDS` the number itself.
Likeness = dict[str, str]


def without(own: Likeness, part: str) -> Likeness:
    """Leave one part out of the comparison."""
    return {name: digest for name, digest in own.items() if name != part}


def digest(own: Likeness) -> bytes:
    """One digest of all, 8 bytes, for the schema of a group."""
    return hashlib.sha256(repr(sorted(own.items())).encode()).digest()[:8]


def publish_likeness(node: Node, run_id: str, own: Likeness) -> bool:
    """Tell others what this peer loaded; say whether a peer of the DHT (this one counts) keeps it."""
    return node.publish(likeness_key(run_id), own, LIKENESS_TTL_S)


def require_alike(node: Node, run_id: str, own: Likeness, others: Sequence[str]) -> None:
    """Refuse to train with peers (`others`, ids base58) most of which loaded something else than `own`.

    RecipeMismatch has every difference. Those that published nothing are passed over.
    """
    published = node.fetch(likeness_key(run_id))
    theirs: list[Likeness] = []
    for peer in (peer for peer in others if peer in published):
        record = published[peer]
        if isinstance(record, dict) and all(isinstance(value, str) for value in record.values()):
            theirs.append(record)
        else:
            disbelieve(peer, "what it says that it loaded can't be read")
    unlike = [record for record in theirs if any(record.get(part) != own[part] for part in own)]
    if len(unlike) * 2 <= len(theirs):
        return
    parts = [part for part in own if unlike[0].get(part) != own[part]]
    different = tuple((part, own[part][:12], unlike[0].get(part, "")[:12]) for part in parts)
    raise RecipeMismatch(
        f"What this peer loaded is not what the swarm trains: its {' and '.join(parts)} differ. "
        "Nothing was averaged.",
        hint=OTHER_DATA if set(parts) <= {SAMPLES, SHARDS} else OTHER_MODEL,
        differences=different,
    )
