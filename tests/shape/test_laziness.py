"""What stays light, by which modules loaded and not by the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "hivemind", "peft", "datasets", "trl", "bitsandbytes"}
UNNEEDED_FOR_HELP = {"pydantic", "yaml"}

RUN = """
import json, runpy, sys
sys.argv = ["trahiv", *sys.argv[1:]]
status = 0
try:
    runpy.run_module("trahiv_cli", run_name="__main__")
except SystemExit as stop:
    status = stop.code or 0
print(json.dumps([status, *sys.modules]), file=sys.stderr)
"""


def loaded_by(code: str, *arguments: str, folder: Path) -> set[str]:
    """The modules that a fresh interpreter has at the end of a code that says its status and them."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    status, *loaded = json.loads(done.stderr.splitlines()[-1])
    assert status == 0
    return set(loaded)


def test_importing_the_face_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import json, trahiv_cli; print(json.dumps([0, *sys.modules]), file=sys.stderr)"
    assert (HEAVY | UNNEEDED_FOR_HELP).isdisjoint(loaded_by(code, folder=tmp_path))


@pytest.mark.parametrize(
    "words",
    ["--help", "init --help", "join --help", "new", "check quickstart", "show quickstart", "schema"],
)
def test_help_and_looking_at_recipes_load_nothing_heavy(words: str, tmp_path: Path) -> None:
    # typer itself loads pydantic for the help of a command, but not for the list of commands
    unwanted = HEAVY | UNNEEDED_FOR_HELP if words == "--help" else HEAVY
    assert unwanted.isdisjoint(loaded_by(RUN, *words.split(), folder=tmp_path))
