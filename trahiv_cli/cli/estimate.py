"""What a run will cost, for `check --deep` and `--dry-run`: memory by purpose, traffic and its seconds."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trahiv_cli.cli.drawing import canvas, wants_colour
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

CHOICE_OF_AUTO = "mode auto takes the first that is through within a step; fragments, if none is"

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
class Free:
    """What this machine has for a run."""

    device_bytes: int | None
    """Free memory of the GPU; None without one."""

    host_bytes: int


def show_estimate(recipe: Recipe) -> None:
    """Load a recipe's config, tokenizer and first samples, and say what training costs this machine.

    No weight is loaded and no swarm is contacted.

    Args:
        recipe: what would be trained.

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
    from trahiv_cli.train.preview import build_preview

    told: list[tuple[str, str]] = []
    seen = build_preview(_as_stream(recipe), 0, lambda message, hint: told.append((message, hint)))
    needed = estimate(recipe, length=longest(seen))
    free = _free(needed)
    if out.format is Format.json:
        out.event("estimate", **to_data(needed, free, longest(seen)))
    elif out.format is Format.plain:
        out.data(plain(recipe, seen, needed, free))
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        out.data(picture(recipe, seen, needed, free, width, is_coloured=wants_colour()))
    for message, hint in told:
        out.warning("data", message, hint)
    for place, lacking in _too_small(needed, free):
        raise OutOfMemory(f"Training would not fit into the {place}: {lacking}.", savings(recipe))


def longest(seen: Preview) -> int:
    """Count the tokens of the longest sample that the model gets."""
    return seen.max_length if seen.is_packed else min(max(seen.lengths, default=1), seen.max_length)


def _as_stream(recipe: Recipe) -> Recipe:
    """Have only so much of the data read as is looked at, in the order in which it comes."""
    from trahiv_cli.recipe.schema import EvalSection

    data = recipe.data
    whole = [source.model_copy(update={"fraction": None}) for source in data.datasets]
    changes = {"streaming": True, "shuffle": False, "datasets": whole, "eval": EvalSection()}
    return recipe.model_copy(update={"data": data.model_copy(update=changes)})


def _free(needed: Estimate) -> Free:
    from trahiv_cli.assets.model import free_ram_bytes

    if not needed.on_gpu:
        return Free(None, free_ram_bytes())
    import torch

    return Free(torch.cuda.mem_get_info()[0], free_ram_bytes())


def _too_small(needed: Estimate, free: Free) -> Iterator[tuple[str, str]]:
    wanted = (
        [("RAM", needed.total_bytes, free.host_bytes)]
        if free.device_bytes is None
        else [
            ("GPU", needed.device_bytes, free.device_bytes),
            ("RAM", needed.host_bytes, free.host_bytes),
        ]
    )
    for place, wanted_bytes, free_bytes in wanted:
        if wanted_bytes > free_bytes:
            yield place, f"{size(wanted_bytes)} are needed, and {size(free_bytes)} are free"


# -- words ----------------------------------------------------------------------------------------


