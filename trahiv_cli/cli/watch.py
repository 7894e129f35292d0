"""`watch` and `replay`: a page on this machine that shows a run."""

from __future__ import annotations

import getpass
import os
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trahiv_cli.cli.options import PEER_VARIABLE, argument, option, taken_peers
from trahiv_cli.cli.output import FormatOption, out, pasteable
from trahiv_cli.cli.owner import SwarmOption, remove, words_of
from trahiv_cli.errors import SetupError, TrahivError
from trahiv_cli.files import OWNER_FILE
from trahiv_cli.recipe.builtin import how_to_install
from trahiv_cli.run.control import reads_requests
from trahiv_cli.run.lock import RUNS, join_line

if TYPE_CHECKING:
    from trahiv_cli.run.control import Request
    from trahiv_cli.watch.server import Deed, Page

RunArgument = Annotated[Path | None, argument("RUN_DIR", "The run's folder. Default: the newest in runs/.")]
PortOption = Annotated[
    int,
    option(
        "--port N",
        "The port of this machine that the page is at. Default: a free one.",
        min=0,
        max=65535,
    ),
]
BrowserOption = Annotated[bool, option("--no-browser", "Only print the address of the page.")]


def watch(
    run_dir: RunArgument = None,
    peer: SwarmOption = None,
    port: PortOption = 0,
    no_browser: BrowserOption = False,
    format: FormatOption = None,
) -> None:
    """Show a run, or a swarm, on a page in your browser."""
    out.use(format)
    require_web("The page needs", "starlette", "uvicorn")
    from trahiv_cli.watch.guard import kept_token, new_token
    from trahiv_cli.watch.lookout import Follower, Lookout, Seen
    from trahiv_cli.watch.server import Page
    from trahiv_cli.watch.tail import Nothing, Tail

    texts = taken_peers(peer)
    if texts:
        if run_dir is not None:
            said = "name a run's folder, or a swarm by --peer, and not both"
            raise typer.BadParameter(said, param_hint="--peer")
        with closing(Follower(texts, PEER_VARIABLE)) as follower:
            open_page(Page(Nothing, new_token(), port, lookout=Lookout(follower)), no_browser, Path())
        return
    folder = run_dir or newest_run()
    if not folder.is_dir():
        raise SetupError(f"There is no folder {folder}.", hint="name the folder of a run")
    about = {"folder": folder.name}
    token = kept_token(folder)
    lookout = Lookout(Seen(folder))
    page = Page(lambda: Tail(folder), token, port, lookout=lookout, deeds=deeds_of(folder), about=about)
    open_page(page, no_browser, folder)


def newest_run() -> Path:
    """Return the folder in `runs` with the newest event; SetupError if there is none."""
    from trahiv_cli.telemetry.events import EVENT_FILE

    there = sorted(RUNS.glob(f"*/{EVENT_FILE}"), key=lambda path: path.stat().st_mtime)
    if not there:
        hint = "name its folder: trahiv watch DIR; or a swarm: trahiv watch --peer ADDR"
        raise SetupError("There is no run in runs/.", hint)
    return there[-1].parent


def replay(
    folders: Annotated[list[Path], argument("FOLDER...", "The folders of one run's peers, yours first.")],
    port: PortOption = 0,
    no_browser: BrowserOption = False,
    format: FormatOption = None,
) -> None:
    """Play back on the page what has happened in a run."""
    out.use(format)
    require_web("The page needs", "starlette", "uvicorn")
    from trahiv_cli.telemetry.events import EVENT_FILE
    from trahiv_cli.watch.guard import new_token
    from trahiv_cli.watch.server import Page
    from trahiv_cli.watch.tail import Recording, labels

    for folder in folders:
        if not (folder / EVENT_FILE).exists():
            raise SetupError(f"{folder} holds no {EVENT_FILE}.", hint="name folders of runs")
    page = Page(lambda: Recording(folders), new_token(), port, about={"replay": labels(folders)})
    open_page(page, no_browser, folders[0])


