"""What a run will cost, for `check --deep` and `--dry-run`: memory by purpose, traffic and its seconds."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trahiv_cli.cli.drawing import bar, canvas, terminal_width, wants_colour
from trahiv_cli.cli.libraries import settle_hub
from trahiv_cli.cli.output import Format, out
from trahiv_cli.errors import OutOfMemory

if TYPE_CHECKING:
    from rich.table import Table

    from trahiv_cli.assets.memory import Estimate
    from trahiv_cli.recipe.schema import Recipe
    from trahiv_cli.train.seen import Preview

MEMORY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
TRAFFIC_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
COUNT_UNITS = (("B", 10**9), ("M", 10**6), ("k", 10**3))
TIME_UNITS = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))

MANY_PEERS = 1000
"""Stands for a swarm so large that one more peer changes nothing."""

CHOICE_OF_AUTO = "auto takes the first that is through within a step; fragments, if none is"

BAR = 16
WIDEST = 100


@dataclass(frozen=True)
class Row:
    """One purpose of memory."""

    purpose: str
    note: str
    device_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What a CPU peer needs for it."""
        return self.device_bytes + self.host_bytes


@dataclass(frozen=True)
class Place:
    """A kind of memory of this machine."""

    name: str
    needed_bytes: int
    free_bytes: int


def show_estimate(recipe: Recipe) -> None:
    """Load a recipe's config, tokenizer and first samples, and say what training costs this machine.

    No weight is loaded and no swarm is contacted.

    Raises:
        AssetError, SetupError: what training would stop at, as far as is looked here.
        OutOfMemory: it would not fit; everything has been said before.
    """
    warnings.simplefilter("ignore")  # libraries' advice to programmers
    if out.format is Format.human:
        out.say("looking at the model and the data ...")
    settle_hub(recipe)
    from trahiv_cli.assets.memory import savings
    from trahiv_cli.assets.model import estimate
    from trahiv_cli.recipe.schema import EvalSection
    from trahiv_cli.train.preview import build_preview

    # Only so much of the data is read as is looked at, in the order in which it comes.
    whole = [source.model_copy(update={"fraction": None}) for source in recipe.data.datasets]
    changes = {"streaming": True, "shuffle": False, "datasets": whole, "eval": EvalSection()}
    stream = recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
    told: list[tuple[str, str]] = []
    seen = build_preview(stream, 0, lambda message, hint: told.append((message, hint)))
    needed = estimate(recipe, length=_longest(seen))
    places = _places(needed)
    if out.format is Format.json:
        out.event("estimate", **_to_data(needed, places, _longest(seen)))
    else:
        out.data(_picture(recipe, seen, needed, places))
    for message, hint in told:
        out.warning("data", message, hint)
    for place in places:
        if place.needed_bytes > place.free_bytes:
            lacking = f"{size(place.needed_bytes)} are needed, and {size(place.free_bytes)} are free"
            raise OutOfMemory(f"Training would not fit into the {place.name}: {lacking}.", savings(recipe))


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


def _longest(seen: Preview) -> int:
    """Count the tokens of the longest sample that the model gets."""
    return seen.max_length if seen.is_packed else min(max(seen.lengths, default=1), seen.max_length)


def _places(needed: Estimate) -> list[Place]:
    from trahiv_cli.assets.model import free_ram_bytes

    if not needed.on_gpu:
        return [Place("RAM", needed.total_bytes, free_ram_bytes())]
    import torch

    free_device_bytes = torch.cuda.mem_get_info()[0]
    return [
        Place("GPU", needed.device_bytes, free_device_bytes),
        Place("RAM", needed.host_bytes, free_ram_bytes()),
    ]


def _to_data(needed: Estimate, places: list[Place], num_tokens: int) -> dict[str, Any]:
    """Return the fields of the `estimate` event: bytes, and seconds by speed in Mbit/s; null is not known."""
    from trahiv_cli.assets.traffic import SPEEDS_MBPS, seconds

    data = asdict(needed)
    traffic = data.pop("traffic")
    return {
        **data,
        "device_bytes": needed.device_bytes,
        "host_bytes": needed.host_bytes,
        "total_bytes": needed.total_bytes,
        "free_device_bytes": places[0].free_bytes if needed.on_gpu else None,
        "free_host_bytes": places[-1].free_bytes,
        "longest_sample": num_tokens,
        "traffic": traffic,
        "seconds": {
            name: {str(mbps): round(seconds(num_bytes, mbps), 2) for mbps in SPEEDS_MBPS}
            for name, num_bytes in (
                ("round_of_2", needed.traffic.sent_in_round(2)),
                ("round_of_many", needed.traffic.sent_in_round(MANY_PEERS)),
                ("state", needed.traffic.state_bytes),
                *needed.traffic.sent_by_choice(MANY_PEERS).items(),
            )
        },
    }


