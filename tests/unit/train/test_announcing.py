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
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.swarm.node import RUNS_KEY
from trahiv_cli.swarm.reach import Reach
from trahiv_cli.swarm.status import Status, fetch_statuses, publish_status
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import announcing
from trahiv_cli.train.account import Account
from trahiv_cli.train.announcing import (
    announce,
    is_shown_to_a_person,
    log_event,
    published,
    reach_told,
)

RUN = resolve(load_recipe("quickstart").recipe)


@pytest.fixture
def home(monkeypatch, clock):
    """A node whose DHT is a dict, published to at once."""
    monkeypatch.setattr(announcing, "PUBLISH_EVERY_S", 0.001)
    monkeypatch.setattr(announcing, "PUBLISH_GAP_S", 0.001)
    node = FakeNode("QmOwn", now=clock)
    node.reach = Reach("punched", "")
    return node


def own_account():
    return Account(RUN.run_id, 3, 40)


def test_publishing_survives_dht_failures(home, monkeypatch):
    tries, is_over, events = itertools.count(), threading.Event(), Events()

    def publish(node, recipe):
        if 0 < (number := next(tries)) < 4:
            raise SwarmError("no answer")
        if number > 5:
            is_over.set()

    monkeypatch.setattr(announcing, "publish_recipe", publish)
    account = own_account()
    with published(home, RUN, account, events):
        account({"event": "reach"})
        assert is_over.wait(10)
    told = fetch_statuses(home).ours["QmOwn"]
    assert (told.run_id, told.step, told.max_steps, told.reached) == (RUN.run_id, 3, 40, "punched")


def test_change_republishes_status_alone(home, monkeypatch):
    monkeypatch.setattr(announcing, "PUBLISH_EVERY_S", 60.0)
    recipes, account = [], own_account()
    monkeypatch.setattr(announcing, "publish_recipe", lambda *_: recipes.append(1))
    with published(home, RUN, account, Events()):
        account({"event": "paused"})
        deadline = time.monotonic() + 10
        while fetch_statuses(home).ours["QmOwn"].state != "paused":
            assert time.monotonic() < deadline
    assert len(recipes) == 1


def test_copied_identity_warns_once(home):
    told, account = queue.Queue(), own_account()
    before = account.status.model_copy(update={"since": account.status.since - 60})
    publish_status(home.neighbour("QmOther"), Status(run_id="run-1", name="Bob"))
    real = home.publish
    home.publish = lambda key, value, ttl: real(key, value, ttl) if key != RUNS_KEY else None

    def stands(at):
        real(RUNS_KEY, before.model_copy(update={"at": at}).model_dump(), 1e9)

    stands(account.status.since - 1)
    with published(home, RUN, account, Events(told.put)):
        for _ in range(3):  # the record of this peer from before its restart
            event = told.get(timeout=10)
            assert event["event"] == "peers"
            assert [one["name"] for one in event["peers"] if one["peer_id"] == "QmOther"] == ["Bob"]
        stands(account.status.at + 60)
        while (event := told.get(timeout=10))["event"] == "peers":
            pass
        assert event["code"] == "copied"
        assert told.get(timeout=10)["event"] == told.get(timeout=10)["event"] == "peers"


def test_ready_event_has_reach_and_entrance(tmp_path):
    own, entrance = "/ip4/192.168.1.7/tcp/1", "/ip4/5.5.5.1/tcp/1"
    node, told = SimpleNamespace(peer_id="QmPeer", standing=None, notes=lambda: ["It listens elsewhere."]), []
    node.known_reach = lambda within_s: Reach("punched", "Hole punching works.")
    node.own_addresses, node.entrances = lambda: [own], lambda: [entrance, own]
    announce(node, tmp_path, Events(told.append))
    noted, ready = told
    assert (noted["code"], noted["message"]) == ("addresses", "It listens elsewhere.")
    assert (ready["reached"], ready["reached_why"]) == ("punched", "Hole punching works.")
    assert (ready["maddrs"], ready["reach"]) == ([own], ["local network"])
    assert ready["join"] == f"trahiv join --peer {entrance}", "nobody can dial this peer"


def test_reach_change_is_reported_once(monkeypatch):
    monkeypatch.setattr(announcing, "REACH_EVERY_S", 0.001)
    node, told = SimpleNamespace(reach=Reach("alone", "Nobody is there.")), queue.Queue()
    events = Events(told.put)
    with reach_told(node, events):
        for reach in (Reach("relayed", "Through a member."), Reach("direct", "It was dialled.")):
            node.reach = reach
            event = told.get(timeout=10)
            assert event["event"] == "reach" and (event["reached"], event["reached_why"]) == reach[:2]
        node.reach = Reach("direct", "Another member has dialled it.")
    assert told.empty()


TERMINAL, FILE = io.StringIO(), io.StringIO()
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


def test_run_without_recipe_is_announced(tmp_path, caplog):
    node = FakeNode("QmOwn")
    node.known_reach = lambda *_: Reach("direct", "")
    address = "/ip4/192.0.2.7/tcp/4321"
    node.own_addresses = node.entrances = lambda: [address]
    node.standing, told = None, []
    with caplog.at_level(logging.INFO, logger="trahiv_cli"):
        events = Events(log_event, told.append)
        announce(node, tmp_path, events, "run-1", joined="initial_peers = [{!r}]".format, max_steps=5)
    [ready] = told
    assert (ready["run_id"], ready["fingerprint"], ready["max_steps"]) == ("run-1", None, 5)
    assert ready["join"] == f"initial_peers = ['{address}']" and ready["join"] in caplog.text
