"""How many bytes a step costs a peer: trahiv beside plain hivemind, counted at the network device.

Two peers train 8M parameters (the LoRA of a 7B) in a network namespace of their own, whose loopback device
counts every byte: parts, votes, the DHT, acknowledgements. Needs root, for the namespace.

    python benchmarks/round_traffic.py
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind import compression

from trahiv_cli.optim.assemble import build_optimizer
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm import corrections
from trahiv_cli.swarm.node import Node

CLONE_NEWNET = 0x40000000  # linux/sched.h
SHAPES = [(1024, 1024)] * 8
BATCH, TARGET, PACE_S = 10, 100, 0.2
MATCHMAKING_S = 3.0
HOST = "/ip4/127.0.0.1/tcp/0"

Step = Callable[[], None]


def loopback_bytes() -> int:
    """Bytes that the namespace's loopback device has sent."""
    line = next(
        row for row in Path("/proc/net/dev").read_text().splitlines() if row.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[8])


def parameters() -> list[torch.nn.Parameter]:
    """8M values, the same in every peer."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]


def trahiv(
    folder: Path, address: str | None, params: list[torch.nn.Parameter], codec: str
) -> tuple[Any, Any, str]:
    """Enter a swarm of trahiv's."""
    dht = DhtSection(host_maddrs=[HOST], nat_port_map=False, auto_nat=False)
    node = Node(dht, folder / f"{os.getpid()}.key", (address,) if address else ())
    optimizer = build_optimizer(
        {
            "run_id": "traffic",
            "target_batch_size": TARGET,
            "matchmaking_time": MATCHMAKING_S,
            "grad_compression": codec,
        },
        dht=node.dht,
        params=[{"params": params}],
        optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3),
        scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0),
        samples_per_step=BATCH,
        max_grad_norm=0.0,
    )
    optimizer.tracker.refresh()
    if address is None or not optimizer.load_state_from_peers(60.0):
        optimizer.enter_step(optimizer.history)
    return optimizer, node, node.addresses()[0].maddr


def plain_hivemind(
    folder: Path, address: str | None, params: list[torch.nn.Parameter], codec: str
) -> tuple[Any, Any, str]:
    """Enter a swarm of hivemind's, with its defaults but for the matchmaking time."""
    del folder
    kind = {"none": compression.NoCompression, "float16": compression.Float16Compression}[codec]()
    dht = hivemind.DHT(
        initial_peers=[address] if address else [],
        host_maddrs=[HOST],
        start=True,
        use_relay=False,
        auto_nat=False,
    )
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="traffic",
        params=params,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3),
        target_batch_size=TARGET,
        batch_size_per_step=BATCH,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=30.0,
        grad_compression=kind,
        state_averaging_compression=kind,
    )
    return optimizer, dht, str(dht.get_visible_maddrs()[0])


SYSTEMS = {"plain hivemind 1.1.12": plain_hivemind, "trahiv": trahiv}


def peer(number: int, system: str, codec: str, folder: Path, address: Any, stop: Any, steps: Any) -> None:
    """Train until told to stop; keep `steps[number]` up to date."""
    torch.set_num_threads(1)
    params = parameters()
    start = None if number == 0 else address.get(timeout=60)
    optimizer, owner, own = SYSTEMS[system](folder, start, params, codec)
    if number == 0:
        address.put(own)
    generator = torch.Generator().manual_seed(number)
    while not stop.is_set():
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator) * 1e-3
        time.sleep(PACE_S)
        optimizer.step(batch_size=BATCH)
        for param in params:
            param.grad = None
        steps[number] = optimizer.local_epoch
    optimizer.shutdown()
    (owner.close if hasattr(owner, "close") else owner.shutdown)()


def measure(system: str, codec: str, num_steps: int) -> dict[str, Any]:
    """Count the bytes of `num_steps` steps of two peers."""
    context = mp.get_context("fork")
    address, stop, steps = context.Queue(), context.Event(), context.Array("q", 2)
    with tempfile.TemporaryDirectory() as folder:
        peers = [
            context.Process(target=peer, args=(n, system, codec, Path(folder), address, stop, steps))
            for n in range(2)
        ]
        for one in peers:
            one.start()
        try:
            wait_until(lambda: min(steps) >= 2 or not all(one.is_alive() for one in peers))
            first, bytes_before = min(steps), loopback_bytes()
            wait_until(lambda: min(steps) >= first + num_steps)
            taken, sent = min(steps) - first, loopback_bytes() - bytes_before
        finally:
            stop.set()
            for one in peers:
                one.join(timeout=60)
                one.kill()
    return {"system": system, "codec": codec, "steps": taken, "bytes_a_step": sent / 2 / taken}


def wait_until(is_true: Callable[[], bool], limit_s: float = 300.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError("the peers did not get there")
        time.sleep(0.05)


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="steps to count (default: 20)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise SystemExit("can't make a network namespace: run this as root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    corrections.apply()
    rows = [measure(system, codec, options.steps) for codec in ("none", "float16") for system in SYSTEMS]
    print(
        "| system | codec | steps | MB a peer sends for a step | of plain hivemind |\n|---|---|---|---|---|"
    )
    for row in rows:
        plain = next(r for r in rows if r["codec"] == row["codec"] and r["system"] != "trahiv")
        share = row["bytes_a_step"] / plain["bytes_a_step"]
        megabytes = row["bytes_a_step"] / 1e6
        print(f"| {row['system']} | {row['codec']} | {row['steps']} | {megabytes:.1f} | {share:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
