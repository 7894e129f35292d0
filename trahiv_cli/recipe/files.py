"""Rows of local data files as they are written, read without a heavy library.

Files that `datasets` would skip, misread or report less clearly are refused here: another encoding, broken
JSON, CSV columns of the same name or with another delimiter than the comma.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.paths import reader_of
from trahiv_cli.recipe.rows import broken_row, listed

READ_BYTES = 32 * 2**20
"""Bytes of a dataset that are read, not counting the rest of the last line. Parsing takes about a second."""


def read_rows(file: Path, num_bytes: int = READ_BYTES) -> list[Any]:
    """Read the first rows of a data file of a kind in `READERS`, as they are written, with all columns.

    Returns:
        The rows; none if none is certain: the file is empty, Parquet, not UTF-8, or written in a way that
        this module does not support, or `num_bytes` is 0. A text file is one row, returned as an empty text.

    Raises:
        AssetError: no reader could read the file as intended; the message has the number of a broken row.
        OSError: the file can't be read.
    """
    reader = reader_of(file)
    name = repr(str(file))
    if reader == "parquet":
        return []
    require_readable(file)
    if reader == "text":
        return [{"text": ""}]
    if not num_bytes:
        return []
    with file.open("rb") as stream:
        content = stream.read(num_bytes) + stream.readline(READ_BYTES)
        is_whole = not stream.read(1)
    if not is_whole and not content.endswith(b"\n"):
        return []
    try:
        text = content.decode("utf-8-sig")
        return _csv_rows(text, file) if reader == "csv" else _json_rows(text, name, is_whole=is_whole)
    except (ValueError, RecursionError, csv.Error):  # a number may be too long for Python
        return []


def require_readable(file: Path) -> None:
    """Refuse a file whose first bytes show that it is UTF-16, or JSON whose first row is `null`.

    Raises:
        AssetError: for UTF-16, the hint has the command that converts the file.
        OSError: the file can't be read.
    """
    if (reader := reader_of(file)) == "parquet":
        return
    with file.open("rb") as stream:
        head = stream.read(100)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:2]:
        # Without a byte order mark, every other byte of an English text is zero. iconv reads UTF-16 without
        # a mark as little-endian.
        encoding = "UTF-16BE" if head.startswith(b"\0") else "UTF-16"
        hint = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(file))} > NEW_FILE"
        raise AssetError(f"{file} is {encoding}, and data is read as UTF-8.", hint)
    if reader == "json" and head.lstrip(b"\xef\xbb\xbf[ \t\r\n").startswith(b"null"):  # pyarrow 26 crashes
        raise broken_row(repr(str(file)), 1, "is no JSON object: {...}")


def csv_columns(file: Path) -> list[str]:
    """Read the column names of a CSV file.

    Raises:
        AssetError: two columns have the same name, the delimiter is not a comma, or the first row has more
            fields than the header.
        OSError, ValueError, csv.Error: the first two lines can't be read.
    """
    csv.field_size_limit(READ_BYTES)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        lines = _csv_lines(stream)
        columns = next(lines, [])
        first = next(lines, [])
    if len(columns) == 1 and (sign := re.search(r"[;\t|]", columns[0])):
        divider = sign[0]
        command = f"csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={divider!r}))"
        raise AssetError(
            f"The columns of {file} are divided by {divider!r}, not by commas: {columns[0]!r}.",
            f'python3 -c "import csv, sys; {command}" < {shlex.quote(str(file))} > NEW_FILE',
        )
    if twice := [name for name in dict.fromkeys(columns) if name and columns.count(name) > 1]:
        raise AssetError(f"{file} has two columns of the name {listed(twice)}.", "Rename or remove one.")
    if len(first) > len(columns):  # pandas would take the first field for an index, and shift the others
        raise _too_many_fields(file, 1)
    return columns


def _csv_rows(text: str, file: Path) -> list[dict[str, str | None]]:
    columns = csv_columns(file)
    rows = []
    lines = _csv_lines(io.StringIO(text, newline=""), strict=True)
    next(lines, None)
    for number, fields in enumerate(lines, 1):
        if len(fields) > len(columns):
            raise _too_many_fields(file, number)
        rows.append({name: cell or None for name, cell in zip_longest(columns, fields)})
    return rows


def _csv_lines(stream: Iterable[str], *, strict: bool = False) -> Iterator[list[str]]:
    """Read the lines of a CSV that are not blank, as pandas does."""
    for fields in csv.reader(stream, strict=strict):
        if len(fields) > 1 or (fields and not fields[0].isspace()):
            yield fields


def _too_many_fields(file: Path, row: int) -> AssetError:
    hint = 'Put a field that holds commas in quotes ("...").'
    return broken_row(repr(str(file)), row, "has more fields than its header", hint)


def _json_rows(text: str, name: str, *, is_whole: bool) -> list[Any]:
    """Read the JSON values in a text, one after the other, or the entries of a single list."""
    is_list = text.lstrip().startswith("[")
    # In a list, `datasets` accepts line breaks within texts, and texts as rows.
    decoder = json.JSONDecoder(strict=not is_list)
    blank = re.compile(r"\s*")
    values: list[Any] = []
    start = 0
    while (start := blank.match(text, start).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, start = decoder.raw_decode(text, start)
        except json.JSONDecodeError as failure:
            if is_list or (not is_whole and failure.pos >= len(text.rstrip())):
                return values  # a list, or a row of several lines, may have been cut
            place = f"line {failure.lineno}, column {failure.colno}"
            raise broken_row(name, len(values) + 1, f"is no JSON: {failure.msg} ({place})") from failure
        values.append(value)
    if not is_list:
        return values
    rows = [{"text": row} if isinstance(row, str) else row for row in values[0]]
    return rows if len(values) == 1 and all(isinstance(row, dict) for row in rows) else []