def to_data(needed: Estimate, free: Free, num_tokens: int) -> dict[str, Any]:
    """Return the fields of the `estimate` event: bytes, and seconds by speed in Mbit/s; null is not known."""
    from trahiv_cli.assets.traffic import SPEEDS_MBPS, seconds

    data = asdict(needed)
    traffic = data.pop("traffic")
    return {
        **data,
        "device_bytes": needed.device_bytes,
        "host_bytes": needed.host_bytes,
        "total_bytes": needed.total_bytes,
        "free_device_bytes": free.device_bytes,
        "free_host_bytes": free.host_bytes,
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


def memory_rows(recipe: Recipe, seen: Preview, needed: Estimate) -> list[Row]:
    """Say in words what memory is needed for; purposes that need none are left out."""
    training = recipe.training
    sequences = training.per_device_train_batch_size * (2 if recipe.dpo is not None else 1)
    batch = f"{sequences} x {longest(seen)} tokens"
    state, copies = needed.optimizer_bytes, needed.averaged_bytes + needed.copy_bytes
    on_device, on_host = (0, state) if needed.is_offloaded else (state, 0)
    to_what_end = "gradients to exchange, weights to step" if needed.is_offloaded else "gradients to exchange"
    rows = [
        Row("frozen weights", f"{_count(needed.num_frozen)}, {_held(recipe)}", needed.frozen_bytes),
        Row("reference model", "to compare with", needed.reference_bytes),
        Row("trained weights", f"{_count(needed.num_trainable)}, float32", needed.trainable_bytes),
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
    if needed.activation_bytes is None:
        rows.append(Row("activations", "not known for this model"))
    else:
        rows.append(Row("activations", batch, needed.activation_bytes))
    if needed.on_gpu:
        rows.append(Row("between batches", "a round, a checkpoint", 0, needed.moment_bytes))
    elif needed.moment_bytes > (needed.activation_bytes or 0):
        rows.append(Row("or between them", "a round, a checkpoint", needed.moment_bytes))
    return rows


def traffic_rows(needed: Estimate) -> dict[str, int]:
    """Say in words what a peer sends; bytes."""
    traffic = needed.traffic
    steps = traffic.steps_per_round
    if needed.mode == "auto":
        choices = traffic.sent_by_choice(MANY_PEERS).items()
        return {
            f"{next(iter(traffic.by_choice))}, 2 peers": traffic.sent_in_round(2),
            **{f"{choice}, many": num_bytes for choice, num_bytes in choices},
            "to join": traffic.state_bytes,
        }
    span = "a step" if steps == 1 else f"{steps} steps"
    return {
        f"{span}, 2 peers": traffic.sent_in_round(2),
        f"{span}, many peers": traffic.sent_in_round(MANY_PEERS),
        "to join": traffic.state_bytes,
    }


def size(num_bytes: int, units: tuple[tuple[str, int], ...] = MEMORY_UNITS) -> str:
    """Write a number of bytes with three digits and the largest unit that it reaches."""
    name, unit = next(((name, unit) for name, unit in units if num_bytes >= unit), units[-1])
    return f"{_three_digits(num_bytes / unit)} {name}"


def duration(seconds: float) -> str:
    """Write a time with two digits and the largest unit that it reaches twice."""
    name, unit = next(((name, unit) for name, unit in TIME_UNITS if seconds >= 2 * unit), TIME_UNITS[-1])
    number = seconds / unit
    return f"{number:.0f} {name}" if number >= 9.5 else f"{number:.1f} {name}"


def _count(number: int) -> str:
    name, unit = next(((name, unit) for name, unit in COUNT_UNITS if number >= unit), COUNT_UNITS[-1])
    return f"{_three_digits(number / unit)}{name}"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}"


def _held(recipe: Recipe) -> str:
    """Say how frozen weights are held."""
    quantization = recipe.quantization
    if quantization is not None:
        return "int8" if quantization.load_in_8bit else quantization.bnb_4bit_quant_type
    return "dtype of the checkpoint" if recipe.model.dtype == "auto" else recipe.model.dtype


# -- lines ----------------------------------------------------------------------------------------


def plain(recipe: Recipe, seen: Preview, needed: Estimate, free: Free) -> str:
    """Write an estimate as lines of text."""
    return "\n".join(_lines(recipe, seen, needed, free))


def _lines(recipe: Recipe, seen: Preview, needed: Estimate, free: Free) -> Iterator[str]:
    from trahiv_cli.assets.traffic import SPEEDS_MBPS, seconds

    places = ("GPU", "RAM") if needed.on_gpu else ("RAM",)
    yield f"{'memory':<22}" + "".join(f"{place:>12}" for place in places)
    for row in memory_rows(recipe, seen, needed):
        cells = (row.device_bytes, row.host_bytes) if needed.on_gpu else (row.total_bytes,)
        yield (
            f"{row.purpose:<22}" + "".join(f"{_cell(cell):>12}" for cell in cells) + f"  {row.note}".rstrip()
        )
    for name, values in _sums(needed, free).items():
        yield f"{name:<22}" + "".join(f"{size(value):>12}" for value in values)
    yield ""
    yield f"{'traffic':<22}{'bytes':>12}" + "".join(f"{f'{mbps} Mbit/s':>12}" for mbps in SPEEDS_MBPS)
    for name, num_bytes in traffic_rows(needed).items():
        times = "".join(f"{duration(seconds(num_bytes, mbps)):>12}" for mbps in SPEEDS_MBPS)
        yield f"{name:<22}{size(num_bytes, TRAFFIC_UNITS):>12}{times}"
    if needed.mode == "auto":
        yield CHOICE_OF_AUTO


def _sums(needed: Estimate, free: Free) -> dict[str, tuple[int, ...]]:
    """Say in words what all of it comes to, where the model runs and, on a GPU, in RAM."""
    joiner = needed.joiner_bytes
    if free.device_bytes is None:
        needs: tuple[int, ...] = (needed.total_bytes,)
        has: tuple[int, ...] = (free.host_bytes,)
    else:
        needs = (needed.device_bytes, needed.host_bytes)
        has = (free.device_bytes, free.host_bytes)
    return {"at the peak": needs, "when a peer joins": (*needs[:-1], needs[-1] + joiner), "free here": has}


def _cell(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else "-"


# -- picture --------------------------------------------------------------------------------------


def picture(
    recipe: Recipe, seen: Preview, needed: Estimate, free: Free, width: int, *, is_coloured: bool
) -> str:
    """Draw an estimate for a terminal of `width` columns."""
    from rich.panel import Panel

    console, screen = canvas(width, is_coloured=is_coloured)
    fits = not list(_too_small(needed, free))
    console.print(
        Panel(
            _memory(recipe, seen, needed, free),
            title=f"[bold]{recipe.name}[/] ({recipe.task}): memory of this peer",
            title_align="left",
            border_style="cyan" if fits else "red",
        )
    )
    console.print(
        Panel(
            _traffic(needed),
            title="bytes that each peer sends, and receives",
            title_align="left",
            subtitle=f"[dim]{CHOICE_OF_AUTO}[/]" if needed.mode == "auto" else None,
            subtitle_align="left",
            border_style="cyan",
        )
    )
    return screen.getvalue().rstrip("\n")


def _memory(recipe: Recipe, seen: Preview, needed: Estimate, free: Free) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(2 if needed.on_gpu else 1):
        table.add_column(justify="right")
    if needed.on_gpu:
        table.add_row("", Text("GPU", style="bold"), Text("RAM", style="bold"))
    rows = memory_rows(recipe, seen, needed)
    most = max(row.total_bytes for row in rows)
    for row in rows:
        cells = (row.device_bytes, row.host_bytes) if needed.on_gpu else (row.total_bytes,)
        bar = Text(_bar(row.total_bytes / most), style="cyan")
        table.add_row(row.purpose, *map(_cell, cells), bar, Text(row.note, style="dim"))
    for name, values in _sums(needed, free).items():
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
    for name, num_bytes in traffic_rows(needed).items():
        times = (duration(seconds(num_bytes, mbps)) for mbps in SPEEDS_MBPS)
        table.add_row(name, size(num_bytes, TRAFFIC_UNITS), *times)
    return table


def _bar(share: float) -> str:
    """Draw a bar to an eighth of a column; nothing but nothing is empty."""
    eighths = max(round(share * BAR * 8), share > 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
