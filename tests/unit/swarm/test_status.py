"""The statuses of peers: which are accepted, how long they are, and peers with another protocol."""

from itertools import product

import pytest
from hivemind.utils import MSGPackSerializer

from tests.kit.fakes import FakeNode
from tests.unit.conftest import refused
from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import RecipeMismatch
from trahiv_cli.net.keys import RUNS_KEY
from trahiv_cli.recipe.builtin import version
from trahiv_cli.swarm import status as module
from trahiv_cli.swarm.status import (
    MAX_TEXT,
    PROTOCOL,
    Foreign,
    Status,
    Statuses,
    fetch_statuses,
    fields_of,
    moving,
    publish_status,
    require_protocol,
)

OURS = Status(run_id="run-1", step=7, max_steps=100, reached="direct", loss=0.5, round_at=1.8e9)
FIELDS = OURS.model_dump()


@pytest.fixture
def disbelieved(monkeypatch):
    """The peers whose status is discarded, with the reason."""
    said = {}
    monkeypatch.setattr(module, "ignore_peer", said.__setitem__)
    return said


@pytest.fixture
def read(disbelieved):
    """`read(entry)` returns what is read of a peer that published `entry` beside an honest one."""

    def read(entry):
        node = FakeNode("QmA")
        publish_status(node, OURS)
        node.neighbour("QmB").publish(RUNS_KEY, entry, 120.0)
        ours, foreign = fetch_statuses(node)
        assert ours.pop("QmA") == OURS
        return ours.get("QmB"), foreign.get("QmB")

    return read


@pytest.mark.parametrize(
    "names, values",
    [
        ("run_id", (7, None, "x" * 201)),
        ("step max_steps", (-1, 2**31, 1.5, "7", None)),
        ("reached", ("by pigeon", "", 7)),
        ("round_at at memory_gib", (-1.0, 2.0**40, "0")),
        ("loss", (float("nan"), float("inf"), "0.5")),
        ("samples tokens", (-1, 2**53, 0.5)),
        ("name device waits_for", ("x" * 61, 7, b"x")),
        ("version", ("", "1.0 --index-url evil", "1.0\n", "x" * 61)),
        ("state", ("dreaming",)),
    ],
)
def test_invalid_field_discards_status(read, disbelieved, names, values):
    for name, value in product(names.split(), values):
        assert read(FIELDS | {name: value}) == (None, None), (name, value)
        assert disbelieved.pop("QmB") == "the run that it publishes can't be read"


@pytest.mark.parametrize("entry", [None, 7, "run-1", [], {}, ["run-1"], [{"run_id": "run-1"}], b"\x00"])
def test_non_status_entry_is_discarded(read, disbelieved, entry):
    assert read(entry) == (None, None)
    assert "QmB" in disbelieved


def test_missing_and_unknown_fields_are_tolerated(read):
    least = {"run_id": "run-1", "protocol": PROTOCOL, "version": "0.1.0"}
    assert read(least | {"mood": "good"})[0] == Status(run_id="run-1", version="0.1.0")


def test_whole_number_counts_as_float(read):
    assert read(FIELDS | {"loss": 3, "round_at": 0})[0].loss == 3.0


@pytest.mark.parametrize(
    "entry, foreign",
    [
        (["run-1", 7], Foreign(1, "")),
        (FIELDS | {"protocol": 0, "step": "seven"}, Foreign(0, version())),
    ],
)
def test_other_protocol_is_recognized(read, disbelieved, entry, foreign):
    assert read(entry) == (None, foreign)
    assert not disbelieved


def test_longest_status_fits_1000_bytes():
    text = "😀" * (MAX_TEXT // 4)
    texts = dict.fromkeys(("name", "device", "trouble", "waits_for"), text)
    numbers = dict.fromkeys(("at", "since", "samples_per_second", "memory_gib", "round_at"), 2.0**39 + 0.1)
    counts = {"step": 2**31 - 1, "max_steps": 2**31 - 1, "samples": 2**53 - 1, "tokens": 2**53 - 1}
    longest = Status(run_id="r" * 64, round_seconds=0.1, loss=0.1, **texts, **numbers, **counts)
    assert len(MSGPackSerializer.dumps(longest.model_dump())) <= 1000


LATER = {"QmB": Foreign(PROTOCOL + 1, "9.0")}
EARLY = {"QmA": Foreign(1, "")}


@pytest.mark.parametrize(
    "statuses, named",
    [
        (Statuses({}, {}), "QmA"),
        (Statuses({"QmA": OURS}, LATER), "QmA"),
        (Statuses({"QmA": OURS}, LATER), "QmBootstrap"),
    ],
)
def test_joiner_with_same_protocol_is_admitted(statuses, named):
    require_protocol(statuses, [named])


@pytest.mark.parametrize(
    "statuses, named, hint",
    [
        (Statuses({}, LATER), [], "pip install trahiv==9.0"),
        (Statuses({}, EARLY | LATER), [], "pip install trahiv==9.0"),
        (Statuses({"QmA": OURS}, LATER), ["QmB"], "pip install trahiv==9.0"),
        (Statuses({}, EARLY), ["QmA"], f"ask its peers to install trahiv {version()}"),
    ],
)
def test_joiner_with_other_protocol_is_refused(statuses, named, hint):
    with refused("protocol .* Nothing was changed", hint, RecipeMismatch):
        require_protocol(statuses, named)


def test_event_lists_peers_and_majority_run():
    event = fields_of({"QmB": OURS, "QmA": Status(run_id="run-2"), "QmC": OURS})
    assert event["run_id"] == "run-1"
    assert abs(event["now"] - swarm_time()) < 60
    assert [one["peer_id"] for one in event["peers"]] == ["QmA", "QmB", "QmC"]
    assert event["peers"][1] == {"peer_id": "QmB", **FIELDS}


def test_event_without_peers_names_no_run():
    assert fields_of({}).items() >= {"run_id": None, "peers": []}.items()


def test_paused_peers_count_only_among_themselves():
    paused, training = Status(run_id="run-1", state="paused"), Status(run_id="run-1", state="training")
    assert moving([paused, training]) == [training]
    assert moving([paused, paused]) == [paused, paused]
