"""What stays light, by which modules loaded and not by the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
print(json.dumps({"status": status, "loaded": [*sys.modules]}), file=sys.stderr)
"""


def run_python(code: str, *arguments: str, folder: Path) -> Any:
    """The JSON object on the last line of what a fresh interpreter says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_importing_the_face_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import json, trahiv_cli; print(json.dumps({'loaded': [*sys.modules]}), file=sys.stderr)"
    loaded = run_python(code, folder=tmp_path)["loaded"]
    assert (HEAVY | UNNEEDED_FOR_HELP).isdisjoint(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["init", "--help"], ["join", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    answer = run_python(RUN, *arguments, folder=tmp_path)
    assert answer["status"] == 0
    # typer itself loads pydantic for the help of a command, but not for the list of commands
    unwanted = HEAVY | UNNEEDED_FOR_HELP if arguments == ["--help"] else HEAVY
    assert unwanted.isdisjoint(answer["loaded"])


@pytest.mark.parametrize(
    "arguments", [["new"], ["check", "quickstart"], ["show", "quickstart"], ["schema"]], ids=" ".join
)
def test_looking_at_recipes_loads_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    answer = run_python(RUN, *arguments, folder=tmp_path)
    assert answer["status"] == 0
    assert HEAVY.isdisjoint(answer["loaded"])
