"""Commands for who started a closed swarm: `invite`, `members` and `kick`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trahiv_cli.cli.libraries import quiet_libraries
from trahiv_cli.cli.options import PEER_VARIABLE, parse_seconds, taken_peers
from trahiv_cli.cli.output import Format, FormatOption, out
from trahiv_cli.errors import Unreachable

if TYPE_CHECKING:
    from trahiv_cli.swarm.membership import Grant
    from trahiv_cli.swarm.owning import Listed, OwnedSwarm

FolderOption = Annotated[
    Path | None,
    typer.Option("--output-dir", metavar="DIR", help="The run's folder. Default: the newest in runs/."),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(invite)
    app.command()(members)
    app.command()(kick)


def invite(
    once: Annotated[bool, typer.Option("--once", help="Let one peer in, and no other.")] = False,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="T", help="Let nobody in after that time (2h, 3d); members stay."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Let people look on, but not train.")] = False,
    close: Annotated[
        str | None,
        typer.Option(
            "--close", metavar="ID", help="First close an invitation, or `all` of them; members stay."
        ),
    ] = None,
    output_dir: FolderOption = None,
    format: FormatOption = None,
) -> None:
    """Print a new line with which others can join your swarm."""
    out.use(format)
    if watch and once:
        raise typer.BadParameter(
            "who watches leaves no trace: give a time, --expires 1d", param_hint="--once"
        )
    lasts_s = parse_seconds(expires, "--expires", "2h or 3d")
    quiet_libraries()
    from trahiv_cli.swarm.invitation import join_by
    from trahiv_cli.swarm.membership import Role
    from trahiv_cli.swarm.owning import OwnedSwarm, own_folder

    estate = OwnedSwarm(own_folder(output_dir))
    if close is not None:
        if not estate.look():
            raise Unreachable(
                "No peer of the swarm answers here, so who came by it is not known; nothing was changed.",
                hint="try again while your peer runs, or another one does",
            )
        lost = estate.close(None if close == "all" else close)
        if lost:
            out.warning(
                "no-room",
                f"Closed; who came first stays. There was no room for the {lost} who came last.",
                "send them the line that is printed below: by it they join again",
            )
        else:
            out.say("Closed; who came by it stays.")
        _hand_on(estate)
    role = Role.watcher if watch else Role.member
    invitation, path = estate.invite(role, is_once=once, lasts_s=lasts_s)
    assert invitation.membership is not None
    grant = invitation.membership.grant
    out.invitation(
        path,
        **_fields(grant),
        join=join_by(path),
    )
    out.say(f"It is {_words(grant)}.")


def members(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="ADDR",
            help=f"An invitation, or @FILE with one. Can be repeated. Also read from {PEER_VARIABLE}.",
        ),
    ] = None,
    output_dir: FolderOption = None,
    format: FormatOption = None,
) -> None:
    """List the members of a closed swarm and its open invitations."""
    out.use(format)
    quiet_libraries()
    from trahiv_cli.swarm.invitation import MEMBER_FILE, Invitation, read_invitation, read_owner
    from trahiv_cli.swarm.owning import OwnedSwarm, invitation_id, list_members, own_folder

    texts = [*(peer or ()), *taken_peers()]
    invitation = read_invitation(texts) if texts else Invitation()
    folder = None if texts and output_dir is None else own_folder(output_dir, MEMBER_FILE)
    listed = list_members(folder, invitation)
    for one in sorted(listed, key=lambda one: (bool(one.objection), not one.is_there, one.peer_id)):
        if out.format is Format.json:
            out.event(
                "member",
                peer_id=one.peer_id,
                invitation=invitation_id(one.grant),
                role=one.grant.role.name,
                is_there=one.is_there,
                objection=one.objection or None,
            )
        else:
            out.data(f"{one.peer_id}  by {invitation_id(one.grant)}  {_state(one)}")
    if folder is None or read_owner(folder) is None:
        return
    for grant in OwnedSwarm(folder).given():
        if out.format is Format.json:
            out.event("invitation", **_fields(grant))
        else:
            out.data(f"invitation {invitation_id(grant)}  {_words(grant)}")


def kick(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A peer's id, or its last characters.")],
    output_dir: FolderOption = None,
    format: FormatOption = None,
) -> None:
    """Remove a peer from your swarm, and close its invitation."""
    out.use(format)
    quiet_libraries()
    from trahiv_cli.swarm.owning import OwnedSwarm, own_folder

    estate = OwnedSwarm(own_folder(output_dir))
    estate.look()
    found = estate.find(peer)
    is_closed = estate.take_out(found)
    is_handed_on = _hand_on(estate)
    if out.format is Format.json:
        out.event("kicked", peer_id=found, is_handed_on=is_handed_on)
    elif not is_closed:
        out.data(f"{found} is out. It is not known by which invitation it came, so none was closed.")
    else:
        out.data(f"{found} is out, and by the invitation that it came by nobody is let in any more.")
        out.hint("`trahiv invite` makes a fresh one")


def _hand_on(estate: OwnedSwarm) -> bool:
    is_handed_on = estate.hand_on()
    if not is_handed_on:
        out.warning(
            "unreachable",
            "No peer of the swarm answers here; it counts from when one of them sees this folder's peer.",
            "nothing to do if that peer runs: it hands this on within seconds; else start it",
        )
    return is_handed_on


def _fields(grant: Grant) -> dict[str, Any]:
    """List what an event says of an invitation."""
    from trahiv_cli.swarm.owning import invitation_id

    return {
        "id": invitation_id(grant),
        "role": grant.role.name,
        "once": grant.is_once,
        "expires": grant.expires or None,
    }


def _words(grant: Grant) -> str:
    """Say what an invitation is good for."""
    number = "for one peer" if grant.is_once else "for any number of peers"
    until = time.strftime("until %Y-%m-%d %H:%M", time.localtime(grant.expires)) if grant.expires else ""
    what = "to look on" if grant.role.name == "watcher" else "to train along"
    return ", ".join(filter(None, (what, number, until or "until it is closed")))


def _state(one: Listed) -> str:
    if one.objection:
        return f"out: {one.objection}"
    return "there" if one.is_there else "away"
