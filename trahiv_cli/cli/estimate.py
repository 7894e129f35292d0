"""What a run will cost, for `check --deep` and `--dry-run`: memory by purpose, traffic and its seconds."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias

from trahiv_cli.cli.output import Format, out
from trahiv_cli.cli.preview import bar, draw, look
from trahiv_cli.errors import OutOfMemory

if TYPE_CHECKING:
    from rich.table import Table

    from trahiv_cli.assets.memory import Estimate
    from trahiv_cli.cli.traffic import Traffic
    from trahiv_cli.recipe.schema import Recipe

MEMORY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
TRAFFIC_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
COUNT_UNITS = (("B", 10**9), ("M", 10**6), ("k", 10**3))
TIME_UNITS = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))

MANY_PEERS = 1000
"""Stands for a swarm so large that one more peer changes nothing."""

CHOICE_OF_AUTO = "auto takes the first that is through within a step; fragments, if none is"

BAR = 16
WIDEST = 100

Places: TypeAlias = dict[str, tuple[int, int]]
"""`GPU` if there is one, and `RAM`: the bytes that are needed, and those that are free."""


def show_estimate(recipe: Recipe) -> None:
    """Say what training costs this machine; no weight is loaded and no swarm is contacted.

    Raises:
        AssetError, SetupError: what training would stop at, as far as is looked here.
        OutOfMemory: it would not fit; everything has been said before.
    """
    from trahiv_cli.recipe.schema import EvalSection

    # Only so much of the data is read as is looked at, in the order in which it comes.
    whole = [source.model_copy(update={"fraction": None}) for source in recipe.data.datasets]
    changes = {"streaming": True, "shuffle": False, "datasets": whole, "eval": EvalSection()}
    stream = recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
    seen, told = look(stream, 0, "looking at the model and the data ...")
    from trahiv_cli.assets.memory import SAVINGS
    from trahiv_cli.assets.model import estimate, free_bytes
    from trahiv_cli.cli.traffic import traffic_of

    longest = seen.max_length if seen.is_packed else min(max(seen.lengths, default=1), seen.max_length)
    needed = estimate(recipe, length=longest)
    traffic, free = traffic_of(recipe, needed), free_bytes()
    places = {"RAM": (needed.total_bytes, free["RAM"])}
    if needed.on_gpu:
        places = {"GPU": (needed.device_bytes, free["GPU"]), "RAM": (needed.host_bytes, free["RAM"])}
    if out.format is Format.json:
        show_event(needed, traffic, places, longest)
    else:
        show_picture(recipe, needed, traffic, places, longest)
    for message, hint in told:
        out.warning("data", message, hint)
    for name, (wanted, available) in places.items():
        if wanted > available:
            said = f"{size(wanted)} are needed, and {size(available)} are free"
            raise OutOfMemory(f"Training would not fit into the {name}: {said}.", SAVINGS)


def size(num_bytes: int, units: tuple[tuple[str, int], ...] = MEMORY_UNITS) -> str:
    """Write a number of bytes with three digits and the largest unit that it reaches."""
    name, unit = next(((name, unit) for name, unit in units if num_bytes >= unit), units[-1])
    number = num_bytes / unit
    return f"{number:.0f} {name}" if number >= 99.95 else f"{number:.1f} {name}"


def duration(seconds: float) -> str:
    """Write a time with two digits and the largest unit that it reaches twice."""
    name, unit = next(((name, unit) for name, unit in TIME_UNITS if seconds >= 2 * unit), TIME_UNITS[-1])
    number = seconds / unit
    return f"{number:.0f} {name}" if number >= 9.5 else f"{number:.1f} {name}"


def show_event(needed: Estimate, traffic: Traffic, places: Places, num_tokens: int) -> None:
    """Emit `estimate`: bytes, and seconds by speed in Mbit/s; null is not known."""
    from trahiv_cli.cli.traffic import SPEEDS_MBPS, seconds

    fields = {name: value for name, value in asdict(needed).items() if name != "trained_values"}
    sizes = {
        "round_of_2": traffic.sent_in_round(2),
        "round_of_many": traffic.sent_in_round(MANY_PEERS),
        "state": traffic.state_bytes,
        **traffic.sent_by_choice(MANY_PEERS),
    }
    out.event(
        "estimate",
        **fields,
        device_bytes=needed.device_bytes,
        host_bytes=needed.host_bytes,
        total_bytes=needed.total_bytes,
        free_device_bytes=places["GPU"][1] if needed.on_gpu else None,
        free_host_bytes=places["RAM"][1],
        longest_sample=num_tokens,
        traffic=asdict(traffic),
        seconds={
            name: {str(mbps): round(seconds(num_bytes, mbps), 2) for mbps in SPEEDS_MBPS}
            for name, num_bytes in sizes.items()
        },
    )


def show_picture(recipe: Recipe, needed: Estimate, traffic: Traffic, places: Places, num_tokens: int) -> None:
    """Draw an estimate as wide as the terminal."""
    from rich.panel import Panel

    fits = all(wanted <= free for wanted, free in places.values())
    memory = Panel(
        memory_table(memory_rows(recipe, needed, num_tokens), needed, places),
        title=f"[bold]{recipe.name}[/] ({recipe.task}): memory of this peer",
        title_align="left",
        border_style="cyan" if fits else "red",
    )
    sent = Panel(
        traffic_table(traffic),
        title="bytes that each peer sends, and receives",
        title_align="left",
        subtitle=f"[dim]{CHOICE_OF_AUTO}[/]" if traffic.by_choice else None,
        subtitle_align="left",
        border_style="cyan",
    )
    width = min(shutil.get_terminal_size().columns, WIDEST)
    out.data(draw(memory, sent, width=width, is_coloured=out.has_colour(sys.stdout)))


def memory_rows(recipe: Recipe, needed: Estimate, num_tokens: int) -> list[tuple[str, str, int, int]]:
    """Say what memory is needed for: purpose, note, bytes with the model and bytes of the RAM."""
    training, mode = recipe.training, needed.mode
    sequences = training.per_device_train_batch_size * (2 if recipe.dpo is not None else 1)
    batch = needed.activation_bytes or 0
    state = (0, needed.optimizer_bytes) if needed.is_offloaded else (needed.optimizer_bytes, 0)
    held: str = "dtype of the checkpoint" if recipe.model.dtype == "auto" else recipe.model.dtype
    if recipe.quantization is not None:
        held = "int8" if recipe.quantization.load_in_8bit else recipe.quantization.bnb_4bit_quant_type
    counts = (needed.num_frozen, needed.num_trainable)
    frozen, trained = (size(number, COUNT_UNITS).replace(" ", "") for number in counts)
    copies = "gradients, the last average" + ", weights to step" * needed.is_offloaded
    of_mode = needed.mode_host_bytes + needed.residual_bytes
    rows = [
        ("frozen weights", f"{frozen}, {held}", needed.frozen_bytes, 0),
        ("reference model", "to compare with", needed.reference_bytes, 0),
        ("trained weights", f"{trained}, float32", needed.trainable_bytes, 0),
        ("gradients", "", needed.gradient_bytes, 0),
        ("optimizer state", training.optim, *state),
        ("copies", copies, 0, needed.averaged_bytes + needed.copy_bytes),
        (f"mode {mode}", "copies" + ", at most" * (mode == "auto"), needed.mode_device_bytes, of_mode),
        ("libraries", "in all processes", 0, needed.libraries_bytes),
    ]
    rows = [row for row in rows if row[2] + row[3]]
    note = f"{sequences} x {num_tokens} tokens" if needed.activation_bytes else "not known for this model"
    rows.append(("activations", note, batch, 0))
    if needed.on_gpu:
        rows.append(("between batches", "a round, a checkpoint", 0, needed.moment_bytes))
    elif needed.moment_bytes > batch:
        rows.append(("or between them", "a round, a checkpoint", needed.moment_bytes, 0))
    return rows


def memory_table(rows: list[tuple[str, str, int, int]], needed: Estimate, places: Places) -> Table:
    """Draw what memory is needed for, a bar for each purpose and a column for each place."""
    from rich.table import Column, Table
    from rich.text import Text

    sizes = [Column(justify="right") for _ in places]
    table = Table.grid(Column(no_wrap=True), *sizes, Column(width=BAR), padding=(0, 2))
    if needed.on_gpu:
        table.add_row("", *(Text(name, style="bold") for name in places))
    most = max(on_device + on_host for _, _, on_device, on_host in rows)
    for purpose, note, on_device, on_host in rows:
        cells = (on_device, on_host) if needed.on_gpu else (on_device + on_host,)
        said = (size(cell) if cell else "-" for cell in cells)
        table.add_row(purpose, *said, bar(on_device + on_host, most, "cyan"), Text(note, style="dim"))
    peak = [wanted for wanted, _ in places.values()]
    sums = {
        "at the peak": peak,
        "when a peer joins": [*peak[:-1], peak[-1] + needed.joiner_bytes],
        "free here": [free for _, free in places.values()],
    }
    for name, values in sums.items():
        table.add_row(*(Text(text, style="bold") for text in (name, *map(size, values))))
    return table


def traffic_table(traffic: Traffic) -> Table:
    """Draw what a peer sends in a round, and when it joins, and how long that takes."""
    from rich.table import Column, Table
    from rich.text import Text

    from trahiv_cli.cli.traffic import SPEEDS_MBPS, seconds

    span = "a step" if traffic.steps_per_round == 1 else f"{traffic.steps_per_round} steps"
    sizes = {f"{next(iter(traffic.by_choice), span)}, 2 peers": traffic.sent_in_round(2)}
    for choice, num_bytes in traffic.sent_by_choice(MANY_PEERS).items():
        sizes[f"{choice}, many"] = num_bytes
    if not traffic.by_choice:
        sizes[f"{span}, many peers"] = traffic.sent_in_round(MANY_PEERS)
    sizes["to join"] = traffic.state_bytes
    columns = [Column(justify="right") for _ in range(1 + len(SPEEDS_MBPS))]
    table = Table.grid(Column(no_wrap=True), *columns, padding=(0, 2))
    table.add_row("", "", *(Text(f"{mbps} Mbit/s", style="dim") for mbps in SPEEDS_MBPS))
    for name, num_bytes in sizes.items():
        times = (duration(seconds(num_bytes, mbps)) for mbps in SPEEDS_MBPS)
        table.add_row(name, size(num_bytes, TRAFFIC_UNITS), *times)
    return table
