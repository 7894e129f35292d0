"""The public surface is pinned, and source rules that no linter checks are kept."""

import ast
import os
import re
from pathlib import Path

import pytest

import trahiv_cli

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).with_name("cli_surface.txt")
REWRITE = "TRAHIV_REWRITE_CLI_SURFACE"
"""Set to 1 to write the list anew, when a command or an option was meant to change."""

FILES = sorted((ROOT / "trahiv_cli").rglob("*.py"))
NAMES_THAT_SAY_NOTHING = {"utils", "helpers", "common", "misc"}
MAY_CATCH_EVERYTHING = (
    "trahiv_cli/cli/app.py",  # the last resort: a bug of ours becomes a message and an exit code
    "trahiv_cli/telemetry/",  # telemetry must never stop training
    "trahiv_cli/rounds/round_service.py",  # any failure of an exchange is reported to the group in the vote
    "trahiv_cli/swarm/service.py",  # hands an error of one process to the waiting caller in the other
    "trahiv_cli/reach/upnp.py",  # miniupnpc raises nothing narrower
    "trahiv_cli/train/rehearsal.py",  # any error of a library there is about the user's model or data
    "trahiv_cli/train/rewards.py",  # runs the user's own code
    "trahiv_cli/background.py",  # hands an error of its thread to the waiting caller
)
MAY_PRINT = "trahiv_cli/cli/output.py"
OPTIONS_OF_OTHERS = {
    *("--query-gpu", "--query-compute-apps", "--value"),  # nvidia-smi, loginctl
    *("--machine", "--no-block", "--now", "--user"),  # systemctl
    *("--torch-backend", "--install"),  # uv, wsl
    *("--model_name_or_path", "--dataset_name", "--output_dir", "--hub_token"),  # TRL's commands
    *("--dataset-prepared-path", "--add_version"),  # axolotl, ms-swift
    *("--links", "--seconds", "--seed", "--sides", "--turns"),  # benchmarks/
}


def place(path):
    return path.relative_to(ROOT).as_posix()


def test_public_names_can_be_imported():
    """The names themselves are pinned by `docs/stable.md`; see `test_docs.py`."""
    assert set(trahiv_cli.__all__) <= set(dir(trahiv_cli))
    assert all(getattr(trahiv_cli, name) is not None for name in trahiv_cli.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        trahiv_cli.no_such_name  # noqa: B018


def commands():
    """Each command of the command line by its name; `trahiv` itself is the empty one."""
    from typer.main import get_command

    from trahiv_cli.cli.app import app

    whole = get_command(app)
    return {"": whole, **whole.commands}


def options_of(command):
    return [
        name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    ]


def cli_surface():
    """Each argument and option of each command, one line each, as `command --option`."""
    lines = []
    for name, command in commands().items():
        words = f"trahiv {name}".strip()
        arguments = [one.name.upper() for one in command.params if one.param_type_name != "option"]
        lines += [words, *(f"{words} {more}" for more in (*arguments, *options_of(command)))]
    return sorted(lines)


def test_commands_and_options_match_list():
    if os.environ.get(REWRITE) == "1":
        SURFACE.write_text("\n".join(cli_surface()) + "\n", encoding="utf-8")
    listed = SURFACE.read_text(encoding="utf-8").splitlines()
    assert cli_surface() == listed, f"meant to change? {REWRITE}=1 writes {place(SURFACE)} anew"


def test_mentioned_commands_and_options_exist():
    known = {
        name: {*options_of(command), "--help", *OPTIONS_OF_OTHERS} for name, command in commands().items()
    }
    read = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    texts = [(path, path.read_text(encoding="utf-8")) for path in read]
    for path in FILES:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts += [(path, str(node.value)) for node in nodes if isinstance(node, ast.Constant)]
    for path, text in texts:
        wanted = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        assert wanted <= set.union(*known.values()), f"{path}: no command has all of {wanted}"
        for command, rest in re.findall(r"`(?:\$ )?trahiv ([a-z]+)([^`\n]*)", text):
            assert command in known, f"{path}: there is no `trahiv {command}`"
            wanted = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))
            assert wanted <= known[command], f"{path}: `trahiv {command}` has not all of {wanted}"


@pytest.mark.parametrize("path", FILES, ids=place)
def test_file_keeps_source_rules(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert path.stem not in NAMES_THAT_SAY_NOTHING
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{place(path)}:{node.lineno} catches without saying what"
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            last = node.body[-1]
            passes_it_on = isinstance(last, ast.Raise) and last.exc is None
            if caught & {"Exception", "BaseException"} and not passes_it_on:
                assert place(path).startswith(MAY_CATCH_EVERYTHING), (
                    f"{place(path)}:{node.lineno}: name what it may be"
                )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert place(path) == MAY_PRINT, f"{place(path)}:{node.lineno} prints; {MAY_PRINT} does that"
