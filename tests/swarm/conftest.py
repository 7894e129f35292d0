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
    "test_two_peers.py::test_a_second_peer_joins_by_the_printed_line_and_a_third_at_half_time",
    "test_exit_codes.py::test_a_usage_error_ends_with_2_and_names_the_help",
    "test_leaving.py::test_a_signal_ends_training_with_a_checkpoint_and_no_child_outlives_a_kill",
    "test_restarts.py::test_all_that_were_killed_at_once_go_on_from_what_the_furthest_had_saved[saving]",
    "test_faults.py::test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies",
    "test_faults.py::test_who_asks_too_much_and_is_deaf_stops_nobody",
    "test_closed_swarm.py::test_members_find_each_other_and_their_records_and_a_stranger_is_not_admitted",
    "test_nodes.py::test_a_node_reads_what_the_other_published[tcp]",
    "test_nodes.py::test_peers_that_start_again_alone_find_each_other",
    "test_restarts.py::test_a_peer_whose_process_fails_starts_again_and_trains_along[dht-killed]",
    "test_exactness.py::test_two_peers_equal_one_process_that_sees_both_their_batches",
    "test_drop_in.py::test_a_good_run_of_two_says_how_to_join_and_nothing_else",
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
