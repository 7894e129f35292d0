"""Before a peer is in the swarm: what the swarm trains, whether it was there before, and its node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.recipe.agreement import agreement, differences, renamed
from trahiv_cli.recipe.schema import DhtSection, Recipe
from trahiv_cli.swarm.acquaintances import FILE, Acquaintances
from trahiv_cli.swarm.addresses import require_peer_address
from trahiv_cli.swarm.exchange import PublishedRun, fetch_offer
from trahiv_cli.swarm.identity import IDENTITY_FILE
from trahiv_cli.swarm.invitation import (
    OWNER_FILE,
    Invitation,
    find_standing,
    passing_standing,
    read_invitation,
)
from trahiv_cli.swarm.node import Node, visiting
from trahiv_cli.train.checkpoint import saved_in
from trahiv_cli.train.folder import RUNS, holder_of, membership_in


def known_run(addresses: Sequence[str], output_dir: Path | None) -> Path | None:
    """Find the newest folder of a run that was trained here with one of these peers, and can be resumed."""
    named = {address.rpartition("/p2p/")[2] for address in addresses}
    for folder in _resting(output_dir):
        is_meant = output_dir or named & Acquaintances(folder / FILE).addresses.keys()
        if is_meant and saved_in(folder):
            return folder
    return None


def known_identity(invitation: Invitation, output_dir: Path | None) -> Path | None:
    """Find the key file of a peer that joined with this invitation before, where `known_run` searches.

    That peer may be let in where a newcomer is not. Raises `SetupError` if others can read its secrets.
    """
    for folder in _resting(output_dir) if invitation.membership else ():
        if membership_in(folder) == invitation.membership:
            own = folder / IDENTITY_FILE
            return own if own.exists() else None
    return None


def _resting(output_dir: Path | None) -> list[Path]:
    """List `output_dir`, or the free folders of `runs`, the newest first; swarms started here come last."""
    if output_dir is not None:
        return [output_dir]
    free = [folder for folder in RUNS.glob("*/") if holder_of(folder) is None]
    return sorted(free, key=lambda folder: ((folder / OWNER_FILE).exists(), -folder.stat().st_mtime))


def scout(
    invitation: Invitation,
    preferred_run: str | None = None,
    known: Path | None = None,
    identity: Path | None = None,
) -> PublishedRun:
    """Visit a swarm, only to see what it trains.

    `preferred_run` is meant if the swarm has several and the invitation is to none of them. Of a run that was
    trained here before, `known` is the folder, which says where peers were, and `identity` the key file.

    Raises:
        Unreachable, NotAdmitted: see `Node`; also if no peer publishes a run.
        RecipeMismatch: it is not clear which run is meant, or it is not what this peer was invited to.
    """
    for address in invitation.addresses:
        require_peer_address(address)
    named = [address.rpartition("/p2p/")[2] for address in invitation.addresses]
    met = Acquaintances.remembered(known and known / FILE)
    with visiting(invitation.addresses, passing_standing(known, invitation), met, identity) as node:
        offer = fetch_offer(node, named, preferred_run or invitation.run_id)
    if not offer.fingerprint.startswith(invitation.fingerprint):
        raise RecipeMismatch(
            f"The swarm trains {offer.run_id} with fingerprint {offer.fingerprint[:12]}; the invitation is "
            f"to {invitation.run_id} with {invitation.fingerprint[:12]}. Nothing was changed.",
            hint="ask whoever invited you for a fresh line",
        )
    return offer


def require_same_agreement(recipe: Recipe, offer: PublishedRun) -> Recipe:
    """Return the recipe under the swarm's run_id; raises `RecipeMismatch` with all that differs."""
    if recipe.hivemind_config.opt.run_id is None:
        recipe = renamed(recipe, offer.run_id)
    if different := differences(agreement(recipe), offer.wire["shared"]):
        raise RecipeMismatch(
            f"The swarm trains another recipe: it differs in {len(different)} of the fields that all share.",
            hint="join without RECIPE to take the swarm's, or change these fields",
            differences=different,
        )
    return recipe


def start_node(
    section: DhtSection,
    folder: Path,
    invitation: Invitation,
    *,
    identity: Path | None = None,
    is_public: bool = False,
) -> Node:
    """Start the network part of a peer; one that has a checkpoint starts also if nobody answers.

    Without addresses in the invitation, `section.initial_peers` says whom it joins. `is_public`: the swarm
    that it starts is. Raises what `Node` does.
    """
    if not invitation.addresses:
        invitation = read_invitation(section.initial_peers)
    return Node(
        section,
        identity or Path(section.identity_path or folder / IDENTITY_FILE),
        invitation.addresses,
        met=Acquaintances(folder / FILE),
        must_reach=not saved_in(folder),
        standing=find_standing(folder, invitation, is_public=is_public),
    )
