"""The command of `--on-event`, a real one that writes down its events."""

import sys

import pytest

from trahiv_cli.errors import NotAdmitted
from trahiv_cli.telemetry.events import Events
from trahiv_cli.telemetry.notifier import Notifier

SCRIPT = """
import json, os, sys
event = json.load(sys.stdin)
with open(sys.argv[1], "a") as file:
    print(os.environ["TRAHIV_EVENT"], event.get("code") or event.get("step"), file=file)
"""


@pytest.fixture
def told(tmp_path):
    """The file in which the command writes."""
    return tmp_path / "told"


@pytest.fixture
def command(told):
    return [sys.executable, "-c", SCRIPT, str(told)]


def test_notable_events_reach_command_in_order(told, command):
    with Notifier(command) as notifier:
        events = Events(notifier)
        events.emit("joined", step=3)
        events.emit("step", step=4)
        events.warn("no-group", "Nobody is there yet.", "")
        events.warn("not-finite", "The loss is not finite.", "")
        events.emit("done", step=9)
    assert told.read_text() == "joined 3\nwarning not-finite\ndone 9\n"


def test_final_error_reaches_command(told, command):
    for words in (command, ["false"], ["no-such-program"]):
        with pytest.raises(NotAdmitted), Notifier(words) as notifier:
            Events(notifier).emit("joined", step=3)
            raise NotAdmitted("The owner has taken this peer out.")
    assert told.read_text() == "joined 3\nerror not-admitted\n"
