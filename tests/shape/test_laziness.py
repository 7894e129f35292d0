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

RUN = f"""
import json, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
if sys.argv[1:] == ["import"]:
    import trahiv_cli
else:
    try:
        runpy.run_module("trahiv_cli", run_name="__main__")
    except SystemExit as stop:
        assert not stop.code
print(json.dumps([*sys.modules]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        "import",
        "--help",
        "init --help",
        "join --help",
        "new",
        "check quickstart",
        "show quickstart",
        "schema",
    ],
)
def test_the_face_help_and_looking_at_recipes_load_nothing_heavy(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, *words.split()]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    # typer itself loads pydantic for the help of a command, but not for the list of commands
    unwanted = HEAVY | UNNEEDED_FOR_HELP if words in ("import", "--help") else HEAVY
    assert unwanted.isdisjoint(json.loads(done.stderr.splitlines()[-1]))
