"""Imports flow one way, rooms keep to their libraries, and nothing goes in circles.

    cli > train | doctor | watch > step | run | assets > state > rounds > swarm > reach | progress > members
        > net > recipe > telemetry > ground > errors

The ground is several modules, each a room of its own.

An upper room may import a lower one; rooms on one level never import each other. Imports for the type checker
alone do not count; imports inside functions do. Loaded modules decide what is light, not a clock.
"""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

from trahiv_cli.files import INVITATION_FILE
from trahiv_cli.members.identity import IDENTITY_FILE, ensure_identity
from trahiv_cli.members.invitation import Invitation, find_credentials, keep_invitation
from trahiv_cli.swarm.known_peers import FILE, KnownPeers

ROOT = Path(__file__).parents[2]
PACKAGE = "trahiv_cli"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

GROUND = ("background", "clock", "files", "shared_memory", "wire")
LOWER = (("errors",), GROUND, ("telemetry",), ("recipe",), ("net",), ("members",), ("reach", "progress"))
MIDDLE = (("swarm",), ("rounds",), ("state",), ("step", "run", "assets"))
UPPER = (("train", "doctor", "watch"), ("cli",))
LEVELS = {room: level for level, rooms in enumerate(LOWER + MIDDLE + UPPER) for room in rooms}

NEVER = {
    "cli": {"click"},  # typer brings its own; a second one would not be the one that typer uses
    "train": {"typer"},
    "doctor": {"transformers", "datasets", "typer", "rich"},
    "watch": {"torch", "transformers", "datasets", "typer", "rich"},
    "assets": {"hivemind", "typer", "rich"},
    "telemetry": {"torch", "transformers"},
    "run": {"datasets", "typer", "rich"},
    "recipe": {"torch", "hivemind", "transformers", "rich"},
    "shared_memory": {"hivemind", "transformers"},
}
NEVER |= {room: {"torch", "hivemind", "transformers"} for room in ("background", "clock", "files", "wire")}
NEVER |= {
    room: {"transformers", "datasets", "yaml", "typer", "rich"}
    for room in ("net", "members", "reach", "progress", "swarm", "rounds", "state", "step")
}


class Import(NamedTuple):
    """An imported module, the `name` of `from module import name`, and the line."""

    module: str
    name: str
    line: int


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    """The room of one of our modules; the face and `__main__` are rooms of their own."""
    return (module.split(".") + ["face"])[1]


def imports_of(source, package):
    """Every import in the source of a module inside `package`, but for those under `if TYPE_CHECKING:`."""

    nodes = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        children = ast.iter_child_nodes(node)
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, "", node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                origin = resolve_name("." * level + (module or ""), package)
                yield from (Import(origin, alias.name, node.lineno) for alias in names)
            case ast.Call(func=func, args=[ast.Constant(name)]) if "import_module" in ast.unparse(func):
                yield Import(str(name), "", node.lineno)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                children = node.orelse
        nodes += children


def violations(source, module):
    """Return how a module's imports break the rules of its room, one sentence each."""
    room = room_of(module)
    found = []
    for imported in imports_of(source, module.rpartition(".")[0]):
        outside = imported.module.split(".")[0]
        problem = ""
        if outside == PACKAGE:
            target = room_of(f"{imported.module}.{imported.name}" if imported.name else imported.module)
            if target in (room, "__version__") or room in ("face", "__main__"):
                continue
            if target not in LEVELS:
                problem = f"{target} comes from the face; import it from its room"
            elif LEVELS[room] <= LEVELS[target]:
                problem = f"{room} must not import {target}"
        elif outside in NEVER.get(room, ()):
            problem = f"{room} must never import {outside}"
        elif room == "errors" and outside not in sys.stdlib_module_names:
            problem = "errors imports nothing but the standard library"
        if problem:
            found.append(f"line {imported.line}: {problem}")
    return found


def edges(sources):
    """Map each of our modules to those of ours that it imports."""
    graph = {}
    for module, source in sources.items():
        is_package = any(other.startswith(f"{module}.") for other in sources)
        found = imports_of(source, module if is_package else module.rpartition(".")[0])
        names = [(f"{one.module}.{one.name}", one.module) for one in found]
        targets = {submodule if submodule in sources else module for submodule, module in names}
        graph[module] = (targets & sources.keys()) - {module}
    return graph


def test_imports_keep_to_room_rules():
    for path in FILES:
        module, source = module_of(path), path.read_text(encoding="utf-8")
        assert room_of(module) in (*LEVELS, "face", "__main__"), "a new room: give it a line in LEVELS"
        assert not violations(source, module), path
        if path.name == "__init__.py" and module.count(".") == 1:
            assert len(ast.parse(source).body) == 1, f"{path} holds more than a docstring"


