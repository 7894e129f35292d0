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
ROUND = {
    "group": ["QmA", "QmB"],
    "seconds": 1.5,
    "blocked_seconds": 0.5,
    "bytes_sent": 10,
    "bytes_received": 20,
}


def step(number, **more):
    return {
        "step": number, "loss": 2.0, "learning_rate": 0.1, "samples": 64, "my_samples": 16, "peers": 2,
        "samples_per_second": 3.0, "round": None, "my_tokens": 160, **more,
    }  # fmt: skip


@pytest.fixture
def metrics():
    """The metrics of a peer that took three steps, two of them with another peer."""
    made = Metrics()
    events = Events(made)
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
    return made


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"trahiv_{name}", labels)


def test_metrics_follow_events(metrics):
    assert metrics.registry.get_sample_value("trahiv_run_info", {"run_id": "run-1", "peer_id": "QmA"}) == 1
    gauges = {"step": 7, "steps": 40, "loss": 1.5, "held_out_loss": 1.75, "peers": 2, "checkpoint_step": 7}
    assert {name: value(metrics, name) for name in gauges} == gauges
    totals = {"samples": 48, "tokens": 480, "swarm_samples": 192, "round_sent_bytes": 20}
    totals |= {"round_received_bytes": 40, "round_blocked_seconds": 1.0}
    assert {name: value(metrics, f"{name}_total") for name in totals} == totals
    assert [value(metrics, "rounds_total", outcome=one) for one in ("committed", "failed")] == [2, 1]
    assert value(metrics, "warnings_total", code="data") == 1 and value(metrics, "round_seconds_count") == 2
    assert (
        value(metrics, "state", trahiv_state="paused") == value(metrics, "reach", trahiv_reach="punched") == 1
    )
    Events(metrics).emit("done", step=7)
    assert value(metrics, "state", trahiv_state="ended") == 1


def test_metric_names_follow_openmetrics(metrics):
    families = list(text_string_to_metric_families(exposition.generate_latest(metrics.registry).decode()))
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"trahiv_[a-z_]+", family.name) and family.documentation.endswith(".")
        words = family.name.split("_")
        assert not {"ms", "milliseconds", "minutes", "kb", "mb", "mib", "count", "sum", family.type} & {
            *words
        }
        is_time = {"seconds", "bytes"} & {*words}
        assert not is_time or words[-1] in ("seconds", "bytes", "second"), family.name


def test_dashboard_and_metrics_match(metrics):
    there = {
        line.split("{")[0].split(" ")[0] for line in generate_latest(metrics.registry).decode().splitlines()
    }
    board = json.loads(BOARD.read_text())
    shown = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            wanted = set(re.findall(r"(?<!\{)\btrahiv_[a-z_]+", target["expr"]))
            assert wanted and wanted <= there, panel["title"]
            shown |= wanted
    ids = [panel["id"] for panel in board["panels"]]
    assert ids == sorted({*ids})
    kept = {name for name in there if name.startswith("trahiv_") and not name.endswith(("_created", "_info"))}
    left = {re.sub(r"_(count|sum)$", "_bucket", name) for name in kept} - shown
    assert left == {"trahiv_learning_rate", "trahiv_checkpoint_step", "trahiv_tokens_total"}


def test_metrics_are_served_locally(metrics):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics.serve(port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"trahiv_step 7.0" in answer.read()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SetupError, match="can't be used for metrics"):
            Metrics().serve(taken.getsockname()[1])
