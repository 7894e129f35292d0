"""The options that a peer chooses for itself, of `init`, `join` and `launch`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trahiv_cli.files import INVITED_BY_FILE
from trahiv_cli.members.invitation import Invitation
from trahiv_cli.reach.reachability import ReachRules, Wanted
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.run.conditions import Condition
from trahiv_cli.run.folder import start_node
from trahiv_cli.run.leaving import ENDLESS_BUDGET, Budget
from trahiv_cli.run.lock import RESOLVED, RUNS
from trahiv_cli.swarm.node import Node


@dataclass(frozen=True)
class PeerOptions:
    """Options that a peer chooses for itself; none of them can change the run."""

    output_dir: Path | None = None  # default: `runs/<run_id>`, or the first of `folders` that is free
    folders: tuple[Path, ...] = ()
    identity: Path | None = None  # key file; default: `identity.key` in the run's folder
    host_maddrs: list[str] | None = None
    announce_maddrs: list[str] | None = None
    reach: Wanted = "auto"
    invitation: Invitation = Invitation()  # an empty one starts a swarm
    is_public: bool = False  # whether a swarm that it starts is open to everyone
    reached_step: int = 0  # the step that the swarm had reached when this peer asked to join
    wait_s: float | None = None  # longest wait of a run's first step for `swarm.min_peers`
    budget: Budget = ENDLESS_BUDGET  # the contribution after which this peer leaves
    resume: str = ""  # the command to resume after a stop; only its `--on-event` may hold a secret
    piped: str | None = None  # the word in `resume` for a recipe that came through a pipe
    name: str = ""  # the user's name for this peer, which it publishes
    conditions: Sequence[Condition] = ()  # it trains only while all of them hold
    max_upload: float | None = None  # Mbit/s
    max_download: float | None = None
    is_again: bool = False  # whether it has restarted itself: earlier control requests stay in force
    was_line_hidden: bool = False  # whether the join line was removed from `resume`; the folder has it

    def node(self, section: DhtSection, folder: Path, relay_mbit: float | None = None) -> Node:
        """Start this peer's node by the options of the command line; `section` has their defaults."""
        chosen = {"host_maddrs": self.host_maddrs, "announce_maddrs": self.announce_maddrs}
        return start_node(
            section.model_copy(update={key: value for key, value in chosen.items() if value}),
            folder,
            self.invitation,
            identity=self.identity,
            is_public=self.is_public,
            reach=ReachRules(self.reach, relay_mbit, self.max_upload, self.max_download),
        )

    def resume_in(self, folder: Path, run: str) -> str:
        """Return the command to resume, with the options that depend on the folder."""
        # A recipe from a pipe can't be read again; the paths in the run's own copy are absolute.
        typed = shlex.split(self.resume)
        words: list[object] = [folder / RESOLVED if word == self.piped else word for word in typed]
        if folder != RUNS / run and "--output-dir" not in self.resume:
            words += ["--output-dir", folder]
        if self.was_line_hidden and (folder / INVITED_BY_FILE).exists():
            words += ["--peer", f"@{folder / INVITED_BY_FILE}"]
        return shlex.join(map(str, words))
