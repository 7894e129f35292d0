"""Everything that can go wrong, as one tree; each error carries its hint and the process's exit code.

    TrahivError                    1
    ├── RecipeError                2  what the user wrote is not a recipe
    ├── SetupError                 3  this machine lacks something: a package, a port, disk space
    │   └── FolderTaken        3  another peer runs in the run's folder
    ├── AssetError                 3  a model or dataset could not be loaded
    ├── OutOfMemory                6  it does not fit, said before or while loading
    ├── NotFinite                  1  training has diverged: weights are NaN or infinite
    └── SwarmError                 1
        ├── Unreachable            4  no peer answered
        │   └── NothingPublished   4  one did, but trains nothing (yet)
        ├── RecipeMismatch         5  the swarm runs another recipe
        ├── NotAdmitted            5  the swarm is closed, and this peer is not a member
        ├── PeerBroken             1  one of this peer's own processes has failed
        └── RoundFailed            1  a round or a state download did not succeed in time

The core raises these; only `cli/app.py` turns them into words. A message says what happened and what
is unchanged; `hint` says what to type or change next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class TrahivError(Exception):
    """Something a user can act on. Anything else that escapes is a bug of ours.

    `findings` of a recipe are everything that is wrong there, not only the first thing.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "failed"
    table: tuple[str, ...] = ()
    """Lines for a person, to be shown between the message and the hint."""

    def __init__(self, message: str, hint: str = "", findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.findings = findings

    def __str__(self) -> str:
        """Return all that a person needs: Python's traceback, and a notebook's, show nothing else."""
        hints = [f"hint: {self.hint}"] if self.hint else []
        return "\n".join([self.message, *self.table, *hints])


@dataclass(frozen=True)
class Finding:
    """One thing wrong in a recipe, with the place to look at.

    `line` and `col` count from 1; 0 means that the value has no place in a file (it came from
    `--set`, or the whole document is meant). `source` is the text of that line.
    """

    path: str
    message: str
    hint: str = ""
    file: str = ""
    line: int = 0
    col: int = 0
    source: str = ""
    code: str = "recipe"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.col}: " if self.line else f"{self.file}: " * bool(self.file)
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


class RecipeError(TrahivError):
    """The recipe is wrong; `findings` lists everything wrong with it."""

    exit_code = 2
    code = "recipe"


class SetupError(TrahivError):
    """This machine cannot run it as it is: a missing package, a taken port, an unwritable folder."""

    exit_code = 3
    code = "setup"


class FolderTaken(SetupError):
    """Another peer of this machine runs in the run's folder; nothing in it was changed."""

    code = "folder-taken"


class AssetError(TrahivError):
    """A model, tokenizer or dataset could not be found or read; nothing was trained or written."""

    exit_code = 3
    code = "asset"


class OutOfMemory(TrahivError):
    """The run needs more memory than there is; said with both numbers."""

    exit_code = 6
    code = "memory"


class NotFinite(TrahivError):
    """Weights are NaN or infinite; none of them left this peer, and no checkpoint was made of them."""

    code = "not-finite"


class SwarmError(TrahivError):
    """Something between peers went wrong."""

    code = "swarm"


class Unreachable(SwarmError):
    """No peer answered at the given addresses; nothing was changed on either side."""

    exit_code = 4
    code = "unreachable"


class NothingPublished(Unreachable):
    """A peer answered, but nobody publishes a recipe there (yet)."""

    code = "nothing-published"


class RecipeMismatch(SwarmError):
    """This peer and the swarm do not train the same; `differences` lists (field, ours, theirs)."""

    exit_code = 5
    code = "mismatch"

    def __init__(
        self, message: str, hint: str = "", differences: tuple[tuple[str, object, object], ...] = ()
    ) -> None:
        super().__init__(message, hint)
        self.differences = differences
        rows = (("field", "here", "in the swarm"), *differences) if differences else ()
        self.table = tuple(f"  {field:<40}  {ours!s:<16}  {theirs}" for field, ours, theirs in rows)


class NotAdmitted(SwarmError):
    """A peer answered, and does not speak with this one; nothing was trained."""

    exit_code = 5
    code = "not-admitted"


class PeerBroken(SwarmError):
    """One of this peer's processes ended or stands still; what it trained is in a checkpoint."""

    code = "broken"


class RoundFailed(SwarmError):
    """A round or a state download did not succeed in time; parameters and gradients are unchanged."""

    code = "round"
