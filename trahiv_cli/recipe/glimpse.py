"""The rows at the beginning of a local data file, read in bounded memory and without `datasets`.

Only what is certain is said. `datasets` reads more than what is understood here, and what it can't read it
says itself when the data is loaded.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trahiv_cli.recipe.paths import READERS

READ_BYTES = 10 * 2**20
"""So much of a file is read, and the rest of the line. It is the part of a JSON file from which `datasets`
takes the columns (datasets 5.2); parsing it takes a quarter of a second."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Glimpse:
    """What was seen of a data file: its first rows, all columns of the dataset, and whether there is no more.

    Rows are as they are written: texts in CSV, only what is there in JSON. A line of JSON that is no `dict`
    can't be read by `datasets`; pyarrow 26 crashes if it is `null` and the first.
    """

    rows: list[Any]
    columns: tuple[str, ...]
    is_whole: bool


def look_at(file: Path) -> Glimpse | None:
    """Look at a data file of a kind in `READERS`; an empty one has no rows.

    Returns:
        None if nothing is certain: it is Parquet, no UTF-8, or written in a way that is not understood here.

    Raises:
        OSError: it can't be read.
    """
    reader = READERS[file.suffix]
    with file.open("rb") as stream:
        content = stream.read(READ_BYTES) + stream.readline(READ_BYTES)
        is_whole = not stream.read(1)
    if not content:
        return Glimpse([], (), is_whole=True)
    if reader == "parquet" or not (is_whole or reader == "text" or content.endswith(b"\n")):
        return None
    try:
        text = content.decode("utf-8-sig", errors="ignore" if reader == "text" and not is_whole else "strict")
        if reader == "csv":
            return _csv(text, is_whole=is_whole)
        rows = _json_rows(text) if reader == "json" else [{"text": text}]
    except (ValueError, RecursionError):  # JSON may be broken, or have numbers that are too long for Python
        return None
    columns = tuple(dict.fromkeys(column for row in rows if isinstance(row, dict) for column in row))
    return Glimpse(rows, columns, is_whole=is_whole or reader == "text")  # a text is one row, however long


def _json_rows(text: str) -> list[Any]:
    """Read the values that follow each other in a text, or the entries of a single list."""
    rest, decoder, rows = text.strip(" \t\r\n"), json.JSONDecoder(), []
    if rest.startswith("["):
        entries = json.loads(rest, strict=False)  # in a list, `datasets` takes line breaks within texts
        rows = [{"text": entry} if isinstance(entry, str) else entry for entry in entries]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("not a list of rows")
        return rows
    at, blank = 0, re.compile(r"[ \t\r\n]*")
    while at < len(rest):
        row, at = decoder.raw_decode(rest, at)
        rows.append(row)
        if gap := blank.match(rest, at):
            at = gap.end()
    return rows


def _csv(text: str, *, is_whole: bool) -> Glimpse | None:
    rows: list[Row] = []
    header: list[str] = []
    try:
        for cells in csv.reader(io.StringIO(text, newline=""), strict=True):
            if not header:
                header = cells
            elif len(cells) > len(header):
                return None
            elif cells:
                rows.append(dict(zip(header, (cell or None for cell in cells), strict=False)))
    except csv.Error:  # pandas takes some of what is no CSV
        is_whole = False
    return Glimpse(rows, tuple(header), is_whole=is_whole)
