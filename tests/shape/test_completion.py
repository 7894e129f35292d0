"""A shell that asks for completions gets them, without waiting for heavy libraries."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "hivemind", "peft", "datasets", "trl", "bitsandbytes", "yaml")

BASH = r"""
source <(trahiv --show-completion)
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _trahiv_completion trahiv; echo "${COMPREPLY[@]}"; }
ask trahiv res; ask trahiv init --reach r
"""
FISH = """
trahiv --show-completion | source
complete -C 'trahiv res'; complete -C 'trahiv init --reach r'
"""
ZSH = r"""
compdef() { true }
_arguments() { printf '%s\n' "$@" }
eval "$(trahiv --show-completion)"
words=(trahiv res) CURRENT=2; _trahiv_completion
words=(trahiv init --reach r) CURRENT=4; _trahiv_completion
"""
"""Outside of its line editor zsh has no completion system: its two functions are stand-ins."""


SCRIPTS = {"bash": BASH, "fish": FISH, "zsh": ZSH}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_shell_completes_commands_and_choices(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    # A shell may take its last command's place, and trahiv looks for its parent's name.
    command = [shell, "-c", f"{SCRIPTS[shell]}\ntrue"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    offered = {"resume", "relay", "report", "dial-out"} & {*re.findall(r"[\w-]+", done.stdout)}
    assert offered == {"resume", "relay"}, done.stdout


def test_completion_loads_nothing_heavy():
    asked = {"_TRAHIV_COMPLETE": "complete_bash", "COMP_WORDS": "trahiv init --", "COMP_CWORD": "2"}
    command = [sys.executable, "-X", "importtime", "-m", "trahiv_cli"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--output-dir" in done.stdout.splitlines()
    loaded = {*re.findall(r"\S+$", done.stderr, re.MULTILINE)}
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)
