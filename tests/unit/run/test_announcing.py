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
from trahiv_cli.run import announcing
from trahiv_cli.run.announcing import (
    announce,
    is_shown_to_a_person,
    log_event,
    published,
    reach_told,
)
from trahiv_cli.run.own_status import Account
from trahiv_cli.swarm.status import Status, fetch_statuses, publish_status
from trahiv_cli.telemetry.events import Events

RUN = resolve(load_recipe("quickstart").recipe)
OWN = "/ip4/192.168.1.7/tcp/1"
ENTRANCE = "/ip4/5.5.5.1/tcp/1"


@pytest.fixture
def home(monkeypatch, clock):
    """A node whose DHT is a dict, published to at once."""
    monkeypatch.setattr(announcing, "PUBLISH_EVERY_S", 0.001)
    monkeypatch.setattr(announcing, "PUBLISH_GAP_S", 0.001)
    node = FakeNode("QmOwn", now=clock)
    node.reach = Reach("punched", "")
    return node


@pytest.fixture
def account():
    return Account(RUN.run_id, 3, 40)


def test_publishing_survives_dht_failures(home, account, monkeypatch):
    tries = itertools.count()
    is_over = threading.Event()

    def publish(*_):
        if 0 < (number := next(tries)) < 4:
            raise SwarmError("no answer")
        if number > 5:
            is_over.set()

    monkeypatch.setattr(announcing, "publish_recipe", publish)
    with published(home, RUN, account, Events()):
        account({"event": "reach"})
        assert is_over.wait(10)
    told = fetch_statuses(home).ours["QmOwn"]
    assert (told.run_id, told.step, told.max_steps, told.reached) == (RUN.run_id, 3, 40, "punched")


def test_change_republishes_status_alone(home, account, monkeypatch):
    monkeypatch.setattr(announcing, "PUBLISH_EVERY_S", 60.0)
    recipes = []
    monkeypatch.setattr(announcing, "publish_recipe", lambda *_: recipes.append(1))
    with published(home, RUN, account, Events()):
        account({"event": "paused"})
        deadline = time.monotonic() + 10
        while fetch_statuses(home).ours["QmOwn"].state != "paused":
            assert time.monotonic() < deadline
    assert len(recipes) == 1


def test_statuses_of_others_are_reported(home, account):
    told = []
    publish_status(home.neighbour("QmOther"), Status(run_id="run-1", name="Bob"))
    with published(home, None, account, Events(told.append)):
        pass
    assert [one["name"] for one in told[0]["peers"] if one["peer_id"] == "QmOther"] == ["Bob"]


def test_copied_identity_warns_once(home, account):
    told = queue.Queue()
    publish = home.publish
    home.publish = lambda *_: None
    before = account.status.model_copy(update={"since": account.status.since - 60})

    def stands(at):
        publish(RUNS_KEY, before.model_copy(update={"at": at}).model_dump(), 1e9)

    def hear():
        event = told.get(timeout=10)
        return event.get("code", event["event"])

    stands(account.status.since - 1)
    with published(home, None, account, Events(told.put)):
        # The record of this peer from before its restart is none of a copy.
        assert [hear() for _ in range(3)] == ["peers"] * 3
        stands(account.status.at + 60)
        while (event := hear()) == "peers":
            pass
        assert [event, hear(), hear()] == ["copied", "peers", "peers"]


@pytest.fixture
def node():
    """A node that others can dial at its entrance alone."""
    node = FakeNode("QmPeer")
    node.standing = None
    node.known_reach = lambda within_s: Reach("punched", "Hole punching works.")
    node.own_addresses = lambda: [OWN]
    node.entrances = lambda: [ENTRANCE, OWN]
    return node


def test_ready_event_has_reach_and_entrance(node, tmp_path):
    told = []
    node.notes = lambda: ["It listens elsewhere."]
    announce(node, tmp_path, Events(told.append))
    noted, ready = told
    assert (noted["code"], noted["message"]) == ("addresses", "It listens elsewhere.")
    assert (ready["reached"], ready["reached_why"]) == ("punched", "Hole punching works.")
    assert (ready["maddrs"], ready["reach"]) == ([OWN], ["local network"])
    assert ready["join"] == f"trahiv join --peer {ENTRANCE}"


def test_run_without_recipe_is_announced(node, tmp_path, caplog):
    told = []
    with caplog.at_level(logging.INFO, logger="trahiv_cli"):
        events = Events(log_event, told.append)
        announce(node, tmp_path, events, "run-1", joined="initial_peers = [{!r}]".format, max_steps=5)
    [ready] = told
    assert (ready["run_id"], ready["fingerprint"], ready["max_steps"]) == ("run-1", None, 5)
    assert ready["join"] == f"initial_peers = ['{ENTRANCE}']"
    assert ready["join"] in caplog.text


def test_reach_change_is_reported_once(monkeypatch):
    monkeypatch.setattr(announcing, "REACH_EVERY_S", 0.001)
    node = SimpleNamespace(reach=Reach("alone", "Nobody is there."))
    told = queue.Queue()
    events = Events(told.put)
    with reach_told(node, events):
        for reach in (Reach("relayed", "Through a member."), Reach("direct", "It was dialled.")):
            node.reach = reach
            event = told.get(timeout=10)
            assert (event["event"], event["reached"], event["reached_why"]) == ("reach", *reach[:2])
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
    assert [record.getMessage() for record in caplog.records] == [
        "warning [round]: The round failed. (look at the link)"
    ]
