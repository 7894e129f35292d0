"""A run of a program that `trahiv launch` starts: the settings that its peers share, and its command line.

The command line is text for people. No peer executes what came from a swarm.
"""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import canonical, fingerprint, without_own
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, WIRE_VERSION
from trahiv_cli.recipe.schema import OptSection, SwarmSection

PROGRAM = "program"
"""The key of a program's settings among the shared ones, and of its command line among the suggested ones."""

LONGEST = 4_000
"""The most characters of a command line that are published."""

_SECRET = re.compile("(hub|hf|auth|api|access)[_-]?(token|key)|secret|password|passwd", re.IGNORECASE)
_HIDDEN = "..."


def readable(program: Sequence[str]) -> str:
    """Return a command line for others to read, without the values of options such as `--hub_token`."""
    words: list[str] = []
    is_hidden = False
    for word in program:
        name, equals, _ = word.partition("=")
        is_secret = name.startswith("-") and _SECRET.search(name) is not None
        if is_hidden and not word.startswith("-"):
            words.append(_HIDDEN)
        else:
            words.append(f"{name}={_HIDDEN}" if is_secret and equals else word)
        is_hidden = is_secret and not equals
    return re.sub(r"\bhf_\w{16,}", _HIDDEN, shlex.join(words).replace(f"'{_HIDDEN}'", _HIDDEN))


@dataclass(frozen=True)
class ProgramRun:
    """A run of a program, as its peers agree on it."""

    opt: OptSection  # with a `run_id`
    swarm: SwarmSection
    program: str  # as the user of the first peer typed it

    @property
    def run_id(self) -> str:
        """The run's name in the DHT."""
        return str(self.opt.run_id)

    @property
    def agreement(self) -> dict[str, Any]:
        """The part that all peers share, as plain data."""
        swarm = without_own(dict(self.swarm), ("swarm",))
        opt = {"run_id": self.run_id, "target_batch_size": self.opt.target_batch_size}
        return {PROGRAM: {"opt": opt, "swarm": swarm}}

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the agreement, hexadecimal."""
        return fingerprint(self.agreement)

    def pack(self) -> bytes:
        """Return the compressed wire form; raises `RecipeError` if the command line is too long for it."""
        suggested = {PROGRAM: self.program[:LONGEST]}
        packed = zlib.compress(
            canonical({"v": WIRE_VERSION, "shared": self.agreement, "suggested": suggested}), level=9
        )
        if len(packed) > MAX_PACKED_BYTES:
            raise RecipeError("The program's command line is too long.", hint="put it into a script")
        return packed

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """Read the wire form that a swarm published, which is untrusted, or raise `RecipeError`."""
        try:
            shared = wire["shared"][PROGRAM]
            opt = OptSection(
                run_id=shared["opt"]["run_id"], target_batch_size=shared["opt"]["target_batch_size"]
            )
            swarm = SwarmSection.model_validate(shared["swarm"])
            program = wire["suggested"][PROGRAM]
            if not isinstance(program, str) or opt.run_id is None:
                raise ValueError("its command line is no text")
        except (LookupError, TypeError, ValueError, ValidationError) as error:
            raise RecipeError(
                "The swarm's program can't be read; nothing was started.",
                hint="give the same --run-id, --target-batch-size and --swarm as the first peer",
            ) from error
        return cls(opt, swarm, program)
