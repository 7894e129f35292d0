"""Events as lines of text, one each: for logs, pipes and terminals without a live view."""

from __future__ import annotations

from trahiv_cli.telemetry.events import Event

REACH = {
    "internet": "from the internet",
    "local network": "from this network",
    "this machine": "from this machine",
}


def line(event: Event) -> str | None:
    """Return an event as text; None for events that a log does not need."""
    match event["event"]:
        case "ready":
            return ready(event)
        case "joined":
            return f"joined at step {event['step']}, peers {event['peers']}. {event['why']}"
        case "step":
            loss = "-" if event["loss"] is None else f"{event['loss']:.4f}"
            rate = "-" if event["learning_rate"] is None else f"{event['learning_rate']:.3g}"
            last = event["round"]
            earned = f"reward {event['reward']:.4f}, " if "reward" in event else ""
            return (
                f"step {event['step']}, {earned}loss {loss}, lr {rate}, samples {event['samples'] or '-'} "
                f"({event['my_samples']} mine), peers {event['peers']}, "
                f"{event['samples_per_second']:.1f} samples/s"
                + (f", round of {len(last['group'])} in {last['seconds']:.2f} s" if last else "")
            )
        case "eval":
            # TRL has a dozen more, whose names have a slash.
            named = {key: value for key, value in event.items() if key.startswith("eval_") and "/" not in key}
            numbers = [f"{key}={value:.4g}" for key, value in named.items()]
            return f"eval at step {event['step']}: {' '.join(numbers)}"
        case "checkpoint":
            return f"checkpoint: {event['path']}"
        case "waiting":
            return (
                f"waiting for {event['what']}: {event['seconds']:.0f} s so far, "
                f"at most {event['until_seconds']:.0f} s"
            )
        case "sample" if event.get("is_reply"):
            return f"at step {event['step']} the model answers: {event['prompt']}\n{event['text']}"
        case "sample":
            return f"at step {event['step']} the model continues {event['prompt']!r} with {event['text']!r}"
        case "pace":
            return f"pace: {event['message']}"
        case "reach":
            return f"reach {reached(event)}"
        case "paused":
            return f"paused at step {event['step']}: {event['why']}. Others can still join through this peer"
        case "resumed":
            return f"goes on after a pause of {event['seconds']:.0f} s"
        case "folder":
            return str(event["message"])
        case "warning":
            return f"warning [{event['code']}]: {event['message']} ({event['hint']})"
        case "done" if event["had_ended"]:
            return f"nothing to do: step {event['step']} of {event['step']}, the model is in {event['path']}"
        case "done":
            again = f"\nto go on: {event['resume']}" if event["resume"] else ""
            if not (event["step"] or event["path"]):
                return f"stopped before the first step ({event['reason']}): there is nothing to save{again}"
            where = event["path"] or "the checkpoint could not be written"
            if event["reason"] == "max_steps" and not event["path"]:
                where = "the model is in memory"
            return f"done at step {event['step']} ({event['reason']}): {where}{again}"
    return None


def ready(event: Event) -> str:
    """Return a peer's addresses and how to join it as text, with the join line last and alone."""
    width = max(map(len, REACH.values()))
    addresses = [
        f"  {REACH[reach]:<{width}}  {maddr}"
        for maddr, reach in zip(event["maddrs"], event["reach"], strict=True)
    ]
    run = "bootstrap only"
    if event["run_id"]:
        mark = f", fingerprint {event['fingerprint'][:12]}" if event["fingerprint"] else ""
        run = f"run {event['run_id']}{mark}"
    if not event["join"]:
        how = ["The swarm's owner can invite others." if event["maddrs"] else "This peer only dials out."]
    elif event["invitation"]:
        how = ["To join elsewhere, copy this private file there, chmod 600, and type with its place:"]
        how += [event["join"]]
    else:
        how = ["To join, type on another machine:", event["join"]]
    peer = [f"{run}, peer {event['peer_id']}", *addresses, f"  {reached(event)}"]
    return "\n".join([*peer, "", *how, ""])


def reached(event: Event) -> str:
    """Return how other peers reach this one, and why."""
    return f"{event['reached']}: {event['reached_why']}"
