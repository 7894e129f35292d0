"""What is on a terminal beside the live view."""

from trahiv_cli.cli.output import Format, Output
from trahiv_cli.telemetry.events import Events

WAIT = {"what": "the libraries to load", "seconds": 5.0, "until_seconds": 120}


def test_a_wait_before_the_join_line_is_said_above_the_live_view(capsys):
    output, events = Output(), Events()
    output.format = Format.human
    with output.listening(events):
        events.emit("waiting", **WAIT)
        assert "waiting for the libraries to load: 5 s so far" in capsys.readouterr().out
