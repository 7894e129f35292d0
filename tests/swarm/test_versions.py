"""Two versions of trahiv in one swarm: they train together, or the joiner is refused with a reason.

The other version's source is extracted from the history, and runs with this installation's libraries.
"""

import io
import re
import subprocess
import tarfile

import pytest

from tests.kit import recipes
from tests.kit.commands import LOOPBACK, ROOT

LAST_RELEASE = "ad858a4"
"""The newest release's tag, once there is one; until then, the commit with which peers last became able to
train together."""

PROTOCOL_2 = "05bac3e"
"""The last commit that spoke protocol 2."""


def source_of(commit, folder):
    """Extract a version, and return the environment variables with which a command runs it."""
    command = ["git", "archive", commit, "trahiv_cli", "tests/kit", "configs", "docs", "pyproject.toml"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    if archive.returncode:
        pytest.skip(f"there is no {commit} in this checkout's history: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder)}


def test_last_release_trains_with_this_version(start, tmp_path):
    last = source_of(LAST_RELEASE, tmp_path / "last")
    recipe = recipes.write_tiny(tmp_path, training__max_steps=100_000)

    def join(name, peer, **more):
        words = "join", "--peer", peer.address, "--output-dir", name, "--files", tmp_path, "--yes"
        return start(*words, *LOOPBACK, pace_s=0.1, **more)

    old = start("init", recipe, "--output-dir", "old", *LOOPBACK, env=last, pace_s=0.1)
    new = join("new", old)
    third = join("third", new, env=last)
    for peer in (old, new, third):
        peer.wait_for_group(3)
    assert not any(peer.errors for peer in (old, new, third))


@pytest.mark.parametrize("theirs, ours", [(2, 3), (3, 2)])
def test_joiner_with_other_protocol_is_refused(start, tmp_path, theirs, ours):
    sources = {2: source_of(PROTOCOL_2, tmp_path / "source"), 3: {}}
    there, new = sources[theirs], sources[ours]
    recipe = recipes.write_tiny(tmp_path, training__max_steps=100_000)
    first = start("init", recipe, "--output-dir", "there", *LOOPBACK, env=there, pace_s=0.1)
    first.wait_for("step", 60)
    newcomer = start("join", "--peer", first.address, "--output-dir", "new", "--yes", *LOOPBACK, env=new)
    assert newcomer.exit_code(60) == 5
    [error] = newcomer.errors
    said = rf"speaks protocol {theirs}; this is trahiv .*, with protocol {ours}\. Nothing was changed"
    assert re.search(said, error["message"])
    assert error["hint"]
    assert not (tmp_path / "new/checkpoints").exists()
