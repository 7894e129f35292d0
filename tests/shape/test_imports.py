"""Imports flow one way, rooms keep to their libraries, and nothing goes in circles.

    cli > train > optim | assets > swarm > recipe > telemetry > errors

An upper room may import a lower one; rooms on one line never import each other. Imports for the type checker
alone do not count; imports inside functions do, but for a room's rule about the top of a module.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "trahiv_cli"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

LEVELS = {
    "cli": 6,
    "train": 5,
    "optim": 4,
    "assets": 4,
    "swarm": 3,
    "recipe": 2,
    "telemetry": 1,
    "errors": 0,
}

NEVER = {
    "cli": {"click"},  # typer brings its own; a second one would not be the one that typer uses
    "train": {"typer"},
    "optim": {"transformers", "datasets", "yaml"},
    "assets": {"hivemind", "typer", "rich"},
    "telemetry": {"torch", "transformers"},
    "swarm": {"transformers", "datasets", "typer", "rich"},
    "recipe": {"torch", "hivemind", "transformers", "rich"},
}

NEVER_AT_THE_TOP = {
    "cli": {"torch", "transformers", "hivemind", "datasets", "peft", "pydantic", "yaml"},
}


@dataclass(frozen=True)
class Import:
    """One imported module, `name` where `from module import name` was written, and where."""

    module: str
    name: str
    line: int
    is_at_top: bool


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room a module of ours is in; the face and `__main__` are rooms of their own."""
    return (module.split(".") + ["face"])[1]


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import in the source of a module inside `package`, but for those under `if TYPE_CHECKING:`."""

    def walk(node: ast.AST, is_at_top: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, "", node.lineno, is_at_top)
            case ast.ImportFrom(module=module, names=names, level=level):
                origin = resolve_name("." * level + (module or ""), package)
                for alias in names:
                    yield Import(origin, alias.name, node.lineno, is_at_top)
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(name)],
            ):
                yield Import(str(name), "", node.lineno, is_at_top)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for otherwise in node.orelse:
                    yield from walk(otherwise, is_at_top)
            case _:
                is_deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, is_at_top and not is_deferred)

    return walk(ast.parse(source), True)


def violations(source: str, module: str) -> list[str]:
    """What a module's imports do that its room may not, one sentence each."""
    room = room_of(module)
    found = []
    for imported in imports_of(source, module.rpartition(".")[0]):
        outside = imported.module.split(".")[0]
        if outside == PACKAGE:
            target = room_of(f"{imported.module}.{imported.name}" if imported.name else imported.module)
            if target in (room, "__version__") or room in ("face", "__main__"):
                continue
            if target not in LEVELS:
                found.append(f"line {imported.line}: {target} comes from the face; import it from its room")
            elif LEVELS[room] <= LEVELS[target]:
                found.append(f"line {imported.line}: {room} must not import {target}")
        elif outside in NEVER.get(room, ()):
            found.append(f"line {imported.line}: {room} must never import {outside}")
        elif imported.is_at_top and outside in NEVER_AT_THE_TOP.get(room, ()):
            found.append(f"line {imported.line}: {room} imports {outside} inside functions only")
        elif room == "errors" and outside not in sys.stdlib_module_names:
            found.append(f"line {imported.line}: errors imports nothing but the standard library")
    return found


def edges(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each of our modules, those of ours that it imports."""
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        package = (
            module if any(other.startswith(f"{module}.") for other in sources) else module.rpartition(".")[0]
        )
        for imported in imports_of(source, package):
            submodule = f"{imported.module}.{imported.name}"
            target = submodule if submodule in sources else imported.module
            if target in sources and target != module:
                graph[module].add(target)
    return graph


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    module = module_of(path)
    assert room_of(module) in (*LEVELS, "face", "__main__"), "a new room: give it a line in LEVELS"
    assert not violations(path.read_text(encoding="utf-8"), module)


def test_no_import_goes_in_a_circle() -> None:
    sources = {module_of(path): path.read_text(encoding="utf-8") for path in FILES}
    try:
        TopologicalSorter(edges(sources)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_tests_and_benchmarks_meet_in_the_kit_alone() -> None:
    benchmarks, tests = (sorted((ROOT / folder).rglob("*.py")) for folder in ("benchmarks", "tests"))
    foreign = {"benchmarks", *(path.stem for path in benchmarks)}
    for path in (*benchmarks, *tests):
        is_shared = ROOT / "tests" / "kit" in path.parents or path in benchmarks
        for imported in imports_of(path.read_text(encoding="utf-8"), ""):
            assert imported.module.split(".")[0] not in foreign, f"{path} imports a benchmark"
            if is_shared and imported.module.split(".")[0] == "tests":
                assert imported.module.startswith("tests.kit"), f"{path} imports another test"


def test_a_room_re_exports_nothing() -> None:
    for path in (ROOT / PACKAGE).glob("*/__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1, f"{path.relative_to(ROOT)} holds more than a docstring"


FORBIDDEN = {
    "trahiv_cli.recipe.load": [
        "from trahiv_cli.swarm.node import Node",
        "from trahiv_cli import cli",
        "import trahiv_cli.train.peer",
        "from ..train import peer",
        "from trahiv_cli import SwarmTrainer",
        "def f():\n    import torch.nn",
    ],
    "trahiv_cli.optim.rounds": [
        "from trahiv_cli.assets import data",
        "if not TYPE_CHECKING:\n    import datasets",
    ],
    "trahiv_cli.errors": ["import yaml"],
    "trahiv_cli.cli.app": [
        "import click",
        "importlib.import_module('torch')",
        "class A:\n    import pydantic",
        "try:\n    import torch\nexcept ImportError:\n    pass",
    ],
}
ALLOWED = {
    "trahiv_cli.train.peer": ["from trahiv_cli.swarm.node import Node", "from . import callbacks"],
    "trahiv_cli.recipe.load": [
        "from trahiv_cli import errors, __version__",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ],
    "trahiv_cli.cli.app": ["def f():\n    import torch"],
    "trahiv_cli.__main__": ["from trahiv_cli.cli.app import run"],
}


def test_the_rules_catch_what_is_forbidden_and_nothing_else() -> None:
    for module, sources in FORBIDDEN.items():
        assert all(violations(source, module) for source in sources)
    for module, sources in ALLOWED.items():
        assert not any(violations(source, module) for source in sources)
    circle = {"p": "", "p.a": "def f():\n    from p import b", "p.b": "import p.c", "p.c": "from .a import x"}
    with pytest.raises(CycleError):
        TopologicalSorter(edges(circle)).prepare()
