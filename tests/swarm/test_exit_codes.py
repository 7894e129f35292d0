"""Exit codes of real processes that end before there is a swarm: their messages, and that nothing is left.

One row for each code and each place that it comes from; the many other mistakes and their messages are in
`tests/unit/cli`. The codes of events in a swarm are tested with those: 0 in `test_two_peers.py`, 1 in
`test_restarts.py`, 5 in `test_own_files.py` and `test_closed_swarm.py`, 130 and 143 in `test_leaving.py`.
"""

import re
import shutil
import subprocess

import pytest

from tests.kit.commands import ROOT
from tests.kit.recipes import HUGE, write_tiny
from tests.swarm.conftest import recorded

pytestmark = pytest.mark.timeout(90)

CLOSED = "/ip4/127.0.0.1/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
"""A closed port, and a well-formed peer id that no peer has."""

BEFORE_AN_INVITATION = {
    *("lock", "recipe.yaml", "recipe.json", "events.jsonl", "trahiv.log", "peers.json"),
    *("identity.key", "owner.key", "secret.key", "members.json"),
}
"""All files that a run's folder may hold before an invitation is written."""


def test_usage_error_exits_2_with_help(trahiv, tmp_path):
    result = trahiv("init", "--bogus")
    assert (result.code, result.out, result.left) == (2, "", ())
    assert "No such option: --bogus" in result.err
    assert "trahiv init --help" in result.err
    assert not (tmp_path / "runs").exists()


def test_closed_port_exits_4_without_traces(trahiv, tmp_path):
    result = trahiv("join", "--peer", CLOSED)
    assert (result.code, result.out, result.left) == (4, "", ()), result.err
    assert "Traceback" not in result.err
    assert result.seconds < 15
    assert len(re.findall(r"^error: ", result.err, re.MULTILINE)) == 1
    assert "nothing listens on port 9" in result.err
    [hint] = re.findall(r"^ *hint: .*", result.err, re.MULTILINE)
    assert "fresh `trahiv join`" in hint
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "changes, code, message, hint",
    [
        ({"model__tokenizer_name_or_path": "./tokens"}, 3, "tokens' could not be loaded", ""),
        ({"model__config": HUGE}, 6, r"needs [\d.]+ GiB of RAM .* [\d.]+ GiB are free", "peft"),
    ],
    ids=["a tokenizer that is none", "too large a model"],
)
def test_setup_error_is_recorded_without_invitation(changes, code, message, hint, trahiv, tmp_path):
    write_tiny(tmp_path, **changes)
    (tmp_path / "tokens").mkdir()
    result = trahiv("init", "tiny.yaml", "--output-dir", "run", "--format", "json")
    assert (result.code, result.left) == (code, ()), result.out + result.err
    assert "Traceback" not in result.out + result.err
    [error] = result.errors
    assert error == result.events[-1]
    assert {event["event"] for event in result.events} <= {"waiting", "error"}, "nobody was invited"
    assert re.search(message, error["message"])
    assert hint in error["hint"]
    assert {path.name for path in (tmp_path / "run").iterdir()} <= BEFORE_AN_INVITATION
    assert recorded(tmp_path / "run")[-1] | {"t": error["t"]} == error, "it is recorded a moment earlier"


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/test"])
def test_scripts_explain_missing_python(command, tmp_path, monkeypatch):
    """The set-up first prints what it would download and keep. A path with a space changes nothing."""
    clone = tmp_path / "my clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    shutil.copy(ROOT / "pyproject.toml", clone)
    monkeypatch.setenv("PYTHON", "python2.7")
    answer = subprocess.run([clone / command], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 3
    for part in ("MB to download", "GB of disk", "python2.7", "sudo apt install python3"):
        assert part in answer.stderr
    assert list((clone / ".venv").iterdir()) == []
