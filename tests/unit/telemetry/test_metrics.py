"""Metrics of a run: derived from its events, by the rules of OpenMetrics, and the board that shows them."""

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from trahiv_cli.errors import SetupError
from trahiv_cli.telemetry.events import Events
from trahiv_cli.telemetry.metrics import Metrics

BOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
ROUND = {"seconds": 1.5, "blocked_seconds": 0.5, "bytes_sent": 10, "bytes_received": 20}


def step(number, **more):
    return {
        "step": number, "loss": 2.0, "learning_rate": 0.1, "samples": 64, "my_samples": 16, "peers": 2,
        "samples_per_second": 3.0, "round": None, "my_tokens": 160, **more,
    }  # fmt: skip


@pytest.fixture
def metrics():
    """The metrics of a peer that took four steps, two of them with another peer."""
    metrics = Metrics()
    events = Events(metrics)
    events.emit("ready", run_id="run-1", peer_id="QmA", max_steps=40, reached="alone")
    events.emit("joined", step=3, peers=2, reached="direct")
    events.emit("step", **step(4))
    events.emit("step", **step(5, round=ROUND))
    events.emit("step", **step(6, loss=None, samples=None, my_samples=0, my_tokens=0))
    events.emit("step", **step(7, round=ROUND, loss=1.5))
    events.warn("round", "It failed.", "")
    events.warn("data", "Look at it.", "")
    events.emit("eval", step=7, eval_loss=1.75)
    events.emit("checkpoint", step=7, path="x")
    events.emit("reach", reached="punched", reached_why="")
    events.emit("paused", step=7, why="", run_id="run-1", peer_id="QmA")
    return metrics


def lines_of(metrics):
    return generate_latest(metrics.registry).decode().splitlines()


def test_metrics_follow_events(metrics):
    assert {
        'trahiv_run_info{peer_id="QmA",run_id="run-1"} 1.0',
        "trahiv_step 7.0",
        "trahiv_steps 40.0",
        "trahiv_loss 1.5",
        "trahiv_held_out_loss 1.75",
        "trahiv_peers 2.0",
        "trahiv_checkpoint_step 7.0",
        "trahiv_samples_total 48.0",
        "trahiv_tokens_total 480.0",
        "trahiv_swarm_samples_total 192.0",
        "trahiv_round_sent_bytes_total 20.0",
        "trahiv_round_received_bytes_total 40.0",
        "trahiv_round_blocked_seconds_total 1.0",
        "trahiv_round_seconds_count 2.0",
        'trahiv_rounds_total{outcome="committed"} 2.0',
        'trahiv_rounds_total{outcome="failed"} 1.0',
        'trahiv_warnings_total{code="data"} 1.0',
        'trahiv_state{trahiv_state="paused"} 1.0',
        'trahiv_reach{trahiv_reach="punched"} 1.0',
    } <= {*lines_of(metrics)}


def test_end_of_run_is_a_state(metrics):
    Events(metrics).emit("done", step=7)
    assert 'trahiv_state{trahiv_state="ended"} 1.0' in lines_of(metrics)


def test_metric_names_follow_openmetrics(metrics):
    families = [*text_string_to_metric_families(exposition.generate_latest(metrics.registry).decode())]
    assert len(families) > 20
    wrong = {"ms", "milliseconds", "minutes", "kb", "mb", "mib", "count", "sum"}
    for family in families:
        assert re.fullmatch(r"trahiv_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        words = family.name.split("_")
        assert not {*words} & {*wrong, family.type}
        if {*words} & {"seconds", "bytes"}:
            assert words[-1] in ("seconds", "bytes", "second"), family.name


def test_dashboard_and_metrics_match(metrics):
    there = {re.split("[{ ]", line)[0] for line in lines_of(metrics)}
    panels = json.loads(BOARD.read_text())["panels"]
    ids = [panel["id"] for panel in panels]
    assert ids == sorted({*ids})
    named = [re.findall(r"(?<!\{)\btrahiv_[a-z_]+", x["expr"]) for panel in panels for x in panel["targets"]]
    assert all(named)
    shown = set().union(*named)
    assert shown <= there
    kept = {name for name in there if name.startswith("trahiv_") and not name.endswith(("_created", "_info"))}
    left = {re.sub(r"_(count|sum)$", "_bucket", name) for name in kept} - shown
    assert left == {"trahiv_learning_rate", "trahiv_checkpoint_step", "trahiv_tokens_total"}


@pytest.fixture
def port():
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_metrics_are_served_locally(metrics, port):
    metrics.serve(port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"trahiv_step 7.0" in answer.read()


def test_taken_port_is_refused(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(SetupError, match="can't be used for metrics"),
    ):
        Metrics().serve(port)
