"""What a run's folder holds after some steps: events with those fields of real ones that the page reads."""

import math
import random

from trahiv_cli.telemetry.events import to_json

OWN = "QmSRiHpGkDt74i6nH446ChehgVEq6JFTyUVPg6yXULZ4Nm"
FIRST = "QmaoLhCedeDYXDFCXFXNqnSzAB7VEdVeeY2bG2QAvF7Jbp"
SECOND = "QmV6PfzTKvDYZv2etcR6usm3b4aa8frBqp4xnSSK3csCtP"
STEP_S = 12.0


def event(t, name, **fields):
    return {"v": 1, "t": round(t, 3), "event": name, **fields}


def ready(t, max_steps=1000):
    return event(
        t, "ready", run_id="spanish-qlora-958ba95d", peer_id=OWN, reached="direct", max_steps=max_steps
    )


def joined(t, step):
    return event(t, "joined", step=step, peers=1, why=f"Begins at step {step}: no peer is further.")


def step(t, number, loss, group=(OWN,)):
    """A step that was taken alone or in a group."""
    samples = dict.fromkeys(group, 48 // len(group))
    round_ = {
        "samples": samples, "seconds": 1.84, "bytes_sent": 3_307_600, "bytes_received": 3_907_600,
        "committed": True, "reason": None, "left_out": {}, "blocked_seconds": 0.31, "group": [*group],
    }  # fmt: skip
    return event(
        t, "step", step=number, loss=loss, samples=48, my_samples=samples[OWN], peers=len(group),
        samples_per_second=17.862, round=round_ if len(group) > 1 else None,
        data={"passes": 0, "covered": 48 * number, "samples": 34607},
    )  # fmt: skip


def run(steps, ends_at, max_steps=1000):
    """The events of a run that two others join and one leaves, which took its last step at a time."""
    chance = random.Random(7)
    began = ends_at - STEP_S * steps
    quarter = max(2, steps // 4)
    yield ready(began - 20, max_steps)
    yield event(began - 9, "sample", step=0, prompt="El perro", text="ado ,, la la que los qu de de")
    yield joined(began - 8, 0)
    for number in range(1, steps + 1):
        t = began + STEP_S * number
        group = [OWN, FIRST, SECOND][: 1 + number // quarter]
        if 3.4 * quarter < number < 3.7 * quarter:
            group.remove(FIRST)
        loss = 1.4 + 2.6 * math.exp(-number / (0.25 * steps)) + chance.gauss(0, 0.09)
        yield step(t, number, loss, group)
        if number % quarter == 0:
            yield event(t + 1, "checkpoint", step=number, path=f"checkpoints/step-{number}")
            yield event(t + 2, "eval", step=number, eval_loss=loss + 0.12, eval_runtime=3.1)
        if number == 2 * quarter:
            said = f"From step {number} on: a step of 48 samples takes 12 s. Mode overlap, codec uniform8."
            yield event(t + 2.5, "pace", message=said, mode="overlap", codec="uniform8")
            text = ", que era muy grande, salió de la casa y no volvió hasta la noche."
            yield event(t + 3, "sample", step=number, prompt="El perro", text=text)
        if number == 3 * quarter:
            said = (
                f"The round for step {number + 1} failed (...F7Jbp: no answer for 30 s); no weights "
                "were changed, and the gradients go into the next try."
            )
            hint = "nothing to do, unless it repeats: then look at the links to these peers"
            yield event(t + 4, "warning", code="round", message=said, hint=hint)
    text = " ladra cuando llega alguien, pero duerme todo el día junto a la puerta de la cocina."
    yield event(ends_at + 0.1, "sample", step=steps, prompt="El perro", text=text)


def write(folder, events, name="events.jsonl"):
    """Append events to a run's folder, as its peer does; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(to_json(one) + "\n" for one in events)
    return folder
