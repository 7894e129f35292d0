"""What a run's folder holds after some steps: events with the fields of real ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trahiv_cli.telemetry.events import to_json

OWN = "QmSRiHpGkDt74i6nH446ChehgVEq6JFTyUVPg6yXULZ4Nm"
FIRST = "QmaoLhCedeDYXDFCXFXNqnSzAB7VEdVeeY2bG2QAvF7Jbp"
SECOND = "QmV6PfzTKvDYZv2etcR6usm3b4aa8frBqp4xnSSK3csCtP"
STEP_S = 12.0

Event = dict[str, Any]


def event(t: float, name: str, **fields: Any) -> Event:
    return {"v": 1, "t": round(t, 3), "event": name, **fields}


def ready(t: float, max_steps: int = 1000) -> Event:
    maddr = f"/ip4/192.0.2.7/tcp/43791/p2p/{OWN}"
    return event(
        t, "ready", run_id="spanish-qlora-958ba95d", peer_id=OWN, maddrs=[maddr], reach=["internet"],
        reached="direct", reached_why="A member has dialled this peer.", join=f"trahiv join --peer {maddr}",
        invitation=None, invite=None, fingerprint="61fb" * 16, max_steps=max_steps, target_batch_size=48,
    )  # fmt: skip


def joined(t: float, step: int, source: str = "fresh") -> Event:
    why = f"Begins at step {step}: no peer is further."
    return event(t, "joined", step=step, peers=1, source=source, why=why, reached="direct", reached_why="")


def step(t: float, number: int, loss: float | None, group: Iterable[str] = (), **more: Any) -> Event:
    """A step that was taken alone or in a group."""
    samples = {peer: 24 - 6 * index for index, peer in enumerate(group)}
    round_ = {
        "samples": samples, "seconds": 1.84, "bytes_sent": 3_307_600, "bytes_received": 3_907_600,
        "committed": True, "reason": None, "left_out": {}, "blocked_seconds": 0.31, "group": list(samples),
    }  # fmt: skip
    fields = {
        "step": number, "loss": loss, "learning_rate": 0.0002, "samples": sum(samples.values()) or 48,
        "my_samples": samples.get(OWN, 48), "peers": max(1, len(samples)), "samples_per_second": 17.862,
        "round": round_ if samples else None,
        "data": {"passes": 0, "covered": 48 * number, "samples": 34607, "duplicates": 0, "lost": 0},
    }  # fmt: skip
    return event(t, "step", **(fields | more))


def run(steps: int, ends_at: float, max_steps: int = 1000) -> list[Event]:
    """A run that two others join and one leaves, which took its last step at a time."""
    chance, began = random.Random(7), ends_at - STEP_S * steps
    quarter = max(2, steps // 4)
    events = [ready(began - 20, max_steps), joined(began - 8, 0)]
    events.append(event(began - 9, "sample", step=0, prompt="El perro", text="ado ,, la la que los qu de de"))
    for number in range(1, steps + 1):
        t = began + STEP_S * number
        group = [OWN] if number < quarter else [OWN, FIRST] if number < 2 * quarter else [OWN, FIRST, SECOND]
        if 3.4 * quarter < number < 3.7 * quarter:
            group.remove(FIRST)
        loss = 1.4 + 2.6 * math.exp(-number / (0.25 * steps)) + chance.gauss(0, 0.09)
        events.append(step(t, number, loss, group if len(group) > 1 else ()))
        if number % quarter == 0:
            events.append(event(t + 1, "checkpoint", step=number, path=f"checkpoints/step-{number}"))
            events.append(event(t + 2, "eval", step=number, eval_loss=loss + 0.12, eval_runtime=3.1))
        if number == 2 * quarter:
            said = f"From step {number} on: a step of 48 samples takes 12 s. Mode overlap, codec uniform8."
            events.append(event(t + 2.5, "pace", message=said, mode="overlap", codec="uniform8"))
            text = ", que era muy grande, salió de la casa y no volvió hasta la noche."
            events.append(event(t + 3, "sample", step=number, prompt="El perro", text=text))
        if number == 3 * quarter:
            said = f"The round for step {number + 1} failed (...F7Jbp: no answer for 30 s); no weights "
            said += "were changed, and the gradients go into the next try."
            hint = "nothing to do, unless it repeats: then look at the links to these peers"
            events.append(event(t + 4, "warning", code="round", message=said, hint=hint))
    text = " ladra cuando llega alguien, pero duerme todo el día junto a la puerta de la cocina."
    events.append(event(ends_at + 0.1, "sample", step=steps, prompt="El perro", text=text))
    return events


def write(folder: Path, events: Iterable[Event], name: str = "events.jsonl") -> Path:
    """Append events to a run's folder, as its peer does; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(to_json(one) + "\n" for one in events)
    return folder
