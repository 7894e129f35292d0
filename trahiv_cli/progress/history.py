"""The history of a swarm: a chain of digests of all committed steps. Equal digests mean equal pasts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DIGEST_BYTES = 16

MOST_STEPS = 2**32 - 1  # limit for any run: a step takes four bytes in reports
MOST_SAMPLES = 2**62  # limit for any run: a larger number, plus a few rounds, could not be sent


@dataclass(frozen=True)
class History:
    """The committed steps behind a state. Peers average only with peers of the same history."""

    step: int = 0  # swarm steps committed
    samples: int = 0  # in these steps, of all peers
    digest: bytes = bytes(DIGEST_BYTES)  # of all steps, in order

    @property
    def rank(self) -> tuple[int, bytes]:
        """The sort key of states: peers adopt the state with the greater rank.

        It grows with each step. If a swarm was cut in two, the half with more samples ranks higher; the
        digest breaks ties, in the same way for all peers.
        """
        return self.samples, self.digest

    def extend(self, *, samples: int, proof: bytes, steps: int = 1) -> History:
        """Append a round of `steps` steps and `samples` samples over all peers.

        `proof` is the digest of the average that is applied, the same for all peers that apply it.
        """
        step = self.step + steps
        link = b"%s %d %d %s" % (self.digest, step, samples, proof)
        return History(step, self.samples + samples, hashlib.sha256(link).digest()[:DIGEST_BYTES])

    def to_wire(self) -> list[int | bytes]:
        """Return the history as a list that MessagePack carries."""
        return [self.step, self.samples, self.digest]

    @classmethod
    def from_wire(cls, data: object) -> History:
        """Read the list that `to_wire` returned, or raise `ValueError`."""
        match data:
            case [int(step), int(samples), bytes(digest)] if (
                0 <= step <= MOST_STEPS and 0 <= samples <= MOST_SAMPLES and len(digest) == DIGEST_BYTES
            ):
                return cls(step, samples, digest)
        raise ValueError(f"not a history: {data!r}")