def require_web(need: str, *packages: str) -> None:
    """Raise SetupError, which begins with `need`, if a package of the extra `web` is missing."""
    try:
        for package in packages:
            import_module(package)
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{need} the package {error.name}, which is not installed.",
            hint=how_to_install("trahiv[web]"),
        ) from None


def open_page(page: Page, no_browser: bool, folder: Path) -> None:
    """Show the page's address, open it for a person at this machine, and serve it until Ctrl-C.

    The browser opens a private file in `folder`, which redirects to the page: other users of this machine can
    read the browser's command line, which must not contain the page's token.
    """
    from trahiv_cli.files import write_private

    way_in = folder.absolute() / "watch.html"

    def tell() -> None:
        out.record(page.url, "watching", url=page.url)
        client_and_server = os.environ.get("SSH_CONNECTION", "").split()
        if client_and_server:
            here = f"{getpass.getuser()}@{client_and_server[2]}"
            out.hint(f"on your own machine, first: ssh -L {page.port}:127.0.0.1:{page.port} {here}")
        elif not no_browser and has_display():
            import webbrowser

            try:
                redirect = f'<!doctype html><meta http-equiv="refresh" content="0; url={page.url}">'
                write_private(way_in, redirect.encode())
                webbrowser.open(way_in.as_uri())
            except OSError as error:
                out.hint(f"open that address yourself: {way_in} can't be written ({error.strerror})")

    try:
        page.run(tell)
    finally:
        way_in.unlink(missing_ok=True)


def has_display() -> bool:
    """Tell whether a browser can open a window here."""
    is_desktop = sys.platform in ("darwin", "win32")
    return is_desktop or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def deeds_of(folder: Path) -> dict[str, Deed]:
    """Return the actions that the page of a run offers; only the owner can invite and remove.

    An action that needs hivemind loads it, which takes seconds, only when it runs.
    """

    def wishing(what: Request | None, answer: str) -> Deed:
        def deed(_: dict[str, Any]) -> dict[str, Any]:
            from trahiv_cli.run.control import request

            request(folder, what)
            return {"message": answer}

        return deed

    def invite(wanted: dict[str, Any]) -> dict[str, Any]:
        from trahiv_cli.members.membership import Role
        from trahiv_cli.swarm.owner import OwnedSwarm

        is_watcher = wanted.get("watch") is True
        is_once = wanted.get("once") is True
        hours = wanted.get("hours")
        if not (hours is None or (isinstance(hours, int) and 0 < hours <= 10_000)):
            raise TrahivError("An invitation lasts a number of hours, at most 10,000.")
        if is_watcher and (is_once or hours is None):
            raise TrahivError("Who watches leaves no trace; nothing was made.", hint="give a time")
        lasts_s = None if hours is None else 3600.0 * hours
        role = Role.watcher if is_watcher else Role.member
        grant, path = OwnedSwarm(folder).invite(role, is_once=is_once, lasts_s=lasts_s)
        return {
            "message": f"It is {words_of(grant)}.",
            "line": pasteable(join_line(folder, f"@{path}"), path),
        }

    def kick(wanted: dict[str, Any]) -> dict[str, Any]:
        from trahiv_cli.swarm.owner import OwnedSwarm

        swarm = OwnedSwarm(folder)
        _, _, text = remove(swarm, str(wanted.get("peer")))
        if not swarm.synchronize():
            text += " No peer answers here; it counts once one sees this folder's peer."
        return {"message": text}

    deeds: dict[str, Deed] = {}
    if reads_requests(folder):
        deeds = {
            "pause": wishing("pause", "It pauses when its present local step is over."),
            "resume": wishing(None, "It goes on, unless a condition of --only-when speaks against that."),
            "finish": wishing("finish", "It leaves when the swarm has taken its present step."),
        }
    if (folder / OWNER_FILE).exists():
        deeds |= {"invite": invite, "kick": kick}
    return deeds