def _memory_rows(recipe: Recipe, seen: Preview, needed: Estimate) -> list[Row]:
    """Say in words what memory is needed for; purposes that need none are left out."""
    training = recipe.training
    sequences = training.per_device_train_batch_size * (2 if recipe.dpo is not None else 1)
    batch = f"{sequences} x {_longest(seen)} tokens"
    state, copies = needed.optimizer_bytes, needed.averaged_bytes + needed.copy_bytes
    on_device, on_host = (0, state) if needed.is_offloaded else (state, 0)
    to_what_end = "gradients to exchange, weights to step" if needed.is_offloaded else "gradients to exchange"
    held: str = "dtype of the checkpoint" if recipe.model.dtype == "auto" else recipe.model.dtype
    if recipe.quantization is not None:
        held = "int8" if recipe.quantization.load_in_8bit else recipe.quantization.bnb_4bit_quant_type
    frozen, trained = (
        size(number, COUNT_UNITS).replace(" ", "") for number in (needed.num_frozen, needed.num_trainable)
    )
    rows = [
        Row("frozen weights", f"{frozen}, {held}", needed.frozen_bytes),
        Row("reference model", "to compare with", needed.reference_bytes),
        Row("trained weights", f"{trained}, float32", needed.trainable_bytes),
        Row("gradients", "", needed.gradient_bytes),
        Row("optimizer state", training.optim, on_device, on_host),
        Row("copies", to_what_end, 0, copies),
        Row(
            f"mode {needed.mode}",
            "copies, at most" if needed.mode == "auto" else "copies",
            needed.mode_device_bytes,
            needed.mode_host_bytes + needed.residual_bytes,
        ),
        Row("libraries", "in all processes", 0, needed.libraries_bytes),
    ]
    rows = [row for row in rows if row.total_bytes]
    is_known = needed.activation_bytes is not None
    rows.append(
        Row("activations", batch if is_known else "not known for this model", needed.activation_bytes or 0)
    )
    if needed.on_gpu:
        rows.append(Row("between batches", "a round, a checkpoint", 0, needed.moment_bytes))
    elif needed.moment_bytes > (needed.activation_bytes or 0):
        rows.append(Row("or between them", "a round, a checkpoint", needed.moment_bytes))
    return rows


def _traffic_rows(needed: Estimate) -> dict[str, int]:
    """Say in words what a peer sends; bytes."""
    traffic = needed.traffic
    if needed.mode == "auto":
        choices = traffic.sent_by_choice(MANY_PEERS).items()
        return {
            f"{next(iter(traffic.by_choice))}, 2 peers": traffic.sent_in_round(2),
            **{f"{choice}, many": num_bytes for choice, num_bytes in choices},
            "to join": traffic.state_bytes,
        }
    span = "a step" if traffic.steps_per_round == 1 else f"{traffic.steps_per_round} steps"
    return {
        f"{span}, 2 peers": traffic.sent_in_round(2),
        f"{span}, many peers": traffic.sent_in_round(MANY_PEERS),
        "to join": traffic.state_bytes,
    }


def _picture(recipe: Recipe, seen: Preview, needed: Estimate, places: list[Place]) -> str:
    """Draw an estimate as wide as the terminal."""
    from rich.panel import Panel

    console, screen = canvas(
        terminal_width(WIDEST), is_coloured=out.format is Format.human and wants_colour()
    )
    memory = Panel(
        _memory(recipe, seen, needed, places),
        title=f"[bold]{recipe.name}[/] ({recipe.task}): memory of this peer",
        title_align="left",
        border_style="red" if any(place.needed_bytes > place.free_bytes for place in places) else "cyan",
    )
    traffic = Panel(
        _traffic(needed),
        title="bytes that each peer sends, and receives",
        title_align="left",
        subtitle=f"[dim]{CHOICE_OF_AUTO}[/]" if needed.mode == "auto" else None,
        subtitle_align="left",
        border_style="cyan",
    )
    console.print(memory, traffic)
    return screen.getvalue().rstrip("\n")


def _memory(recipe: Recipe, seen: Preview, needed: Estimate, places: list[Place]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in places:
        table.add_column(justify="right")
    if needed.on_gpu:
        table.add_row("", *(Text(place.name, style="bold") for place in places))
    rows = _memory_rows(recipe, seen, needed)
    most = max(row.total_bytes for row in rows)
    for row in rows:
        cells = (row.device_bytes, row.host_bytes) if needed.on_gpu else (row.total_bytes,)
        drawn = Text(bar(row.total_bytes / most, BAR), style="cyan")
        sizes = (size(cell) if cell else "-" for cell in cells)
        table.add_row(row.purpose, *sizes, drawn, Text(row.note, style="dim"))
    peak = [place.needed_bytes for place in places]
    sums = {
        "at the peak": peak,
        "when a peer joins": [*peak[:-1], peak[-1] + needed.joiner_bytes],
        "free here": [place.free_bytes for place in places],
    }
    for name, values in sums.items():
        table.add_row(*(Text(text, style="bold") for text in (name, *map(size, values))))
    return table


def _traffic(needed: Estimate) -> Table:
    from rich.table import Table
    from rich.text import Text

    from trahiv_cli.assets.traffic import SPEEDS_MBPS, seconds

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(1 + len(SPEEDS_MBPS)):
        table.add_column(justify="right")
    table.add_row("", "", *(Text(f"{mbps} Mbit/s", style="dim") for mbps in SPEEDS_MBPS))
    for name, num_bytes in _traffic_rows(needed).items():
        times = (duration(seconds(num_bytes, mbps)) for mbps in SPEEDS_MBPS)
        table.add_row(name, size(num_bytes, TRAFFIC_UNITS), *times)
    return table
