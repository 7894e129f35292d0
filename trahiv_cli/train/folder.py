"""The folder of a run: who owns it while a peer runs there, which one a peer takes, and what is kept in it.

Two peers in one folder would be the same peer to the swarm, and overwrite each other's checkpoints. So a peer
locks its folder before it writes anything there, and keeps the lock while it runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from trahiv_cli.errors import FolderTaken, RecipeError, SetupError, TrahivError
from trahiv_cli.recipe.agreement import run_id, what_changed
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.swarm.identity import write_whole
from trahiv_cli.swarm.invitation import (
    INVITATION_FILE,
    INVITED_BY_FILE,
    OWNER_FILE,
    Invitation,
    join_by,
    passing_standing,
)
from trahiv_cli.swarm.membership import Membership
from trahiv_cli.telemetry.events import EventFile, Events, RotatingFile
from trahiv_cli.train.checkpoint import saved_in

RUNS = Path("runs")
"""Where runs live unless the user says otherwise."""

RESOLVED, LOCK_FILE = "recipe.json", "lock"
MAX_FOLDERS_OF_A_RUN = 100
ANOTHER_PLACE = "choose another place with --output-dir DIR, or move that folder away"

_FLOCK = "hhqqi0q"  # the kernel's `struct flock`: type, whence, start, length, pid
_held: set[Path] = set()  # folders that this process owns; the kernel's locks are between processes only


# -- who owns it ------------------------------------------------------------------------------------


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[Path]:
    """Own a folder, which is made if necessary, while the block runs.

    The lock is a POSIX record lock: the kernel drops it when this process ends, and no child inherits it.

    Raises:
        FolderTaken: a peer of another process, or of this one, runs there.
        SetupError: the folder can't be written.
    """
    require_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise SetupError(
            f"The run's folder {folder} can't be written: {error.strerror or error}.",
            hint="choose another place with --output-dir DIR",
        ) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _taken(folder, holder_of(folder)) from error
            # Some network file systems have no locks: then nobody can be kept out.
        resolved = folder.resolve()
        _held.add(resolved)
        try:
            yield folder
        finally:
            _held.discard(resolved)


@contextlib.contextmanager
def owned_to_join(run: str, membership: Membership | None) -> Iterator[Path]:
    """Own, as `owned` does, the folder in `runs` of a peer that joins a run, in which no other peer runs.

    It is the one that this peer had before, by the membership that it joins with; else `runs/<run>`, or with
    a number behind it.
    """

    def strangeness(folder: Path) -> int:
        if (folder / OWNER_FILE).exists() or not (folder / INVITED_BY_FILE).exists():
            return 2
        return 0 if membership_in(folder) == membership else 1

    names = [run, *(f"{run}-{number}" for number in range(2, MAX_FOLDERS_OF_A_RUN))]
    folders = sorted((RUNS / name for name in names), key=strangeness)
    with contextlib.ExitStack() as stack:
        for folder in folders:
            with contextlib.suppress(FolderTaken):
                stack.enter_context(owned(folder))
                break
        else:
            raise _taken(folders[0], None)
        yield folder


def membership_in(folder: Path) -> Membership | None:
    """Return by what the peer of a folder is a member; raises `SetupError` if others can read that."""
    standing = passing_standing(folder, Invitation())
    return standing.membership if standing is not None else None


def require_free(folder: Path) -> None:
    """Raise `FolderTaken` if a peer runs in a folder."""
    if (pid := holder_of(folder)) is not None:
        raise _taken(folder, pid)


def holder_of(folder: Path) -> int | None:
    """Return the process whose peer runs in a folder; 0: one elsewhere, None: nobody does."""
    if folder.resolve() in _held:  # the kernel is not asked: closing the file would drop the lock
        return os.getpid()
    try:
        with (folder / LOCK_FILE).open() as file:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    except OSError:
        return None
    return int(found[4]) if found[0] != fcntl.F_UNLCK else None


def _taken(folder: Path, pid: int | None) -> FolderTaken:
    file = folder / INVITATION_FILE
    line = join_by(file) if file.exists() else "the `trahiv join` line that it printed"
    return FolderTaken(
        f"A peer runs in {folder} already{f' (process {pid})' if pid else ''}; nothing was changed.",
        hint=f"to train with that peer, type: {line}; for anything else, name another folder with "
        "--output-dir DIR (in Python: output_dir)",
    )


# -- what is kept in it -----------------------------------------------------------------------------


def read_run(folder: Path) -> Recipe:
    """Read the resolved recipe of a run's folder; raises `SetupError` if it has none of this version."""
    path = folder / RESOLVED
    try:
        return parse_recipe(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecursionError, RecipeError) as error:
        raise SetupError(f"{path} is not a recipe of this version of trahiv.", ANOTHER_PLACE) from error


