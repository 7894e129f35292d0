"""The folder of a run: its owner, a joiner's choice of it, its contents, and the way into its swarm.

Two peers in one folder would have one identity in the swarm, and overwrite each other's checkpoints. So a
peer locks its folder before it writes anything there, and keeps the lock while it runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trahiv_cli.errors import FolderTaken, RecipeError, RecipeMismatch, SetupError, TrahivError
from trahiv_cli.files import INVITED_BY_FILE, OWNER_FILE, write_whole
from trahiv_cli.members.identity import IDENTITY_FILE
from trahiv_cli.members.invitation import Invitation, find_credentials, read_invitation, visitor_credentials
from trahiv_cli.members.membership import Membership
from trahiv_cli.reach.reachability import ReachRules
from trahiv_cli.recipe.agreement import AgreedRun, differences, resolve, what_changed
from trahiv_cli.recipe.document import render
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import DhtSection, Recipe
from trahiv_cli.run.lock import RESOLVED, RUNS, holder_of, owned
from trahiv_cli.swarm.known_peers import FILE, KnownPeers
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.owner import visiting
from trahiv_cli.swarm.published_run import PublishedRun, fetch_offer
from trahiv_cli.telemetry.events import (
    EVENT_FILE,
    PEERS_FILE,
    Event,
    EventFile,
    Events,
    RotatingFile,
    to_json,
)

CHECKPOINTS = "checkpoints"
"""Name of the checkpoints' folder in a run's folder."""

MANIFEST = "manifest.json"
"""Name of the file that is written last into a checkpoint."""

ANOTHER_PLACE = "choose another place with --output-dir DIR, or move that folder away"


class Saved(NamedTuple):
    """A complete checkpoint on disk."""

    path: Path
    step: int


def saved_in(checkpoints: Path) -> list[Saved]:
    """Return the complete checkpoints in a folder, the oldest first, without checking them for damage."""
    folders = [manifest.parent for manifest in checkpoints.glob(f"step-*/{MANIFEST}")]
    steps = {path: path.name.removeprefix("step-") for path in folders}
    found = [Saved(path, int(step)) for path, step in steps.items() if step.isdigit()]
    return sorted(found, key=lambda one: one.step)


# -- a joiner's choice ------------------------------------------------------------------------------


def earlier_peers(output_dir: Path | None) -> list[Path]:
    """List the folders in which a peer may have trained before, and that no peer uses now.

    These are `output_dir`, or the folders in `runs`, the newest first; swarms started here come last.
    """
    if output_dir:
        return [output_dir]
    free = [folder for folder in RUNS.glob("*/") if holder_of(folder) is None]
    return sorted(free, key=lambda folder: ((folder / OWNER_FILE).exists(), -folder.stat().st_mtime))


def membership_in(folder: Path) -> Membership | None:
    """Return the membership of a folder's peer, if any; raises `SetupError` if others can read its file."""
    credentials = visitor_credentials(folder, Invitation())
    return credentials.membership if credentials else None


def known_run(earlier: Sequence[Path], addresses: Sequence[str] | None) -> Path | None:
    """Return the newest folder with a run to resume whose peers include one of these; None: any peers."""
    named = {address.rpartition("/p2p/")[2] for address in addresses or ()}
    for folder in earlier:
        is_meant = addresses is None or named & KnownPeers(folder / FILE).addresses.keys()
        if is_meant and saved_in(folder / CHECKPOINTS):
            return folder
    return None


def known_identity(earlier: Sequence[Path], membership: Membership | None) -> Path | None:
    """Return the key file of the newest peer that joined with this membership, if any.

    The swarm may admit that peer and refuse a newcomer.
    """
    for folder in earlier:
        if membership and membership_in(folder) == membership:
            key = folder / IDENTITY_FILE
            return key if key.exists() else None
    return None


