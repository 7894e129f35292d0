"""What a peer tells others of itself, and what it compares with them, over a DHT that is a stand-in."""

import io
import itertools
import logging
import queue
import threading
from types import SimpleNamespace

import pytest

from trahiv_cli.errors import SwarmError
from trahiv_cli.recipe.agreement import run_id
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.swarm.exchange import Status
from trahiv_cli.swarm.reach import Reach
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import announcing
from trahiv_cli.train.announcing import announce, is_shown_to_a_person, published, reach_told


def test_a_recipe_is_published_again_and_again_whether_the_dht_answers_or_not(monkeypatch):
    steps, is_over, node = itertools.count(), threading.Event(), SimpleNamespace(reach=Reach("punched", ""))
    recipe = load_recipe("quickstart").recipe

    def publish(_node, _recipe, status):
        assert status == Status(run_id(recipe), status.step, recipe.training.max_steps, "punched", 1000)
        if 0 < status.step < 4:
            raise SwarmError("no answer")
        if status.step > 5:
            is_over.set()

    monkeypatch.setattr(announcing, "REPUBLISH_EVERY_S", 0.001)
    monkeypatch.setattr(announcing, "publish_recipe", publish)
    with published(node, recipe, lambda: (next(steps), 1000.6)):
        assert is_over.wait(10)


def test_a_peer_says_how_others_reach_it_and_by_whom_they_join(tmp_path):
    own, entrance = "/ip4/192.168.1.7/tcp/1", "/ip4/5.5.5.1/tcp/1"
    node, told = SimpleNamespace(peer_id="QmPeer", standing=None), []
    node.known_reach = lambda within_s: Reach("punched", "Hole punching works.")
    node.own_addresses, node.entrances = lambda: [own], lambda: [entrance, own]
    announce(node, tmp_path, Events(told.append))
    [ready] = told
    assert (ready["reached"], ready["reached_why"]) == ("punched", "Hole punching works.")
    assert (ready["maddrs"], ready["reach"]) == ([own], ["local network"])
    assert ready["join"] == f"trahiv join --peer {entrance}", "nobody can dial this peer"


def test_a_change_of_how_others_reach_a_peer_is_told_once(monkeypatch):
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
    [  # what gets what is logged, and whether that is a person alone
        ([TERMINAL], False, True),
        ([TERMINAL, FILE], False, False),
        ([FILE], True, False),
        ([None], False, False),
        ([], False, False),
        ([], True, True),
    ],
)
def test_an_invitation_is_shown_to_a_person_and_to_no_log(monkeypatch, streams, is_notebook, is_private):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("transformers.utils.import_utils.is_in_notebook", lambda: is_notebook)
    log = logging.Logger("log")
    log.parent = logging.Logger("above")
    log.parent.handlers = [logging.StreamHandler(one) if one else logging.NullHandler() for one in streams]
    assert is_shown_to_a_person(log) == is_private
