"""All errors, as one tree; each error carries its hint and the process's exit code.

    TrahivError                    1
    ├── RecipeError                2  the recipe has mistakes
    ├── SetupError                 3  this machine lacks something: a package, a port, disk space
    │   └── FolderTaken        3  another peer runs in the run's folder
    ├── AssetError                 3  a model or dataset could not be loaded
    ├── OutOfMemory                6  training does not fit into memory
    ├── NotFinite                  1  training has diverged: weights are NaN or infinite
    └── SwarmError                 1
        ├── Unreachable            4  no peer answered
        │   └── NothingPublished   4  a peer answered, but none publishes a recipe (yet)
        ├── RecipeMismatch         5  the swarm runs another recipe
        ├── NotAdmitted            5  the swarm is closed, and this peer is not a member
        ├── PeerBroken             1  one of this peer's own processes has failed
        └── RoundFailed            1  a round or a state download failed

The other packages raise these errors; only `cli/app.py` turns them into text. A message describes the failure
and everything that is unchanged; `hint` describes the next thing to type or change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class TrahivError(Exception):
    """An error that the user can act on. Any other exception that reaches the user is a bug in trahiv.

    `findings` lists all mistakes of a recipe, not only the first one.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "failed"
    table: tuple[str, ...] = ()
    """Lines for a person, shown between the message and the hint."""

    def __init__(self, message: str, hint: str = "", findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.findings = findings

    def __str__(self) -> str:
        """Return message, table and hint: a traceback, in Python or in a notebook, shows only this text."""
        hints = [f"hint: {self.hint}"] if self.hint else []
        return "\n".join([self.message, *self.table, *hints])


@dataclass(frozen=True)
class Finding:
    """One mistake in a recipe, and its position.

    `line` and `col` count from 1; 0 means that the value has no position in a file (it came from
    `--set`, or the finding is about the whole document). `source` is the text of that line.
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
    """The recipe has mistakes, which `findings` lists, or there is no such recipe."""

    exit_code = 2
    code = "recipe"


class SetupError(TrahivError):
    """This machine lacks something: a package is missing, a port is taken, a folder is not writable."""

    exit_code = 3
    code = "setup"


class FolderTaken(SetupError):
    """Another peer runs in the run's folder; nothing in it was changed."""

    code = "folder-taken"


class AssetError(TrahivError):
    """A model, tokenizer or dataset could not be found or read, or does not fit the recipe."""

    exit_code = 3
    code = "asset"


class OutOfMemory(TrahivError):
    """The run needs more memory than this machine has."""

    exit_code = 6
    code = "memory"


class NotFinite(TrahivError):
    """Weights are NaN or infinite; none of them left this peer, and no checkpoint was made of them."""

    code = "not-finite"


class SwarmError(TrahivError):
    """Base class of errors in training with other peers."""

    code = "swarm"


class Unreachable(SwarmError):
    """No peer answered at the given addresses; nothing was changed on either side."""

    exit_code = 4
    code = "unreachable"


class NothingPublished(Unreachable):
    """A peer answered, but no peer of its swarm publishes a recipe (yet)."""

    code = "nothing-published"


class RecipeMismatch(SwarmError):
    """This peer and the swarm do not train the same run; `differences` lists (field, ours, theirs)."""

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
    """The swarm does not admit this peer, or its owner has removed it."""

    exit_code = 5
    code = "not-admitted"


class PeerBroken(SwarmError):
    """One of this peer's processes ended or hangs; its checkpoints are intact."""

    code = "broken"


class RoundFailed(SwarmError):
    """A round or a state download failed; parameters and gradients are unchanged."""

    code = "round"
