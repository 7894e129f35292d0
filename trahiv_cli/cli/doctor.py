"""`doctor`: check whether a peer can train on this machine, and show how to fix failures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.options import (
    RECIPE,
    AnnounceOption,
    FolderOption,
    HostOption,
    PeerOption,
    SetOption,
    taken_peers,
)
from trahiv_cli.cli.output import FormatOption, out

if TYPE_CHECKING:
    from trahiv_cli.doctor.checks import Check
    from trahiv_cli.doctor.network import Network
    from trahiv_cli.members.invitation import Invitation
    from trahiv_cli.recipe.schema import DhtSection, Recipe


def doctor(
    recipe: Annotated[str | None, RECIPE] = None,
    peer: PeerOption = None,
    host_maddr: HostOption = None,
    announce_maddr: AnnounceOption = None,
    output_dir: FolderOption = None,
    overrides: SetOption = None,
    format: FormatOption = None,
) -> None:
    """Look whether this machine can train, and how it is reached."""
    out.use(format)
    from trahiv_cli.doctor.checks import Check
    from trahiv_cli.members.invitation import read_invitation
    from trahiv_cli.recipe.load import load_recipe

    loaded = None if recipe is None else load_recipe(recipe, overrides or ()).recipe
    invitation = read_invitation(taken_peers(peer))
    changes = {"host_maddrs": host_maddr, "announce_maddrs": announce_maddr}
    network: Network | None = None
    bad: list[str] = []
    for found in looked_at(loaded, invitation, {key: on for key, on in changes.items() if on}, output_dir):
        if not isinstance(found, Check):
            network = found
            continue
        show(found)
        if found.verdict == "bad":
            bad.append(found.name)
    conclude(network, bad)


def looked_at(
    recipe: Recipe | None, invitation: Invitation, changes: dict[str, list[str]], folder: Path | None
) -> Iterator[Check | Network]:
    """Check the machine, then the network, as far as that is useful, and the hub."""
    from trahiv_cli.doctor.machine import examine_machine, names
    from trahiv_cli.recipe.schema import DhtSection
    from trahiv_cli.run.lock import RUNS

    asking = ThreadPoolExecutor(1).submit(names)  # it may take seconds
    yield from examine_machine(recipe, folder or RUNS)
    section = (recipe.hivemind_config.dht if recipe else DhtSection()).model_copy(
        update={"client_mode": False, **changes}
    )
    yield from network_of(section, invitation, folder)
    yield asking.result()


def network_of(section: DhtSection, invitation: Invitation, folder: Path | None) -> Iterator[Check | Network]:
    """Check the network, up to a failure that makes further checks useless."""
    from trahiv_cli.doctor.network import examine_members, examine_ports, examine_reach

    ports = examine_ports(section)
    yield ports
    if invitation.addresses:
        members = examine_members(invitation)
        yield members
        if members.verdict == "bad":
            return
    if ports.verdict == "fine":
        yield from examine_reach(invitation, section, folder)


def show(check: Check) -> None:
    """Show one check: a line, and below it the requirement and the fix."""
    marks = {"fine": ("32", "ok"), "poor": ("33", "poor"), "bad": ("1;31", "bad")}
    colour, mark = marks[check.verdict]
    lines = [f"{out.paint(colour, f'{mark:<5}')}{check.name:<11}{check.found}"]
    if check.verdict != "fine":
        more = {"wanted": check.wanted, "to do": check.fix}
        lines += [f"{'':16}{name}: {text}" for name, text in more.items() if text]
    out.record("\n".join(lines), "check", **check._asdict())


def conclude(network: Network | None, bad: list[str]) -> None:
    """Show in one sentence whether this peer can train; if not, exit with the code of the first failure."""
    ways, missed = network or ({}, ())
    code = 0
    if bad:
        said = f"You can't train here yet: see {', '.join(bad)}."
        codes = {"memory": 6, "members": 4, "swarm": 4, "membership": 5}  # docs/exit-codes.md
        code = codes.get(bad[0], 3)
    elif network and (ways or missed):
        said = network.sentence
        code = 0 if ways else 4
    else:
        said = "You can train here; `--peer LINE` says with whom."
    out.record(f"\n{said}", "verdict", message=said, ways=ways, missed=missed, exit_code=code)
    if code:
        raise typer.Exit(code)
