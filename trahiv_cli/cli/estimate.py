"""The costs of a run, for `check --deep` and `--dry-run`: memory by purpose, traffic and its time.

Traffic is counted in bytes of encoded tensors, by the recipe's codecs and its pace. The transport's framing
and all other messages between peers add about one part in a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

from trahiv_cli.assets.memory import Estimate
from trahiv_cli.cli.output import Format, out
from trahiv_cli.cli.preview import look
from trahiv_cli.errors import Finding
from trahiv_cli.progress.pace import Pace
from trahiv_cli.recipe.schema import EvalSection, Recipe
from trahiv_cli.rounds.codecs import CODECS
from trahiv_cli.step.auto import CODECS_BY_LOSS

UNITS: dict[str, dict[str, float]] = {
    "memory": {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10},
    "traffic": {"GB": 1e9, "MB": 1e6, "kB": 1e3},
    "count": {"B": 1e9, "M": 1e6, "k": 1e3},
    "time": {"days": 86400, "h": 3600, "min": 60, "s": 1},
}

SPEEDS_MBPS = (5, 20, 100, 1000)
"""Uplinks, in megabits a second: mobile, home, office, data centre."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that pass between this peer and the others."""

    gradient_bytes: int  # one encoded copy of the exchanged tensors; in mode auto, in its longest codec
    state_bytes: int  # a joiner downloads: weights, optimizer state, and with local steps outer momentum
    steps_per_round: int = 1
    num_fragments: int = 1  # exchanges until each weight was exchanged once
    by_choice: dict[str, int] = field(default_factory=dict)
    """Sizes in mode auto: one copy in each of its codecs, and a fragment in the shortest; else empty."""

    def sent(self) -> dict[str, int]:
        """Count the bytes that a peer sends, and receives: in rounds of two and of many, and as a joiner.

        Each peer reduces a share of its own: it sends the rest of its copy, and then the average of its
        share. With fragments, the count is for one of average size.
        """
        copy = self.gradient_bytes / self.num_fragments
        copies = {"round_of_2": copy / 2, "round_of_many": copy, **self.by_choice}
        return {name: round(2 * size) for name, size in copies.items()} | {"state": self.state_bytes}


def show_estimate(recipe: Recipe, doubts: Sequence[Finding] = ()) -> None:
    """Show the costs of training on this machine; no weight is loaded and no swarm is contacted.

    The caller has already shown `doubts`, warnings about the data.

    Raises:
        AssetError, SetupError: training would fail in the same way, as far as it is checked here.
        OutOfMemory: training would not fit; the costs have been shown before.
    """
    # An unshuffled stream reads only the data that is looked at, in file order.
    whole = [source.model_copy(update={"fraction": None}) for source in recipe.data.datasets]
    stream = recipe.changed("data", streaming=True, shuffle=False, datasets=whole, eval=EvalSection())
    seen, told = look(stream, 0, "looking at the model and the data ...")
    from trahiv_cli.assets.model import estimate, free_bytes, require_room

    longest = seen.max_length if seen.packed else seen.lengths.get("longest", seen.max_length)
    if recipe.grpo is not None:  # the data has prompts alone
        longest += recipe.grpo.max_completion_length
    needed = estimate(recipe, length=longest)
    free = free_bytes()
    traffic = traffic_of(recipe, needed)
    if out.format is Format.json:
        show_event(needed, traffic, free, longest)
    else:
        lines = [*memory_table(recipe, needed, free, longest), "", *traffic_table(traffic)]
        out.data("\n".join(lines))
    said = "".join(doubt.message for doubt in doubts)
    for message, hint in told:
        if message.removesuffix(".") not in said:
            out.warning("data", message, hint)
    require_room(needed, free)


def size(number: float, kind: str = "memory") -> str:
    """Write a number with three digits at most and the largest of the `UNITS` of its kind that it reaches."""
    for name, unit in UNITS[kind].items():
        value = number / unit
        text = f"{value:.0f} {name}" if value >= 99.95 else f"{value:.1f} {name}"
        if number >= unit:
            break
    return text


def show_event(needed: Estimate, traffic: Traffic, free: dict[str, int], num_tokens: int) -> None:
    """Emit `estimate`: bytes, and seconds by speed in Mbit/s; null means unknown."""
    out.event(
        "estimate",
        **{name: value for name, value in asdict(needed).items() if name != "trained_values"},
        device_bytes=needed.device_bytes,
        host_bytes=needed.host_bytes,
        total_bytes=needed.total_bytes,
        free_device_bytes=free.get("GPU"),
        free_host_bytes=free["RAM"],
        longest_sample=num_tokens,
        traffic=asdict(traffic),
        seconds={
            name: {mbps: round(seconds, 2) for mbps, seconds in seconds_by_speed(num_bytes).items()}
            for name, num_bytes in traffic.sent().items()
        },
    )


