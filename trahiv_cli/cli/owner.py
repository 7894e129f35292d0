"""Commands for the owner of a closed swarm: `invite`, `members` and `kick`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trahiv_cli.cli.options import PEER_VARIABLE, argument, option, parse_seconds, taken_peers
from trahiv_cli.cli.output import FormatOption, out
from trahiv_cli.errors import Unreachable

if TYPE_CHECKING:
    from trahiv_cli.members.invitation import Invitation
    from trahiv_cli.members.membership import Grant
    from trahiv_cli.swarm.owner import OwnedSwarm

FolderOption = Annotated[
    Path | None, option("--output-dir DIR", "The run's folder. Default: the newest in runs/.")
]
SwarmOption = Annotated[
    list[str] | None,
    option(
        "--peer ADDR",
        f"An invitation, or @FILE with one. Can be repeated. Also read from {PEER_VARIABLE}.",
    ),
]


def invite(
    once: Annotated[bool, option("--once", "Let one peer in, and no other.")] = False,
    expires: Annotated[
        float | None,
        option(
            "--expires T",
            "Let nobody in after that time (2h, 3d); members that your peer saw before stay.",
            parser=parse_seconds,
        ),
    ] = None,
    watch: Annotated[bool, option("--watch", "Let people look on, but not train.")] = False,
    close: Annotated[
        str | None, option("--close ID", "First close an invitation, or `all` of them; members stay.")
    ] = None,
    output_dir: FolderOption = None,
    format: FormatOption = None,
) -> None:
    """Print a new line with which others can join your swarm."""
    out.use(format)
    if watch and once:
        said = "who watches leaves no trace: give a time, --expires 1d"
        raise typer.BadParameter(said, param_hint="--once")
    from trahiv_cli.members.membership import Role
    from trahiv_cli.run.lock import join_line
    from trahiv_cli.swarm.owner import OwnedSwarm, own_folder

    swarm = OwnedSwarm(output_dir or own_folder())
    if close is not None:
        if not swarm.synchronize():
            raise Unreachable(
                "No peer of the swarm answers here, so the peers that joined with it are not known; "
                "nothing was changed.",
                hint="try again while your peer runs, or another one does",
            )
        swarm.close(None if close == "all" else close)
        out.say("Closed. Peers that joined with it stay; if there is no room for all, the first ones do.")
        hand_on(swarm)
    role = Role.watcher if watch else Role.member
    grant, path = swarm.invite(role, is_once=once, lasts_s=expires)
    out.invitation(path, **fields_of(grant), join=join_line(path.parent, f"@{path}"))
    out.say(f"It is {words_of(grant)}.")


def members(
    peer: SwarmOption = None,
    output_dir: FolderOption = None,
    format: FormatOption = None,
) -> None:
    """List the members of a closed swarm and its open invitations."""
    out.use(format)
    from trahiv_cli.files import MEMBER_FILE
    from trahiv_cli.members.invitation import read_owner
    from trahiv_cli.swarm.owner import OwnedSwarm, list_members

    folder, invitation = swarm_named(peer, output_dir, MEMBER_FILE)
    listed = list_members(folder, invitation)
    for one in sorted(listed, key=lambda one: (bool(one["objection"]), not one["is_there"], one["peer_id"])):
        state = f"out: {one['objection']}" if one["objection"] else "there" if one["is_there"] else "away"
        out.record(f"{one['peer_id']}  by {one['invitation']}  {state}", "member", **one)
    if folder is not None and read_owner(folder) is not None:
        for grant in OwnedSwarm(folder).given():
            out.record(f"invitation {grant.id}  {words_of(grant)}", "invitation", **fields_of(grant))


def swarm_named(peer: list[str] | None, output_dir: Path | None, file: str) -> tuple[Path | None, Invitation]:
    """Find the swarm to look at: by its invitations, or else by the folder of a run.

    The folder is `output_dir`, or without any invitation the newest in `runs` that holds `file`.
    """
    from trahiv_cli.members.invitation import read_invitation
    from trahiv_cli.swarm.owner import own_folder

    texts = taken_peers(peer)
    invitation = read_invitation(texts)
    return output_dir or (None if texts else own_folder(file)), invitation


def kick(
    peer: Annotated[str, argument("PEER", "A peer's id, or its last characters.")],
    output_dir: FolderOption = None,
    format: FormatOption = None,
) -> None:
    """Remove a peer from your swarm, and close its invitation."""
    out.use(format)
    from trahiv_cli.swarm.owner import OwnedSwarm, own_folder

    swarm = OwnedSwarm(output_dir or own_folder())
    found, is_closed, text = remove(swarm, peer)
    is_handed_on = hand_on(swarm)
    out.record(text, "kicked", peer_id=found, is_handed_on=is_handed_on)
    if is_closed:
        out.hint("`trahiv invite` makes a fresh one")
    else:
        out.hint("`trahiv invite --close all` keeps it from returning with that one under another name")


def remove(swarm: OwnedSwarm, peer: str) -> tuple[str, bool, str]:
    """Remove a peer from the swarm, by its id or the end of its id.

    Returns its id, whether the invitation with which it joined is closed, and a sentence with both.
    """
    swarm.synchronize()
    found = swarm.find(peer)
    if is_closed := swarm.take_out(found):
        words = ", and the invitation that it joined with is closed."
    else:
        words = ". It is not known which invitation it joined with, so none was closed."
    return found, is_closed, f"{found} is out{words}"


def hand_on(swarm: OwnedSwarm) -> bool:
    """Send a decision to the swarm, or warn that it takes effect later."""
    if not (is_handed_on := swarm.synchronize()):
        out.warning(
            "unreachable",
            "No peer of the swarm answers here; it counts from when one of them sees this folder's peer.",
            "nothing to do if that peer runs: it hands this on within seconds; else start it",
        )
    return is_handed_on


def fields_of(grant: Grant) -> dict[str, Any]:
    """Return an invitation's fields for an event."""
    return {
        "id": grant.id,
        "role": grant.role.name,
        "once": grant.is_once,
        "expires": grant.expires or None,
    }


def words_of(grant: Grant) -> str:
    """Describe an invitation: its purpose, for how many peers, and until when."""
    what = "to look on" if grant.role.name == "watcher" else "to train along"
    number = "for one peer" if grant.is_once else "for any number of peers"
    form = "until %Y-%m-%d %H:%M" if grant.expires else "until it is closed"
    return f"{what}, {number}, {time.strftime(form, time.localtime(grant.expires))}"
