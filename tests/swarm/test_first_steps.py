"""First-time stories, each from the words that a user types.

Which folder is whose is in `tests/unit/train/test_folder.py`; what of a pasted line is understood in
`tests/unit/recipe/test_pasted.py`, and by a real peer in `test_closed_swarm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import LOOPBACK, Peer

pytestmark = pytest.mark.timeout(240)

Command = Callable[..., Any]


def id_of(peer: Peer) -> str:
    return str(peer.wait_for("ready", timeout=60)["peer_id"])


def test_two_terminals_in_one_folder_just_work_and_each_finds_its_own_folder_again(
    start_paced: Command, trahiv: Command, endless: Command, tmp_path: Path
) -> None:
    recipe = endless(swarm={"mode": "sync", "min_peers": 2})
    first = start_paced("init", recipe.name)
    invitation = Path(first.wait_for("ready", timeout=60)["invitation"]).read_text(encoding="ascii").strip()
    join = ("join", "--peer", invitation, "--yes", *LOOPBACK)
    second = start_paced(*join)
    folder = second.wait_for("folder", timeout=60)
    for peer in (first, second):
        peer.wait_for_group()
    run = first.wait_for("ready", timeout=1)["run_id"]
    assert folder["path"] == f"runs/{run}-2"
    assert folder["message"] == f"This peer's folder is runs/{run}-2: runs/{run} is that of another peer."
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {run, f"{run}-2"}
    assert id_of(first) != id_of(second)

    kept = {name: (tmp_path / "runs" / run / name).read_bytes() for name in ("identity.key", "invitation")}
    refused = trahiv("init", recipe.name)
    assert (refused.code, refused.out, refused.left) == (3, "", ())
    assert f"A peer runs in runs/{run} already (process {first.pid}); nothing was changed." in refused.err
    assert f"trahiv join --peer @runs/{run}/invitation" in refused.err and "--output-dir DIR" in refused.err
    assert kept == {name: (tmp_path / "runs" / run / name).read_bytes() for name in kept}

    second.stop()
    own = f"--output-dir runs/{run}-2 --peer @runs/{run}-2/invited-by"
    resume = second.wait_for("done", timeout=1)["resume"]
    assert resume == f"trahiv join --yes {' '.join(LOOPBACK)} --format json {own}"
    again = start_paced(*join)
    assert again.wait_for("folder", timeout=60)["path"] == f"runs/{run}-2"
    assert id_of(again) == id_of(second)
    again.wait_for_group()
