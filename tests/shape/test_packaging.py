"""The systemd unit agrees with the exit codes of the errors, and compose's second peer can join the first."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from trahiv_cli import errors

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "packaging/trahiv.service"
MAY_BE_OTHERWISE_NEXT_TIME = {errors.TrahivError.exit_code, errors.Unreachable.exit_code}
"""Exit codes after which a peer is started again: it failed while running, or no peer answered."""


def exit_codes(error=errors.TrahivError):
    yield error.exit_code
    for narrower in error.__subclasses__():
        yield from exit_codes(narrower)


def setting(key):
    [value] = re.findall(rf"^{key}=(.*)", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    return value.split()


def test_systemd_restarts_only_after_transient_failures():
    codes = setting("RestartPreventExitStatus")
    assert {*map(int, codes)} == set(exit_codes()) - MAY_BE_OTHERWISE_NEXT_TIME


def test_systemd_verifies_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed; it comes with Debian's package systemd")
    program = Path(setting("ExecStart")[0].replace("%h", str(tmp_path)))
    program.parent.mkdir(parents=True)
    program.touch(mode=0o700)
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", UNIT],
        env=os.environ | {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def test_compose_second_peer_has_invitation():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    first, second = (service["command"] for service in services.values())
    assert f"@{first[first.index('--output-dir') + 1]}/invitation" in second
