"""`status`: one look at a swarm, without training."""

from __future__ import annotations

import json
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trahiv_cli.cli.options import option
from trahiv_cli.cli.output import Format, FormatOption, out, visible
from trahiv_cli.cli.owner import FolderOption, SwarmOption, swarm_named
from trahiv_cli.errors import NotAdmitted, Unreachable

if TYPE_CHECKING:
    from trahiv_cli.swarm.node import Node
    from trahiv_cli.swarm.status import Status

REACHED = {
    "direct": "others dial it",
    "punched": "met through both routers",
    "relayed": "met through a member",
    "dials-out": "it dials others",
    "alone": "no peer has tried to reach it",
}
"""Way to reach a peer -> the words of `status` for it."""


def status(
    peer: SwarmOption = None,
    output_dir: FolderOption = None,
    follow: Annotated[bool, option("--follow", "Look again every 5 s, until Ctrl-C.")] = False,
    format: FormatOption = None,
) -> None:
    """Show who is in a swarm, how far it is and how each is reached."""
    out.use(format)
    from trahiv_cli.members.invitation import visitor_credentials
    from trahiv_cli.run.lock import holder_of
    from trahiv_cli.swarm.known_peers import FILE
    from trahiv_cli.swarm.owner import looking_in

    folder, invitation = swarm_named(peer, output_dir, FILE)
    try:
        with looking_in(folder, invitation, visitor_credentials(folder, invitation)) as node:
            if follow:
                follow_all(node)
            else:
                show_all(node)
    except (NotAdmitted, Unreachable):
        # A peer that joined by a single-use invitation can't visit with another identity, and a peer that
        # paused before it invited others has no address in its folder. But the folder's own peer has looked.
        if folder is None or holder_of(folder) is None or not (seen := seen_lately(folder)):
            raise
        show_runs(seen, time.time())


def follow_all(node: Node) -> None:
    """Show the swarm repeatedly until SIGINT or SIGTERM, even if a shell set these to be ignored."""
    from trahiv_cli.swarm.status import fetch_statuses, fields_of

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            if out.format is Format.json:
                out.event("peers", **fields_of(fetch_statuses(node).ours))
            else:
                out.data(time.strftime("%H:%M:%S"))
                show_all(node)
            time.sleep(5.0)


def seen_lately(folder: Path) -> dict[str, Status]:
    """Read the statuses that the peer of a run's folder saw within 5 minutes; empty if there are none."""
    from trahiv_cli.swarm.status import Status
    from trahiv_cli.telemetry.events import PEERS_FILE

    with suppress(OSError, ValueError, LookupError):
        event = json.loads((folder / PEERS_FILE).read_bytes())
        if event["t"] > time.time() - 300.0:
            return {one["peer_id"]: Status.model_validate(one) for one in event["peers"]}
    return {}


def show_all(node: Node) -> None:
    """Show each run of a swarm, and the peers that are in none of them."""
    from trahiv_cli.clock import swarm_time
    from trahiv_cli.net.keys import ADDRESSES_KEY
    from trahiv_cli.swarm.status import fetch_statuses

    statuses, foreign = fetch_statuses(node)
    others = node.fetch(ADDRESSES_KEY).keys()
    show_runs(statuses, swarm_time())
    for peer_id, (protocol, version) in sorted(foreign.items()):
        runs_with = f"trahiv {version}" if version else "an earlier version of trahiv"
        text = f"  {peer_id}  runs {runs_with}, of another protocol: it can't train along"
        out.record(text, "peer", peer_id=peer_id, run_id=None, version=version, protocol=protocol)
    for peer_id in sorted(others - statuses.keys() - foreign.keys()):
        out.record(f"  {peer_id}  tells of no run", "peer", peer_id=peer_id, run_id=None)
    if not statuses:
        out.say("A peer answers, but nothing is being trained in this swarm.")


def show_runs(statuses: dict[str, Status], now: float) -> None:
    """Show each run, its most advanced peers first; `now` is the swarm's time, in Unix seconds."""
    runs: dict[str, dict[str, Status]] = {}
    for peer_id, one in sorted(statuses.items(), key=lambda entry: (-entry[1].step, entry[0])):
        runs.setdefault(one.run_id, {})[peer_id] = one
    for run, peers in runs.items():
        show(run, peers, now)


def show(run: str, peers: dict[str, Status], now: float) -> None:
    """Show one run: its step, the time of its last round, and its peers in the given order.

    `now` is the swarm's time, in Unix seconds.
    """
    from trahiv_cli.swarm.status import moving

    there = moving(peers.values())
    step, max_steps, round_at = (
        statistics.median_low(getattr(one, name) for one in there)
        for name in ("step", "max_steps", "round_at")
    )  # a median: a single peer may report anything
    ago = max(0, round(now - round_at)) if round_at else None
    noun = "peer" if len(peers) == 1 else "peers"
    last = "no round yet" if ago is None else f"the last round was {ago} s ago"
    out.record(
        visible(f"{run}: step {step} of {max_steps}, {len(peers)} {noun}, {last}"),
        "run", run_id=run, step=step, max_steps=max_steps, peers=len(peers),
        seconds_since_round=ago,
    )  # fmt: skip
    for peer_id, one in peers.items():
        name = f" ({one.name})" if one.name else ""
        doing = {"training": f"step {one.step}"}.get(one.state, f"{one.state} at step {one.step}")
        text = f"  {peer_id}{name}  {doing}, {one.reached}: {REACHED[one.reached]}"
        waits = f"; waits for {one.waits_for}" if one.waits_for else ""
        out.record(visible(text + waits), "peer", peer_id=peer_id, **one.model_dump())