def test_no_import_cycle():
    sources = {module_of(path): path.read_text(encoding="utf-8") for path in FILES}
    try:
        TopologicalSorter(edges(sources)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_tests_and_benchmarks_share_only_kits():
    benchmarks, tests = (sorted((ROOT / folder).rglob("*.py")) for folder in ("benchmarks", "tests"))
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    for path in (*benchmarks, *tests):
        kits = ("tests.kit", "benchmarks.kit") if path in benchmarks else ("tests.kit",)
        is_bound = path in benchmarks or ROOT / "tests" / "kit" in path.parents
        for module in (imported.module for imported in imports_of(path.read_text(encoding="utf-8"), "")):
            room = module.split(".")[0]
            assert room not in scripts, f"{path} imports a benchmark"
            if room == "benchmarks" or (room == "tests" and is_bound):
                assert module.startswith(kits), f"{path} imports {module}"


FORBIDDEN = [
    ("trahiv_cli.recipe.load", "import trahiv_cli.train.peer"),
    ("trahiv_cli.recipe.load", "from trahiv_cli import cli"),
    ("trahiv_cli.recipe.load", "from ..train import peer"),
    ("trahiv_cli.recipe.load", "from trahiv_cli import SwarmTrainer"),
    ("trahiv_cli.recipe.load", "def f():\n    import torch.nn"),
    ("trahiv_cli.rounds.replay_log", "from trahiv_cli.assets import data"),
    ("trahiv_cli.rounds.replay_log", "if not TYPE_CHECKING:\n    import datasets"),
    ("trahiv_cli.errors", "import yaml"),
    ("trahiv_cli.wire", "from hivemind.utils import MSGPackSerializer"),
    ("trahiv_cli.wire", "from trahiv_cli import shared_memory"),
    ("trahiv_cli.files", "import torch"),
    ("trahiv_cli.recipe.load", "importlib.import_module('torch')"),
    ("trahiv_cli.cli.app", "class A:\n    import click"),
    ("trahiv_cli.telemetry.events", "try:\n    import torch\nexcept ImportError:\n    pass"),
]
ALLOWED = [
    ("trahiv_cli.train.peer", "from trahiv_cli.swarm.node import Node"),
    ("trahiv_cli.train.peer", "from . import callbacks"),
    ("trahiv_cli.recipe.load", "from trahiv_cli import errors, __version__"),
    ("trahiv_cli.shared_memory", "import torch"),
    ("trahiv_cli.recipe.load", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("trahiv_cli.cli.app", "import torch"),
    ("trahiv_cli.__main__", "from trahiv_cli.cli.app import run"),
]


def test_rules_catch_only_forbidden_imports():
    assert all(violations(source, module) for module, source in FORBIDDEN)
    assert not any(violations(source, module) for module, source in ALLOWED)
    circle = {"p": "", "p.a": "def f():\n    from p import b", "p.b": "import p.c", "p.c": "from .a import x"}
    with pytest.raises(CycleError):
        TopologicalSorter(edges(circle)).prepare()


HEAVY = {"torch", "transformers", "hivemind", "peft", "datasets", "trl", "bitsandbytes"}
UNNEEDED_FOR_HELP = {"pydantic", "yaml"}

RUN = f"""
import importlib, json, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
if sys.argv[1] == "import":
    for name in sys.argv[2:]:
        importlib.import_module(name)
else:
    try:
        runpy.run_module("trahiv_cli", run_name="__main__")
    except SystemExit as stop:
        assert stop.code in (None, 0, 3, 4), stop.code
print(json.dumps([*sys.modules]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        "import trahiv_cli",
        "import trahiv_cli.swarm.owner trahiv_cli.members.records trahiv_cli.swarm.known_peers",
        "--help",
        "init --help",
        "join --help",
        "new",
        "check quickstart",
        "show quickstart",
        "schema",
        "pause",
        "resume",
        "finish",
        "status",
        "members",
        "invite",
        "invite --close all",
        "kick 123456",
    ],
)
def test_light_commands_load_no_heavy_library(words, tmp_path):
    """The commands run in a folder with a closed swarm whose only peer has ended."""
    folder = tmp_path / "runs" / "run"
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{ensure_identity(folder / IDENTITY_FILE)}"
    credentials = find_credentials(folder, Invitation())
    keep_invitation(folder / INVITATION_FILE, Invitation((address,), credentials.membership))
    KnownPeers(folder / FILE).save()
    command = [sys.executable, "-c", RUN, *words.split()]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    # typer itself loads pydantic for the help of a command, but not for the list of commands
    unwanted = HEAVY | UNNEEDED_FOR_HELP if words in ("import trahiv_cli", "--help") else HEAVY
    assert unwanted.isdisjoint(json.loads(done.stderr.splitlines()[-1]))
