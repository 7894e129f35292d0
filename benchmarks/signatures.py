"""What signed claims and votes cost a peer, as a share of a round.

In a round a peer signs its claim and its vote, and checks those of all others; the leader of the group does
so, too. It all happens in one thread, whose processor time is what is counted.

    python benchmarks/signatures.py
"""

from __future__ import annotations

import statistics
import time

from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.members.records import peer_of, sign, verified
from trahiv_cli.progress.ledger import Spans
from trahiv_cli.rounds.claims import Claim, Measured
from trahiv_cli.rounds.vote import Vote

CLAIM = Claim(
    samples=64,
    weight=32_768.0,
    norm=1.25,
    state=bytes(8),
    measured=Measured(12.5, 0.2, 2**20, 2**20, 5e6),
    trained=Spans([(1_000_000, 1_000_032), (1_000_096, 1_000_128)]),
)
VOTE = Vote(bytes(32))
PEERS, ROUND_S, TIMES = 16, 0.2, 50


def main() -> None:
    """Measure, and print one line each."""
    keys = [RSAPrivateKey() for _ in range(PEERS)]
    ids = [PeerID.from_base58(peer_of(key.get_public_key().to_bytes()) or "") for key in keys]
    claims = [sign(key, b"step", CLAIM.to_bytes()) for key in keys]
    votes = [sign(key, b"round", VOTE.to_bytes()) for key in keys]
    spent = []
    for turn in range(TIMES):
        own = turn % PEERS
        started = time.thread_time()
        sign(keys[own], b"step", CLAIM.to_bytes())
        sign(keys[own], b"round", VOTE.to_bytes())
        for place in range(PEERS):
            if place != own:
                Claim.parse(verified(claims[place], ids[place], b"step"))
                Vote.parse(verified(votes[place], ids[place], b"round"))
        spent.append(time.thread_time() - started)
    cost = statistics.median(spent)
    print(f"a claim: {len(CLAIM.to_bytes())} bytes, signed {len(claims[0])}")
    print(f"a vote: {len(VOTE.to_bytes())} bytes, signed {len(votes[0])}")
    least, most = 1e3 * min(spent), 1e3 * max(spent)
    print(f"a round of {PEERS}: {1e3 * cost:.2f} ms a peer ({least:.2f} to {most:.2f})")
    print(f"that is {cost / ROUND_S:.2%} of {ROUND_S} s")


if __name__ == "__main__":
    main()
