"""A run's events as metrics for Prometheus: `--metrics PORT`, at http://127.0.0.1:PORT/metrics.

Names follow OpenMetrics: base units, and `_total` for counters. Counters begin at 0 when this peer starts; a
scraper adds up counters that were reset.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, start_http_server

from trahiv_cli.errors import SetupError
from trahiv_cli.telemetry.events import Event


class Metrics:
    """Turns a peer's events into metrics, in a registry of its own.

    A command with `--metrics` makes one, which serves until the process ends.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, says: str) -> Gauge:
            return Gauge(f"trahiv_{name}", says, registry=registry)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"trahiv_{name}", says, labels, registry=registry)

        self._run = Info("trahiv_run", "The run, and this peer of it.", registry=registry)
        states = ["loading", "training", "paused", "ended"]
        self._state = Enum("trahiv_state", "This peer's state.", states=states, registry=registry)
        reaches = ["direct", "punched", "relayed", "dials-out", "alone"]
        self._reach = Enum("trahiv_reach", "How others reach it.", states=reaches, registry=registry)
        self._step = gauge("step", "Optimizer step of the swarm that this peer has reached.")
        self._steps = gauge("steps", "Steps of the whole run.")
        self._step_at = gauge("last_step_timestamp_seconds", "When that step was taken.")
        self._round_at = gauge("last_round_timestamp_seconds", "When a round with others was last committed.")
        self._loss = gauge("loss", "This peer's mean loss over the last step.")
        self._held_out = gauge("held_out_loss", "Loss of the last evaluation.")
        self._rate = gauge("learning_rate", "Learning rate of the last step.")
        self._peers = gauge("peers", "Peers of the run, this one included.")
        self._speed = gauge("samples_per_second", "Samples that this peer trains in a second.")
        self._saved = gauge("checkpoint_step", "Step of the last checkpoint.")
        self._samples = counter("samples", "Samples that this peer has given to the run.")
        self._all_samples = counter(
            "swarm_samples", "Samples of all peers, in the steps that this peer took part in."
        )
        self._tokens = counter("tokens", "Trained tokens in the samples that this peer has given.")
        self._rounds = counter("rounds", "Rounds with others, by how they ended.", "outcome")
        self._blocked = counter("round_blocked_seconds", "Time for which training waited for rounds.")
        self._sent = counter("round_sent_bytes", "Bytes sent in rounds.")
        self._received = counter("round_received_bytes", "Bytes received in rounds.")
        self._warnings = counter("warnings", "Warnings, by their code.", "code")
        seconds = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
        self._seconds = Histogram(
            "trahiv_round_seconds", "Time that rounds took.", buckets=seconds, registry=registry
        )
        for outcome in ("committed", "failed"):
            self._rounds.labels(outcome)

    def serve(self, port: int) -> None:
        """Serve the metrics on a loopback port until the process ends; raise SetupError if it is taken."""
        try:
            start_http_server(port, "127.0.0.1", self.registry)
        except OSError as error:
            raise SetupError(
                f"Port {port} of this machine can't be used for metrics: {error.strerror}.",
                hint="name another one with --metrics",
            ) from error

    def __call__(self, event: Event) -> None:
        """Update the metrics with one event."""
        if event["event"] in ("ready", "joined", "reach"):
            self._reach.state(event["reached"])
        match event["event"]:
            case "ready":
                self._run.info({"run_id": event["run_id"] or "", "peer_id": event["peer_id"]})
                self._steps.set(event.get("max_steps", 0))
            case "joined":
                self._state.state("training")
                self._step.set(event["step"])
                self._peers.set(event["peers"])
            case "step":
                self._take_step(event)
            case "eval" if "eval_loss" in event:
                self._held_out.set(event["eval_loss"])
            case "checkpoint":
                self._saved.set(event["step"])
            case "warning":
                self._warnings.labels(event["code"]).inc()
                if event["code"] == "round":
                    self._rounds.labels("failed").inc()
            case "paused":
                self._state.state("paused")
                self._run.info({"run_id": event["run_id"], "peer_id": event["peer_id"]})
            case "resumed":
                self._state.state("loading")
            case "done":
                self._state.state("ended")

    def _take_step(self, event: Event) -> None:
        self._step.set(event["step"])
        self._step_at.set(event["t"])
        self._loss.set(math.nan if event["loss"] is None else event["loss"])
        self._rate.set(event["learning_rate"] or 0.0)
        self._peers.set(event["peers"])
        self._speed.set(event["samples_per_second"])
        self._samples.inc(event["my_samples"])
        self._tokens.inc(event["my_tokens"])
        self._all_samples.inc(event["samples"] or 0)
        if (last := event["round"]) is not None:
            self._round_at.set(event["t"])
            self._rounds.labels("committed").inc()
            self._seconds.observe(last["seconds"])
            self._blocked.inc(last["blocked_seconds"])
            self._sent.inc(last["bytes_sent"])
            self._received.inc(last["bytes_received"])
