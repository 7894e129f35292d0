"""A peer that trains by plain hivemind, for an attacker.

    python -m tests.kit.plain_swarm RUN SECONDS [ADDRESS]

It prints a JSON line with its address, and one for each step.
"""

from __future__ import annotations

import json
import sys
import time

import hivemind
import torch

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def main(run: str, seconds: float, *addresses: str) -> None:
    """Train for so long, with the peer at an address or as the first one."""
    torch.set_num_threads(1)
    dht = hivemind.DHT(host_maddrs=[LOOPBACK], initial_peers=addresses or None, start=True)
    print(json.dumps({"address": str(dht.get_visible_maddrs()[0])}), flush=True)
    train(dht, run, time.monotonic() + seconds)


def train(dht: hivemind.DHT, run: str, until: float) -> None:
    """Fit a plane."""
    model = torch.nn.Linear(4, 1)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=run,
        target_batch_size=64,
        batch_size_per_step=8,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        matchmaking_time=1.0,
        averaging_timeout=10.0,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )
    while time.monotonic() < until:
        samples = torch.randn(8, 4)
        (model(samples) - samples.sum(1, keepdim=True)).square().mean().backward()
        before = optimizer.local_epoch
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.local_epoch != before:
            print(json.dumps({"step": optimizer.local_epoch, "at": time.time()}), flush=True)
        time.sleep(0.05)
    optimizer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
