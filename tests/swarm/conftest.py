"""Fixtures for tests with real `trahiv` processes; see `tests.kit.commands`."""

import contextlib
import json
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.kit import recipes
from tests.kit.commands import LOOPBACK, Workplace
from trahiv_cli.recipe.schema import DhtSection

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
    "test_trainers.py::test_one_peer_equals_trainer_alone[masked language model]",
    "test_trainers.py::test_one_peer_equals_trainer_alone[Seq2SeqTrainer, T5]",
    "test_trainers.py::test_one_peer_equals_trainer_alone[peft, DoRA]",
    "test_trainers.py::test_one_peer_equals_trainer_alone[TRL, Reward]",
    "test_launch.py::test_two_launched_peers_end_equal",
    "test_drop_in.py::test_good_run_prints_only_join_line",
    "test_recipes.py::test_two_peers_train_one_model[spanish-qlora]",
    "test_recipes.py::test_two_peers_train_one_model[review-classes]",
)
"""Those that stand for all in `make test`: one for each room, and for what only a process can show."""


LOCAL = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)


def told(events, kind, **fields):
    """Return the events of a kind that have these fields."""
    return [one for one in events if one["event"] == kind and fields.items() <= one.items()]


def recorded(run):
    """Return the events in the file of a run's folder."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def above(limit):
    """Return a condition of a field in `Peer.wait_for`."""
    return lambda value: value > limit


def advance(*peers, steps, timeout):
    """Wait until peers have taken some more steps; return the last of these."""
    last = max(peer.steps[-1]["step"] for peer in peers) + steps
    for peer in peers:
        peer.wait_for("step", timeout, step=above(last - 1))
    return last


def id_of(peer):
    return peer.wait_for("ready", 60)["peer_id"]


@contextlib.contextmanager
def suspended(peer):
    """Suspend all processes of a peer within the block; gives the time of the suspension."""
    sleeper = [psutil.Process(peer.pid), *psutil.Process(peer.pid).children(recursive=True)]
    for process in sleeper:
        process.suspend()
    try:
        yield time.time()
    finally:
        for process in sleeper:
            process.resume()


def pytest_collection_modifyitems(items):
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
def workplace(tmp_path):
    """The folder of this test; what `start` started in it ends with the test."""
    with Workplace(tmp_path) as place:
        yield place


@pytest.fixture
def trahiv(workplace):
    """`trahiv("init", ...)` runs the command in `tmp_path` to its end; see `Workplace.run`."""
    return workplace.run


@pytest.fixture
def start(workplace):
    """`start("init", ...)` starts the command in `tmp_path` and gives a `Peer`; see `Workplace.start`."""
    return workplace.start


@pytest.fixture
def start_paced(workplace):
    """`start` of a peer that trains until it is stopped: it sleeps for a tenth of a second in each batch."""
    return partial(workplace.start, pace_s=0.1)


@pytest.fixture
def endless(tmp_path):
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
def pair(request, start_paced, endless):
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
