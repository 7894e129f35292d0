"""What a peer publishes about itself, and compares with others, over a DHT that is a stand-in."""

import io
import itertools
import logging
import queue
import threading
import time
from types import SimpleNamespace

import pytest

from tests.kit.fakes import FakeNode
from trahiv_cli.errors import SwarmError
from trahiv_cli.net.keys import RUNS_KEY
from trahiv_cli.reach.reachability import Reach
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import pack
from trahiv_cli.run import announcing
from trahiv_cli.run.announcing import (
    announce,
    is_shown_to_a_person,
    log_event,
    published,
    reach_reported,
)
from trahiv_cli.run.own_status import Contribution, OwnStatus
from trahiv_cli.swarm.status import Status, fetch_statuses, publish_status
from trahiv_cli.telemetry.events import Events

RUN = resolve(load_recipe("quickstart").recipe)
OWN = "/ip4/192.168.1.7/tcp/1"
ENTRANCE = "/ip4/5.5.5.1/tcp/1"
AT_ONCE = {"every_s": 0.001, "gap_s": 0.001}


@pytest.fixture
def home(clock):
    """A node whose DHT is a dict."""
    node = FakeNode("QmOwn", now=clock)
    node.reach = Reach("punched", "")
    return node


@pytest.fixture
def own_status():
    return OwnStatus(RUN.run_id, 3, 40, Contribution())


def test_publishing_survives_dht_failures(home, own_status, monkeypatch):
    tries = itertools.count()
    is_over = threading.Event()

    def publish(*_):
        if 0 < (number := next(tries)) < 4:
            raise SwarmError("no answer")
        if number > 5:
            is_over.set()

    monkeypatch.setattr(announcing, "publish_run", publish)
    with published(home, pack(RUN), own_status, Events(), **AT_ONCE):
        own_status({"event": "reach"})
        assert is_over.wait(10)
    own = {"run_id": RUN.run_id, "step": 3, "max_steps": 40, "reached": "punched"}
    assert fetch_statuses(home).ours["QmOwn"].model_dump().items() >= own.items()


def test_change_republishes_status_alone(home, own_status, monkeypatch):
    recipes = []
    monkeypatch.setattr(announcing, "publish_run", lambda *_: recipes.append(1))
    with published(home, pack(RUN), own_status, Events(), gap_s=0.001):
        own_status({"event": "paused"})
        deadline = time.monotonic() + 10
        while fetch_statuses(home).ours["QmOwn"].state != "paused":
            assert time.monotonic() < deadline
    assert len(recipes) == 1


def test_statuses_of_others_are_reported(home, own_status, events, told):
    publish_status(home.neighbour("QmOther"), Status(run_id="run-1", name="Bob"))
    with published(home, None, own_status, events):
        pass
    assert [one["name"] for one in told[0]["peers"] if one["peer_id"] == "QmOther"] == ["Bob"]


def test_copied_identity_warns_once(home, own_status):
    told = queue.Queue()
    publish = home.publish
    home.publish = lambda *_: None
    own = own_status.current

    def stand(at):
        record = own.model_copy(update={"since": own.since - 60, "at": at})
        publish(RUNS_KEY, record.model_dump(), 1e9)

    def hear():
        event = told.get(timeout=10)
        return event.get("code", event["event"])

    stand(own.since - 1)
    with published(home, None, own_status, Events(told.put), **AT_ONCE):
        # The record of this peer from before its restart is none of a copy.
        assert [hear() for _ in range(3)] == ["peers"] * 3
        stand(own.at + 60)
        while (event := hear()) == "peers":
            pass
        assert [event, hear(), hear()] == ["copied", "peers", "peers"]


@pytest.fixture
def node():
    """A node that others can dial at its entrance alone."""
    node = FakeNode("QmPeer")
    node.credentials = None
    node.known_reach = lambda within_s: Reach("punched", "Hole punching works.")
    node.own_addresses = lambda: [OWN]
    node.entrances = lambda: [ENTRANCE, OWN]
    return node


def test_ready_event_has_reach_and_entrance(node, tmp_path, events, told):
    node.notes = lambda: ["It listens elsewhere."]
    announce(node, tmp_path, events)
    expected = (
        {"code": "addresses", "message": "It listens elsewhere."},
        {
            "reached": "punched",
            "reached_why": "Hole punching works.",
            "maddrs": [OWN],
            "reach": ["local network"],
            "join": f"trahiv join --peer {ENTRANCE}",
        },
    )
    for event, fields in zip(told, expected, strict=True):
        assert event.items() >= fields.items()


def test_run_without_recipe_is_announced(node, tmp_path, caplog, events, told):
    events.add(log_event)
    with caplog.at_level(logging.INFO, logger="trahiv_cli"):
        announce(node, tmp_path, events, "run-1", joined="initial_peers = [{!r}]".format, max_steps=5)
    join = f"initial_peers = ['{ENTRANCE}']"
    fields = {"run_id": "run-1", "fingerprint": None, "max_steps": 5, "join": join}
    assert told[0].items() >= fields.items()
    assert join in caplog.text


def test_reach_change_is_reported_once():
    node = SimpleNamespace(reach=Reach("alone", "Nobody is there."))
    told = queue.Queue()
    with reach_reported(node, Events(told.put), every_s=0.001):
        for node.reach in (Reach("relayed", "Through a member."), Reach("direct", "It was dialled.")):
            event = told.get(timeout=10)
            assert (event["event"], event["reached"], event["reached_why"]) == ("reach", *node.reach[:2])
        node.reach = Reach("direct", "Another member has dialled it.")
    assert told.empty()


TERMINAL = io.StringIO()
FILE = io.StringIO()
TERMINAL.isatty = lambda: True


@pytest.mark.parametrize(
    ("streams", "is_notebook", "is_private"),
    [  # the streams of a log, and whether only a person reads them
        ([TERMINAL], False, True),
        ([TERMINAL, FILE], False, False),
        ([FILE], True, False),
        ([None], False, False),
        ([], False, False),
        ([], True, True),
    ],
)
def test_invitation_is_shown_only_to_person(monkeypatch, streams, is_notebook, is_private):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("transformers.utils.import_utils.is_in_notebook", lambda: is_notebook)
    log = logging.Logger("log")
    log.parent = logging.Logger("above")
    log.parent.handlers = [logging.StreamHandler(one) if one else logging.NullHandler() for one in streams]
    assert is_shown_to_a_person(log) == is_private


def test_warning_is_logged_with_hint(caplog):
    events = Events(log_event)
    with caplog.at_level(logging.WARNING, logger="trahiv_cli"):
        events.emit("checkpoint", step=3, path="there")
        events.warn("round", "The round failed.", "look at the link")
    assert caplog.messages == ["warning [round]: The round failed. (look at the link)"]
