"""The two commands of the README, on a machine that lacks what they need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/test"])
def test_without_a_python_that_will_do_each_command_says_what_to_install(command, tmp_path, monkeypatch):
    """Said on the way: what the set-up would download and keep. A path with a space changes nothing."""
    clone = tmp_path / "my clone"
    shutil.copytree(REPOSITORY / "scripts", clone / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", clone)
    monkeypatch.setenv("PYTHON", "python2.7")
    answer = subprocess.run([clone / command], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 3
    assert "MB to download" in answer.stderr and "GB of disk" in answer.stderr
    assert "python2.7" in answer.stderr and "sudo apt install python3" in answer.stderr
    assert list((clone / ".venv").iterdir()) == []
