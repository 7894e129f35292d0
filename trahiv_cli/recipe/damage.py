"""Where a data file is broken: its line, and in words what is wrong with it.

Looked for after `datasets` has failed to read a file; its own messages name neither file nor line. Files
on a hub are not looked at.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCANNED_BYTES = 2**30
"""So much of a dataset is looked through, in 15 to 20 s. A larger file is passed over."""

BEYOND = "a number in it is too long, or it is nested too deeply"


@dataclass(frozen=True)
class Damage:
    """Something wrong with a file."""

    file: Path
    what: str
    """What is wrong, to be read after the file and the line."""

    hint: str
    line: int = 0
    """Counted from 1; 0 if it is the whole file."""

    def __str__(self) -> str:
        return f"{self.file}{f', line {self.line}' if self.line else ''}: {self.what}."


def find_damage(files: Iterable[Path]) -> Damage | None:
    """Look for the first thing that makes one of `files` unreadable.

    Args:
        files: data files, by their suffixes JSON (Lines), CSV, Parquet or text; `SCANNED_BYTES` of them are
            read at most, and of Parquet only its ends.

    Returns:
        What was found; None if nothing was, or a file is gone. An empty file counts only if all others
        are sound, as most kinds may be empty among others.
    """
    left_bytes = SCANNED_BYTES
    empty: Path | None = None
    for file in files:
        if not file.is_file():
            return None
        size_bytes = file.stat().st_size
        if size_bytes == 0:
            empty = empty or file
            continue
        if file.suffix == ".parquet":
            damage = _in_parquet(file)
        elif size_bytes <= left_bytes:
            left_bytes -= size_bytes
            damage = _in_text(file)
        else:
            continue
        if damage is not None:
            return damage
    return None if empty is None else Damage(empty, "the file is empty", "Bring it again, or leave it out.")


def _in_parquet(file: Path) -> Damage | None:
    with file.open("rb") as stream:
        begin = stream.read(4)
        stream.seek(-min(4, file.stat().st_size), os.SEEK_END)
        if begin == stream.read() == b"PAR1":  # Parquet's mark at both ends
            return None
    what = "the file is cut short" if begin == b"PAR1" else "this is no Parquet file"
    return Damage(file, what, "Bring the file again.")


def _in_text(file: Path) -> Damage | None:
    damage = _in_encoding(file)
    if damage is None and file.suffix in (".json", ".jsonl"):
        damage = _in_json(file)
    if damage is None and file.suffix == ".csv":
        damage = _in_csv(file)
    return damage


def _in_encoding(file: Path) -> Damage | None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as failure:
                what = f"byte {failure.start + 1} of it (0x{line[failure.start]:02x}) is not UTF-8"
                convert = f"iconv -f WINDOWS-1252 -t UTF-8 {file.name} > new{file.suffix}"
                return Damage(file, what, f"If it was written on Windows: {convert}", number)
    return None


def _in_json(file: Path) -> Damage | None:
    """Scan JSON Lines, or one document, which may be a list of rows."""
    with file.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "")
        is_one_document = first.startswith("[") or (file.suffix == ".json" and not _is_json(first))
        lines.seek(0)
        return _in_document(file, lines.read()) if is_one_document else in_lines(file, lines)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _in_document(file: Path, text: str) -> Damage | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as failure:
        line = text.count("\n", 0, failure.pos) + 1
        if failure.pos >= len(text.rstrip()) or failure.msg.startswith("Unterminated string"):
            return Damage(file, "the file ends in the middle of a value", "Bring the file again.", line)
        return Damage(file, f"not JSON ({failure.msg} at character {failure.colno})", "Fix it.", line)
    except (ValueError, RecursionError):
        return Damage(file, BEYOND, "Fix it.")
    return None


def in_lines(file: Path, lines: Iterable[str]) -> Damage | None:
    """Look for the first of `lines`, the first ones of a file, that is no row of JSON Lines."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as failure:
            if not line.endswith("\n"):  # only the last line can lack its end
                return Damage(
                    file,
                    "the file ends in the middle of the line",
                    "Bring the file again, or remove the line.",
                    number,
                )
            return Damage(
                file,
                f"not JSON ({failure.msg} at character {failure.colno})",
                "Fix or remove the line: a row is one JSON object on one line.",
                number,
            )
        except (ValueError, RecursionError):
            return Damage(file, BEYOND, "Fix or remove the line.", number)
        if not isinstance(row, dict):
            return Damage(file, "a row must be a JSON object: {...}", 'For a text: {"text": "..."}.', number)
    return None


def _in_csv(file: Path) -> Damage | None:
    with file.open(encoding="utf-8-sig", newline="") as lines, any_field_size():
        rows = csv.reader(lines, strict=True)
        header: list[str] | None = None
        begins = 1
        try:
            for row in rows:
                if header is None:
                    header = row or None  # empty lines before it are passed over
                elif len(row) > len(header):
                    return Damage(
                        file,
                        f"{len(row)} fields, and the header has {len(header)}",
                        'Put a field that holds commas in quotes ("...").',
                        begins,
                    )
                begins = rows.line_num + 1
        except csv.Error as failure:
            if str(failure).startswith("unexpected end"):
                what, hint = "a quote is opened here and never closed", "Close it, or bring the file again."
            else:
                what, hint = f"a broken row ({failure})", 'Inside quotes, a quote is written twice ("").'
            return Damage(file, what, hint, begins)
    return None


@contextmanager
def any_field_size() -> Iterator[None]:
    """Let a field be longer than 128 KiB, as a document may be; the limit is the whole process's."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