def folders_to_join(run: str, membership: Membership | None, earlier: Sequence[Path]) -> list[Path]:
    """List the folders for a peer that joins a run: `runs/<run>`, `runs/<run>-2` and so on.

    The folder in which this peer joined with the same `membership` before comes first, then other folders of
    joiners, then the rest.
    """

    def strangeness(folder: Path) -> int:
        has_joined = folder in earlier and (folder / INVITED_BY_FILE).exists()
        if not has_joined or (folder / OWNER_FILE).exists():
            return 2
        return 0 if membership_in(folder) == membership else 1

    names = [run, *(f"{run}-{number}" for number in range(2, 100))]
    return sorted((RUNS / name for name in names), key=strangeness)


@contextlib.contextmanager
def owned_first(folders: Sequence[Path]) -> Iterator[Path]:
    """Own, as `owned` does, the first of some folders that is free."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            with contextlib.suppress(FolderTaken):
                stack.enter_context(owned(folder))
                break
        else:  # none is free: raise the error of the first
            folder = stack.enter_context(owned(folders[0]))
        yield folder


# -- the contents -----------------------------------------------------------------------------------


def read_run(folder: Path) -> AgreedRun:
    """Read a folder's run from its resolved recipe; raises `SetupError` if none is of this version."""
    path = folder / RESOLVED
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
        match recipe:
            case {"hivemind_config": {"opt": dict(opt)}} if opt.get("averager_opts") == {}:
                del opt["averager_opts"]  # a field of earlier versions, at its default
        return AgreedRun.of(parse_recipe(recipe, str(path)))
    except (OSError, ValueError, RecursionError, RecipeError) as error:
        raise SetupError(f"{path} is not a recipe of this version of trahiv.", ANOTHER_PLACE) from error


def keep_recipe(folder: Path, run: AgreedRun, text: str | None) -> None:
    """Write the recipe into the run's folder, as the user wrote it (`text`), and resolved.

    Raises `SetupError` if the folder holds a run of another agreement, which stays unchanged, or can't be
    written.
    """
    resolved = folder / RESOLVED
    is_own_copy = False
    if resolved.exists():
        there = read_run(folder)
        is_own_copy = resolved.read_text(encoding="utf-8") == text
        fields, files = what_changed(there, run)
        if fields or files:
            different = ", ".join([*(f"the content of {file}" for file in files), *fields])
            old_files = f"bring the old {' and '.join(files)} back to go on with it, or " if files else ""
            raise SetupError(
                f"{folder} holds another run, {there.run_id}: it differs in {different}.",
                hint=old_files + ANOTHER_PLACE,
            )
    data = run.recipe.to_data()
    if text is None:
        text = "\n".join(line for line, _ in render(data)) + "\n"
    try:
        write_whole(resolved, (json.dumps(data, indent=2) + "\n").encode())
        if not is_own_copy:  # a resolved copy does not replace it
            write_whole(folder / "recipe.yaml", text.encode())
    except OSError as error:
        raise SetupError(
            f"The recipe can't be written into {folder}: {error.strerror or error}.",
            hint="free some space, or choose another place with --output-dir DIR",
        ) from error


def warn_of_edited_data(run: AgreedRun, events: Events) -> None:
    """Warn if a new run differs from the newest similar run only in data files that were edited since."""
    for path in sorted(RUNS.glob(f"*/{RESOLVED}"), key=lambda path: -path.stat().st_mtime):
        other = path.parent
        with contextlib.suppress(SetupError):  # a folder of another version
            fields, files = what_changed(read_run(other), run)
            if fields or not files or not (saved := saved_in(other / CHECKPOINTS)):
                continue
            names = " and ".join(files)
            differ = "differ from those" if files[1:] else "differs from the one"
            message = f"This is another run, from step 0: {names} {differ} that {other} was trained on, "
            message += f"which is at step {saved[-1].step}."
            hint = f"bring the old {names} back and type the same command to go on with {other}"
            events.warn("data", message, hint)
            return


