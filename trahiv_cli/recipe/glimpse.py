"""The first and last rows of a local data file, read in bounded memory and without `datasets`.

Only what is certain is said: `datasets` reads JSON over several lines, lists of rows, and more. Where a file
is not understood here, nothing is known of it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trahiv_cli.recipe.damage import Damage, any_field_size, find_damage, in_lines
from trahiv_cli.recipe.paths import READERS

WHOLE_BYTES = 4 * 2**20
"""A file up to this size is read as a whole, in a tenth of a second."""

END_BYTES = 256 * 2**10
"""The number of bytes that are read at each end of a larger file."""

TYPED_BYTES = 10 * 2**20
"""`datasets` takes the columns of a JSON file from its first rows, so many bytes of them (datasets 5.2)."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Glimpse:
    """What was seen of a data file."""

    file: Path
    rows: list[Row] = field(default_factory=list)
    """The first rows as they are written: texts in CSV, only what is there in JSON."""

    columns: tuple[str, ...] = ()
    """All columns that were seen."""

    is_whole: bool = False
    """Whether these are all rows of the file."""

    knows_columns: bool = False
    """Whether no later row can have more columns."""

    damage: Damage | None = None
    """What is certain to make the file unreadable."""

    @property
    def first(self) -> Row:
        """The first row with all columns that were seen, as `datasets` would give it."""
        return dict.fromkeys(self.columns) | (self.rows[0] if self.rows else {})

    def may_have(self, column: str) -> bool:
        """Tell whether a column may be there, as far as it can be told."""
        if column in self.columns or self.knows_columns:
            return column in self.columns
        if READERS[self.file.suffix] != "json":
            return True
        with self.file.open("rb") as stream:
            begin, rest = stream.read(TYPED_BYTES), stream.read(WHOLE_BYTES)
        is_long = len(rest) == WHOLE_BYTES and b"\n" not in rest
        written = (json.dumps(column, ensure_ascii=is_ascii).encode() for is_ascii in (True, False))
        return is_long or any(each in begin + rest for each in written)


def look_at(file: Path) -> Glimpse:
    """Look at a data file, of a kind in `READERS`; an empty one has no rows.

    Raises:
        OSError: it can't be read.
    """
    size_bytes, reader = file.stat().st_size, READERS[file.suffix]
    if size_bytes == 0:
        return Glimpse(file, is_whole=True, knows_columns=True)
    if reader == "parquet":
        return Glimpse(file, damage=find_damage([file]))
    is_whole = size_bytes <= WHOLE_BYTES
    with file.open("rb") as stream:
        begin = stream.read(WHOLE_BYTES if is_whole else END_BYTES)
    if not is_whole:
        begin = begin[: begin.rfind(b"\n") + 1] or _whole_characters(begin)
    if not _is_utf8(begin if reader != "json" else begin.lstrip().partition(b"\n")[0]):
        return Glimpse(file, damage=find_damage([file]))
    text = begin.decode("utf-8-sig", errors="replace")
    if reader == "json":
        return _json(file, text, is_whole=is_whole)
    if reader == "csv":
        return _csv(file, text, is_whole=is_whole)
    return Glimpse(file, [{"text": text}], ("text",), is_whole=True, knows_columns=True)


def _whole_characters(begin: bytes) -> bytes:
    """Cut off what is left of a character that goes on behind `begin`."""
    for length in range(1, 4):
        if begin[-length] >= 0xC0:
            return begin[:-length]
        if begin[-length] < 0x80:
            break
    return begin


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _json(file: Path, text: str, *, is_whole: bool) -> Glimpse:
    values: list[Any] = []
    is_list, is_broken = text.lstrip().startswith("["), False
    try:
        values.extend(_values(text))
    except json.JSONDecodeError:
        is_broken = True
    except (ValueError, RecursionError):  # a number that is too long for Python: nothing is known
        return Glimpse(file)
    if not is_whole:
        return _long_json(file, text, values)
    if is_list:
        values = [{"text": value} if isinstance(value, str) else value for value in values]
    is_rows = all(isinstance(value, dict) for value in values)
    # One document is read in a second way, which takes some that are not JSON.
    if (is_broken and (is_list or values or _is_of_lines(text))) or (not is_list and not is_rows):
        return Glimpse(file, damage=find_damage([file]))
    if is_broken or not is_rows:
        return Glimpse(file)
    return Glimpse(file, values, _columns(values), is_whole=True, knows_columns=True)


def _long_json(file: Path, text: str, values: list[Any]) -> Glimpse:
    """Judge the first and the last lines of a file, if it is one of lines."""
    rows = list(itertools.takewhile(lambda value: isinstance(value, dict), values))
    if not _is_of_lines(text):
        return Glimpse(file, rows, _columns(rows))
    lines = list(io.StringIO(text, newline="\n"))  # only these characters end a line of JSON
    damage = in_lines(file, lines)
    if damage is not None and not _is_row(lines[damage.line - 1]):
        damage = None  # an object over several lines
    if damage is None:
        with file.open("rb") as stream:
            stream.seek(-END_BYTES, os.SEEK_END)
            _, newline, last = stream.read().rstrip().rpartition(b"\n")
        if newline and last.startswith(b"{"):
            damage = in_lines(file, [last.decode("utf-8", errors="replace")])
            damage = damage and replace(damage, line=0)  # which one it is would take a look at all
    return Glimpse(file, rows, _columns(rows), damage=damage)


def _columns(rows: list[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column for row in rows for column in row))


def _values(text: str) -> Iterator[Any]:
    """Yield the values that follow each other in a text; of a single list, its entries.

    Raises:
        JSONDecodeError: something else comes in between, or the last one is broken off.
    """
    at = _next(text, 0, "")
    is_list = text[at : at + 1] == "["
    decoder = json.JSONDecoder(strict=not is_list)  # in a list `datasets` takes line breaks within texts
    at = _next(text, at + is_list, "")
    while at < len(text):
        if is_list and text[at] == "]":
            return
        value, at = decoder.raw_decode(text, at)
        yield value
        at = _next(text, at, "," if is_list else "")
    if is_list:
        raise json.JSONDecodeError("Expecting ',' delimiter", text, len(text))


def _next(text: str, at: int, also: str) -> int:
    while at < len(text) and text[at] in " \t\r\n" + also:
        at += 1
    return at


def _is_of_lines(text: str) -> bool:
    """Tell whether a text has a row on its first line, and more lines."""
    first, _, rest = text.lstrip().partition("\n")
    return _is_row(first) and bool(rest.strip())


def _is_row(line: str) -> bool:
    return line.startswith("{") and line.rstrip().endswith("}")


def _csv(file: Path, text: str, *, is_whole: bool) -> Glimpse:
    rows: list[Row] = []
    header: list[str] = []
    is_broken = is_odd = False
    with any_field_size():
        try:
            for cells in csv.reader(io.StringIO(text, newline=""), strict=True):
                if not header:
                    header = cells
                elif len(cells) > len(header):
                    is_broken = True
                    break
                elif cells:
                    rows.append(dict(zip(header, (cell or None for cell in cells), strict=False)))
        except csv.Error as failure:  # pandas takes some of what is no CSV
            is_broken = is_whole and str(failure).startswith("unexpected end")
            is_odd = not is_broken
    if is_broken:
        return Glimpse(file, damage=find_damage([file]))
    return Glimpse(file, rows, tuple(header), is_whole=is_whole and not is_odd, knows_columns=bool(header))
