"""`launch` before a program starts: its command line, its run, and what it must agree on."""

import sys

import pytest
import typer

from tests.unit.conftest import refused
from trahiv_cli.cli.launch import command_of, completed, path_of_programs, program_run
from trahiv_cli.errors import RecipeError


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (["train.py", "--lr", "1"], [sys.executable, "train.py", "--lr", "1"]),
        (["-m", "trl.scripts.sft"], [sys.executable, "-m", "trl.scripts.sft"]),
    ],
)
def test_scripts_and_modules_run_in_this_interpreter(program, command):
    assert command_of(program) == command


def test_commands_of_this_environment_come_first(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "sh").touch(mode=0o755)
    assert command_of(["sh", "-c", "true"]) == [str(tmp_path / "sh"), "-c", "true"]


def test_programs_find_others_of_their_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/bin")
    assert path_of_programs() == f"{tmp_path}:/bin"


def test_unknown_program_is_a_usage_error():
    with pytest.raises(typer.BadParameter, match="there is no program 'not-there'"):
        command_of(["not-there"])


@pytest.mark.parametrize(
    ("program", "name"),
    [(["scripts/train.py"], "train"), (["-m", "trl.scripts.sft"], "sft"), (["trl", "sft"], "trl")],
)
def test_run_is_named_after_program(program, name):
    run = program_run(program, {}, [])
    assert run.run_id == program_run(program, {}, []).run_id
    assert run.run_id.startswith(f"{name}-")
    assert run.run_id != program_run([*program, "more"], {}, []).run_id


@pytest.mark.parametrize(("word", "said"), [("mode=chaos", "swarm.mode"), ("x=1", "swarm.x")])
def test_wrong_swarm_field_is_refused(word, said):
    with refused(said, "trahiv schema", RecipeError):
        program_run(["a.py"], {}, [word])


def test_swarm_option_without_value_is_usage_error():
    with pytest.raises(typer.BadParameter, match="'solo' is not KEY=VALUE"):
        program_run(["a.py"], {}, ["solo"])


def test_completed_words_repeat_the_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["trahiv", "launch", "--name", "Ann", "--", "a.py", "--run-id", "x"])
    run = program_run(
        ["a.py", "--run-id", "x"], {"target_batch_size": 8}, ["mode=sync", "relay=2.5", "public=true"]
    )
    words = completed(run)
    assert words[:3] == ["launch", "--name", "Ann"]
    assert words[words.index("--") :] == ["--", "a.py", "--run-id", "x"]
    own = words[3 : words.index("--")]
    options = dict(zip(own[::2], own[1::2], strict=True))
    assert options["--run-id"] == run.run_id
    again = [word for name, word in zip(own[::2], own[1::2], strict=True) if name == "--swarm"]
    assert program_run([], {"run_id": run.run_id, "target_batch_size": 8}, again).agreement == run.agreement
