"""Fixtures for tests with real `trahiv` processes; see `tests.kit.commands`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit import recipes
from tests.kit.commands import LOOPBACK, Peer, Workplace

HERE = Path(__file__).parent

STORIES = (
    "test_two_peers.py::test_peers_join_at_start_and_midway",
    "test_exit_codes.py::test_usage_error_exits_2_with_help",
    "test_leaving.py::test_signal_leaves_checkpoint_and_no_children",
    "test_restarts.py::test_killed_swarm_resumes_from_furthest_checkpoint[saving]",
    "test_faults.py::test_survivors_continue_after_death_in_any_phase",
    "test_faults.py::test_flooding_peer_stops_no_round",
    "test_closed_swarm.py::test_only_members_enter_closed_swarm",
    "test_nodes.py::test_node_reads_published_record[tcp]",
    "test_nodes.py::test_restarted_peers_find_each_other",
    "test_restarts.py::test_peer_restarts_after_dht_failure[dht-killed]",
    "test_exactness.py::test_two_peers_equal_one_process",
    "test_drop_in.py::test_good_run_prints_only_join_line",
    "test_recipes.py::test_two_peers_train_one_model[spanish-qlora]",
    "test_recipes.py::test_two_peers_train_one_model[review-classes]",
)
"""Those that stand for all in `make test`: one for each room, and for what only a process can show."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.swarm)
            if item.nodeid.endswith(STORIES):
                item.add_marker(pytest.mark.story)
    names = [item.nodeid.rpartition("/")[2] for item in items]
    for story in set(STORIES) - set(names):
        rows = [name for name in names if name.startswith(story.partition("[")[0] + "[")]
        assert len(rows) < 2, f"{story} is none of {rows}"  # of one row, another may have been asked for


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """The folder of this test; what `start` started in it ends with the test."""
    with Workplace(tmp_path) as place:
        yield place


@pytest.fixture
def trahiv(workplace: Workplace) -> Callable[..., Peer]:
    """`trahiv("init", ...)` runs the command in `tmp_path` to its end; see `Workplace.run`."""
    return workplace.run


@pytest.fixture
def start(workplace: Workplace) -> Callable[..., Peer]:
    """`start("init", ...)` starts the command in `tmp_path` and gives a `Peer`; see `Workplace.start`."""
    return workplace.start


@pytest.fixture
def start_paced(workplace: Workplace) -> Callable[..., Peer]:
    """`start` of a peer that trains until it is stopped: it sleeps for a tenth of a second in each batch."""
    return partial(workplace.start, pace_s=0.1)


@pytest.fixture
def endless(tmp_path: Path) -> Callable[..., Path]:
    """`endless(training__save_steps=2)` writes a recipe without an end, which one can join without a file."""
    return partial(
        recipes.write_tiny,
        tmp_path,
        data={"datasets": [{"path": "builtin/trahiv"}]},
        training__max_steps=100_000,
        hivemind_config__opt__target_batch_size=24,
        hivemind_config__opt__tracker_opts={"metadata_expiration": 8.0},
    )


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, start_paced: Callable[..., Peer], endless: Callable[..., Path]
) -> tuple[Peer, Peer, tuple[Any, ...], tuple[Any, ...]]:
    """Two peers in the folders `first` and `second` that have taken a step together, and their commands.

    A parameter changes their recipe.
    """
    init = ("init", endless(**getattr(request, "param", {})), "--output-dir", "first", *LOOPBACK)
    first = start_paced(*init)
    join = ("join", "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK)
    second = start_paced(*join)
    for peer in (first, second):
        peer.wait_for_group()
    return first, second, init, join
