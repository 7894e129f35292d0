"""Fixtures for tests with real `trahiv` processes; see `tests.kit.commands`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.kit import commands, recipes
from tests.kit.commands import Peer, Result, Workplace

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.swarm)


@pytest.fixture(scope="session")
def open_workplace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Workplace]:
    """Make a `Workplace` that lives longer than a test: `with open_workplace("name") as place:`."""
    return lambda name: Workplace(tmp_path_factory.mktemp(name))


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """The folder of this test; what `start` started in it ends with the test."""
    with Workplace(tmp_path) as place:
        yield place


@pytest.fixture
def trahiv(workplace: Workplace) -> Callable[..., Result]:
    """`trahiv("init", ...)` runs the command in `tmp_path` to its end; see `Workplace.run`."""
    return workplace.run


@pytest.fixture
def start(workplace: Workplace) -> Callable[..., Peer]:
    """`start("init", ...)` starts the command in `tmp_path` and gives a `Peer`; see `Workplace.start`."""
    return workplace.start


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, seconds=30)` returns as soon as `condition()` holds."""

    def wait(condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def children_of() -> Callable[[int], list[psutil.Process]]:
    """`children_of(pid)`: every living descendant of a `Peer` or a `Result`, which may have ended."""
    return commands.children_of


@pytest.fixture(scope="session")
def assert_nothing_left() -> Callable[[int], None]:
    """`assert_nothing_left(pid)`: no process, socket or temporary file of a peer that has ended.

    Waits for `commands.VANISH_S` at most: torch's shared-memory manager notices by itself that its clients
    are gone.
    """

    def check(pid: int) -> None:
        assert commands.left_by(pid) == []

    return check


@pytest.fixture(scope="session")
def tiny_recipe() -> Callable[..., Path]:
    """`tiny_recipe(folder, training__max_steps=9)`: see `recipes.write_tiny`."""
    return recipes.write_tiny