@contextlib.contextmanager
def recorded(folder: Path, events: Events) -> Iterator[None]:
    """While the block runs, write events, and a `TrahivError` that ends it, to `events.jsonl`.

    The newest event `peers`, with the statuses of the swarm's peers, is in a file of its own.
    """

    def keep_peers(event: Event) -> None:
        if event["event"] == "peers":
            with contextlib.suppress(OSError):  # the next one is written as well
                write_whole(folder / PEERS_FILE, to_json(event).encode())

    with contextlib.closing(EventFile(folder / EVENT_FILE)) as record:
        events.add(record)
        events.add(keep_peers)
        try:
            yield
        except TrahivError as error:  # not for other listeners: the command line prints it
            Events(record).emit("error", code=error.code, message=error.message, hint=error.hint)
            raise
        finally:
            events.remove(record)
            events.remove(keep_peers)


def log_to(path: Path, *, is_verbose: bool) -> None:
    """Send the logs of libraries and of child processes to a bounded file instead of the screen."""
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.captureWarnings(True)
    handler = RotatingFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if is_verbose else logging.WARNING)


# -- the way into the swarm -------------------------------------------------------------------------


def scout(
    invitation: Invitation,
    preferred_run: str | None = None,
    known: Path | None = None,
    identity: Path | None = None,
) -> PublishedRun:
    """Visit a swarm only to fetch the run that it trains.

    `preferred_run` selects one of several runs; the default is the invitation's. If the run was trained here
    before, `known` is its folder, which has addresses of peers and perhaps a membership. `identity` is a key
    file to use; None: a new one.

    Raises:
        Unreachable, NotAdmitted: see `Node`; also if no peer publishes a run.
        RecipeMismatch: the swarm has several runs and none was selected, or the run is another one than the
            invitation's.
    """
    named = [address.rpartition("/p2p/")[2] for address in invitation.addresses]
    met = KnownPeers.remembered(known / FILE if known else None)
    credentials = visitor_credentials(known, invitation)
    with visiting(invitation.addresses, credentials, met, identity) as node:
        offer = fetch_offer(node, named, preferred_run or invitation.run_id, invitation.fingerprint)
    if not offer.fingerprint.startswith(invitation.fingerprint):
        raise RecipeMismatch(
            f"The swarm trains {offer.run_id} with fingerprint {offer.fingerprint[:12]}; the invitation is "
            f"to {invitation.run_id} with {invitation.fingerprint[:12]}. Nothing was changed.",
            hint="ask the person who invited you for a fresh line",
        )
    return offer


def require_same_agreement(recipe: Recipe, offer: PublishedRun) -> AgreedRun:
    """Agree on the recipe under the swarm's run_id; raises `RecipeMismatch` with all differences."""
    run = resolve(recipe, offer.run_id)
    if different := differences(run.agreement, offer.wire["shared"]):
        raise RecipeMismatch(
            f"The swarm trains another recipe: it differs in {len(different)} of the fields that all share.",
            hint="join without RECIPE to take the swarm's, or change these fields",
            differences=different,
        )
    return run


def start_node(
    section: DhtSection,
    folder: Path,
    invitation: Invitation,
    *,
    identity: Path | None = None,
    is_public: bool = False,
    reach: ReachRules,
) -> Node:
    """Start the node of a peer; with a checkpoint, it starts even if no peer answers.

    If the invitation has no addresses, the node joins through `section.initial_peers`. `is_public` opens a
    swarm that this peer starts. Raises the same errors as `Node`.
    """
    if reach.wanted == "dial-out":
        section = section.model_copy(update={"client_mode": True})
    if not invitation.addresses:
        invitation = read_invitation(section.initial_peers)
    return Node(
        section,
        identity or Path(section.identity_path or folder / IDENTITY_FILE),
        invitation.addresses,
        met=KnownPeers(folder / FILE),
        must_reach=not saved_in(folder / CHECKPOINTS),
        credentials=find_credentials(folder, invitation, is_public=is_public),
        reach=reach,
    )