def keep_recipe(folder: Path, recipe: Recipe, text: str) -> None:
    """Write the recipe into the run's folder, as given and resolved.

    Raises `SetupError` if it holds a run of another agreement, or can't be written; what it held stays.
    """
    resolved, is_own_copy = folder / RESOLVED, False
    if resolved.exists():
        there, is_own_copy = read_run(folder), resolved.read_text(encoding="utf-8") == text
        fields, files = what_changed(there, recipe)
        if fields or files:
            different = ", ".join([*(f"the content of {file}" for file in files), *fields])
            old_files = f"bring the old {' and '.join(files)} back to go on with it, or " if files else ""
            raise SetupError(
                f"{folder} holds another run, {run_id(there)}: it differs in {different}.",
                hint=old_files + ANOTHER_PLACE,
            )
    contents = {} if is_own_copy else {folder / "recipe.yaml": text}  # what was given first stays
    contents[resolved] = json.dumps(recipe.to_data(), indent=2) + "\n"
    try:
        for file, content in contents.items():
            write_whole(file, content.encode())
    except OSError as error:
        raise SetupError(
            f"The recipe can't be written into {folder}: {error.strerror or error}.",
            hint="free some space, or choose another place with --output-dir DIR",
        ) from error


def warn_of_edited_data(recipe: Recipe, folder: Path, events: Events) -> None:
    """Warn that a run which begins differs from the last alike only by files that were edited since."""
    others = [path for path in RUNS.glob(f"*/{RESOLVED}") if path.parent != folder]
    for run in (path.parent for path in sorted(others, key=lambda path: -path.stat().st_mtime)):
        with contextlib.suppress(SetupError):  # a folder of another version's
            fields, files = what_changed(read_run(run), recipe)
            if fields or not files or not (saved := saved_in(run)):
                continue
            names, differ = " and ".join(files), "differ from those" if files[1:] else "differs from the one"
            message = f"This is another run, from step 0: {names} {differ} that {run} was trained on, "
            message += f"which is at step {saved[-1].step}."
            hint = f"bring the old {names} back and type the same command to go on with {run}"
            events.warn("data", message, hint)
            return


@contextlib.contextmanager
def recorded(folder: Path, events: Events, *, is_verbose: bool) -> Iterator[None]:
    """While the block runs, keep events, and what ends it, in `events.jsonl`, and logs in `trahiv.log`."""
    with contextlib.closing(EventFile(folder / "events.jsonl")) as record:
        events.add(record)
        try:
            log_to(folder / "trahiv.log", is_verbose=is_verbose)
            yield
        except TrahivError as error:  # the shell says it on the screen
            Events(record).emit("error", code=error.code, message=error.message, hint=error.hint)
            raise
        finally:
            events.remove(record)


def log_to(path: Path, *, is_verbose: bool) -> None:
    """Send what libraries log, children of this process included, to a bounded file instead of the screen."""
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.captureWarnings(True)
    handler = RotatingFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if is_verbose else logging.WARNING)
