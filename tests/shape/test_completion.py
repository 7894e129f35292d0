"""A shell that asks for completions gets them, without waiting for heavy libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "hivemind", "peft", "datasets", "trl", "bitsandbytes", "yaml")
TRAHIV = Path(sys.executable).with_name("trahiv")

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


@pytest.mark.parametrize(
    ("shell", "script"), [("bash", BASH), ("fish", FISH), ("zsh", ZSH)], ids="bash fish zsh".split()
)
def test_shell_completes_commands_and_choices(shell, script, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = f"{TRAHIV.parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    # A shell may take its last command's place, and trahiv looks for its parent's name.
    command = [shell, "-c", f"{script}\ntrue"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(word in done.stdout for word in ("resume", "relay")), done.stdout
    assert not any(word in done.stdout for word in ("report", "dial-out")), done.stdout


def test_completion_loads_nothing_heavy():
    asked = {"_TRAHIV_COMPLETE": "complete_bash", "COMP_WORDS": "trahiv init --", "COMP_CWORD": "2"}
    command = [sys.executable, "-X", "importtime", "-m", "trahiv_cli"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--output-dir" in done.stdout.splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded and loaded.isdisjoint(HEAVY)