def memory_table(recipe: Recipe, needed: Estimate, free: dict[str, int], num_tokens: int) -> list[str]:
    """Return lines with the needed memory by purpose, and a column for each of GPU and RAM."""
    training = recipe.training
    batch = needed.activation_bytes or 0
    sequences = training.per_device_train_batch_size * recipe.sequences_per_sample
    state = (0, needed.optimizer_bytes) if needed.is_offloaded else (needed.optimizer_bytes, 0)
    counts = (needed.num_frozen, needed.num_trainable)
    frozen, trained = (size(number, "count").replace(" ", "") for number in counts)
    of_mode = needed.mode_host_bytes + needed.residual_bytes
    between = "between batches" if needed.on_gpu else "or between batches"
    tokens = f"{sequences} x {num_tokens} tokens"
    rows = [  # purpose, note, bytes with the model and bytes of the RAM
        ("frozen weights", frozen, needed.frozen_bytes, 0),
        ("reference model", "to compare with", needed.reference_bytes, 0),
        ("trained weights", f"{trained}, float32", needed.trainable_bytes, 0),
        ("gradients", "", needed.gradient_bytes, 0),
        ("optimizer state", training.optim, *state),
        ("copies", "of gradients and weights", 0, needed.averaged_bytes + needed.copy_bytes),
        (f"mode {needed.mode}", "copies, at most", needed.mode_device_bytes, of_mode),
        ("libraries", "in all processes", 0, needed.libraries_bytes),
        ("activations", "not known for this model" if needed.activation_bytes is None else tokens, batch, 0),
        (between, "a round, a checkpoint", 0, needed.moment_bytes),
    ]
    table = [["", *needed.places]]
    notes = [""]
    for purpose, note, on_device, on_host in rows:
        if on_device or on_host or purpose == "activations":
            cells = (on_device, on_host) if needed.on_gpu else (on_device + on_host,)
            table.append([purpose, *(size(cell) if cell else "-" for cell in cells)])
            notes.append(note)
    *on_gpu, in_ram = needed.places.values()
    table += [
        ["at the peak", *map(size, needed.places.values())],
        ["when a peer joins", *map(size, (*on_gpu, in_ram + needed.joiner_bytes))],
        ["free here", *(size(free[name]) for name in needed.places)],
    ]
    lines = zip_longest(lined_up(table), notes, fillvalue="")
    title = f"{recipe.name} ({recipe.task}): memory of this peer"
    return [title, *("  ".join(cells).rstrip() for cells in lines)]


def traffic_table(traffic: Traffic) -> list[str]:
    """Return lines with the bytes that a peer sends in a round and when it joins, and the time for them."""
    span = "a step" if traffic.steps_per_round == 1 else f"{traffic.steps_per_round} steps"
    names = {"round_of_2": f"{span}, 2 peers", "round_of_many": f"{span}, many peers", "state": "to join"}
    table = [["", "", *(f"{mbps} Mbit/s" for mbps in SPEEDS_MBPS)]]
    for name, num_bytes in traffic.sent().items():
        times = (size(seconds, "time") for seconds in seconds_by_speed(num_bytes).values())
        table.append([names.get(name, f"{name}, many"), size(num_bytes, "traffic"), *times])
    return ["bytes that each peer sends, and receives", *lined_up(table)]


def lined_up(table: list[list[str]]) -> list[str]:
    """Write each row of a table as a line, with its first column to the left and all others to the right."""
    first, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in table]


def seconds_by_speed(num_bytes: int) -> dict[str, float]:
    """Return the seconds that `num_bytes` take, by the speed of an uplink in Mbit/s."""
    return {str(mbps): 8 * num_bytes / (mbps * 1e6) for mbps in SPEEDS_MBPS}


def traffic_of(recipe: Recipe, needed: Estimate) -> Traffic:
    """Compute the traffic of the trained weights in the recipe's mode and codecs."""
    opt = recipe.hivemind_config.opt
    swarm = recipe.swarm
    values = needed.trained_values
    is_auto = swarm.mode == "auto"
    one_copy = needed.trainable_bytes
    pace = Pace.of(swarm)
    is_free = is_auto and opt.grad_compression is None
    codecs = CODECS_BY_LOSS if is_free else (opt.grad_compression or "none",)
    copies = {codec: encoded_bytes(values, codec) for codec in codecs}
    by_choice = {**copies, "a fragment": min(copies.values()) // swarm.fragments} if is_auto else {}
    statistics = needed.optimizer_bytes
    if pace.has_local_steps and "8bit" not in recipe.training.optim and one_copy:
        # A joiner gets them in 8 bits a value (`codecs.EightBitStatistics`), about as long as in this codec.
        statistics = statistics * encoded_bytes(values, "blockwise8") // one_copy
    state = encoded_bytes(values, opt.load_state_compression) + statistics
    return Traffic(
        gradient_bytes=copies[codecs[0]],
        state_bytes=state + one_copy * swarm.may_step_locally,
        steps_per_round=pace.steps_per_round,
        num_fragments=pace.num_fragments,
        by_choice=by_choice,
    )


def encoded_bytes(values: tuple[int, ...], name: str) -> int:
    """Count the bytes of float32 tensors in a codec; `values` has the number of values of each tensor."""
    import torch

    return sum(CODECS[name]().encoded_bytes(number, torch.float32) for number in values)
