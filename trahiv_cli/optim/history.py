"""What a swarm has committed so far, as a chain of digests: equal digests mean equal pasts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DIGEST_BYTES = 16

MOST_STEPS = 2**32 - 1  # of any run: a step takes four bytes in reports
MOST_SAMPLES = 2**62  # of any run: a larger number could not be sent any more, once rounds are added


@dataclass(frozen=True)
class History:
    """The committed steps behind a state. Peers average only with peers of the same history."""

    step: int = 0  # swarm steps committed
    samples: int = 0  # behind them, of all peers
    digest: bytes = bytes(DIGEST_BYTES)  # of all steps in their order

    @property
    def rank(self) -> tuple[int, bytes]:
        """Orders states: the greater one is taken over by the others.

        It grows with each step. Of the two halves of a swarm that was cut the one with more samples has the
        greater one; the digest decides between equals, alike for everybody.
        """
        return self.samples, self.digest

    def extend(self, *, samples: int, proof: bytes, steps: int = 1) -> History:
        """Commit one more round, of so many steps and of so many samples of all peers.

        `proof` is the digest of the average that is applied, the same for all that apply it.
        """
        step = self.step + steps
        link = b"%s %d %d %s" % (self.digest, step, samples, proof)
        return History(step, self.samples + samples, hashlib.sha256(link).digest()[:DIGEST_BYTES])

    def to_wire(self) -> list[int | bytes]:
        """Return it as a list that MessagePack carries."""
        return [self.step, self.samples, self.digest]

    @classmethod
    def from_wire(cls, data: object) -> History:
        """Read what `to_wire` gave, or raise `ValueError`."""
        match data:
            case [int(step), int(samples), bytes(digest)] if (
                0 <= step <= MOST_STEPS and 0 <= samples <= MOST_SAMPLES and len(digest) == DIGEST_BYTES
            ):
                return cls(step, samples, digest)
        raise ValueError(f"not a history: {data!r}")
