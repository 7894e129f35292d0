"""YAML text to plain data and back, with the position of every key and value, and the values of `--set`.

1. `read_document` turns YAML nodes into data. It records their positions, and mistakes that YAML permits: a
   key that is given twice, a tag, a number that is too large.
2. `Document.replace` puts the values of `--set` over the data.
3. `Document.finding_at` gives a mistake that is found later its position in the user's text.

Scalars follow YAML 1.2 as far as JSON can represent them: `2e-4` is a number; `no`, `12:30`, `1_000` and
`.nan` are texts. `schema.py` defines the meaning of the keys.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import yaml

from trahiv_cli.errors import Finding, RecipeError, TrahivError

LARGEST = 2**63
"""Limit of a number's absolute value: languages and formats of other peers may support no more."""

Location = tuple[str | int, ...]
"""The path to a value in the data: `("data", "datasets", 0, "path")`."""

_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes with YAML 1.2 tags; its constructor is not used."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    max_depth = 32
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node, refusing nesting that would exhaust the interpreter's stack."""
        self.depth += 1
        if self.depth > self.max_depth:
            mark = parent.start_mark if parent else None
            raise yaml.composer.ComposerError(None, None, f"nested more than {self.max_depth} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _kind, _regexp in _PLAIN.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_regexp})$"), None)


@dataclass
class Document:
    """A recipe's data and the origin of each part of it; `load.py` creates one for each recipe.

    Data that never was a text (it came over the network) has no lines and no marks.
    """

    data: Any
    """A dict for a recipe; any value for the text of a `--set`."""

    file: str
    lines: list[str] = field(default_factory=list)
    keys: dict[Location, yaml.Mark] = field(default_factory=dict)
    values: dict[Location, yaml.Mark] = field(default_factory=dict)

    overrides: list[tuple[str, Location]] = field(default_factory=list)
    """Each `--set` as typed, and the location that it names."""

    findings: list[Finding] = field(default_factory=list)
    """Mistakes found so far; the rest of the document was read in spite of them."""

    def replace(self, texts: Sequence[str]) -> None:
        """Put the values of `--set` (`a.b=c`, in YAML) over a copy of the data; later ones win.

        Missing sections are created. A text that can't be read or placed becomes a finding.
        """
        self.data = copy.deepcopy(self.data)
        for text in texts:
            path, equals, written = text.partition("=")
            location = read_location(path.strip())
            try:
                if not equals or "" in location:
                    raise RecipeError("expected `section.key=value`")
                document = _read(written, "")
                if document.findings:
                    raise document.error(document.findings)
                self.overrides.append((text, location))
                self.put(location, document.data)
            except RecipeError as error:
                self.findings += [
                    Finding(path, found.message, found.hint, f"--set {text}")
                    for found in error.findings or (Finding("", error.message),)
                ]

    def put(self, location: Location, value: Any) -> None:
        """Put a value at a location, creating missing sections; `RecipeError` if there is no such place."""
        data = self.data
        for depth, part in enumerate(location):
            where = dotted(location[:depth])
            key: str | int = part
            if isinstance(data, dict):
                key = str(part)
                if data.get(key) is None:
                    data[key] = {}
            elif not isinstance(data, list):
                raise RecipeError(f"`{where}` is a value, not a section")
            elif not isinstance(part, int) or part >= len(data):
                raise RecipeError(f"`{where}` has the entries 0 to {len(data) - 1}, not {part!r}")
            if depth == len(location) - 1:
                data[key] = value
            data = data[key]

    def is_replaced(self, location: Location) -> bool:
        """Tell whether the value at `location` came from `--set`."""
        return any(_begins(location, place) for _, place in self.overrides)

    def origin_of(self, location: Location) -> str:
        """Return the origin of the value at `location`: `--set`, its file and line, or `default`."""
        if self.is_replaced(location):
            return "--set"
        mark = self.keys.get(location) or self.values.get(location)
        return f"{Path(self.file).name}:{mark.line + 1}" if mark else "default"

    def finding(self, path: str, message: str, hint: str = "", mark: yaml.Mark | None = None) -> Finding:
        """Make a finding at `mark`, with its source line."""
        if mark is None:
            return Finding(path, message, hint, self.file)
        source = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Finding(path, message, hint, self.file, mark.line + 1, mark.column + 1, source)

    def finding_at(
        self, location: Location, message: str, hint: str = "", *, path: str = "", of_key: bool = False
    ) -> Finding:
        """Make a finding that points at `location` in the file or in a `--set`, or at the section around it.

        `path`, if given, is the path that the finding shows. `of_key`: point at the key, not at the value.
        """
        path = path or dotted(location)
        for text, place in self.overrides:
            if _begins(location, place) or (_begins(place, location) and location not in self.values):
                return Finding(path, message, hint, f"--set {text}")
        of_key = of_key or location not in self.values
        while location and location not in self.values:
            location = location[:-1]
        marks = self.values | self.keys if of_key else self.values
        return self.finding(path, message, hint, marks.get(location))

    def error(self, findings: Sequence[Finding], kind: type[TrahivError] = RecipeError) -> TrahivError:
        """Make an error with these findings; findings without a line come last."""
        ordered = sorted(findings, key=lambda finding: (finding.line == 0, finding.line, finding.col))
        count = "1 error" if len(ordered) == 1 else f"{len(ordered)} errors"
        return kind(f"{self.file}: {count}", findings=tuple(ordered))


def dotted(location: Location) -> str:
    """Format a location as users write it: `data.datasets.0.path`."""
    return ".".join(map(str, location))


def read_location(path: str) -> Location:
    """Parse a location as users write it; digits are an index into a list."""
    return tuple(int(part) if part.isdecimal() else part for part in path.split("."))


def leaves(data: Any, location: Location = (), *, is_deep: bool = False) -> Iterator[tuple[Location, Any]]:
    """Yield every leaf of plain data with its location.

    An empty section is a leaf. So is a list without sections in it, unless `is_deep`.
    """
    is_list = isinstance(data, list) and (is_deep or any(isinstance(value, dict) for value in data))
    if not data or not (is_list or isinstance(data, dict)):
        yield location, data
        return
    for key, value in enumerate(data) if is_list else data.items():
        yield from leaves(value, (*location, key), is_deep=is_deep)


def kind_of(value: object) -> str:
    """Describe a value for its author: `'many'`, `a list`, `nothing`."""
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = {"None": "nothing", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def is_text(text: str) -> bool:
    """Tell whether UTF-8 can encode it: a lone half of a surrogate pair cannot be hashed or stored."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _begins(location: Location, start: Location) -> bool:
    """Tell whether `location` begins with `start`, as text: `id2label.0` may be an index or a key."""
    return list(map(str, location[: len(start)])) == list(map(str, start))


# -- reading --------------------------------------------------------------------------------------


def read_document(text: str, file: str) -> Document:
    """Read a whole recipe.

    Raises:
        RecipeError: the text is not one YAML mapping; mistakes inside the mapping become `findings` instead.
    """
    document = _read(text, file)
    if not isinstance(document.data, dict):
        message = f"expected `key: value` lines, got {kind_of(document.data)}"
        hint = "`trahiv new quickstart` writes a whole recipe to start from"
        raise document.error([document.finding("", message, hint, document.values.get(()))])
    return document


def _read(text: str, file: str) -> Document:
    document = Document({}, file, text.splitlines())
    try:
        node = _Loader(text).get_single_node()
        data = None if node is None else _value(document, node, ())
    except yaml.MarkedYAMLError as error:
        message = f"not valid YAML: {error.problem or 'no value'}"
        since = f" since line {error.context_mark.line + 1}" if error.context_mark else ""
        mark = error.problem_mark or error.context_mark
        hint = f"check the quotes, brackets and indentation{since}; YAML indents with spaces, not with tabs"
        raise document.error([document.finding("", message, hint, mark)]) from None
    except yaml.reader.ReaderError as error:
        mark = yaml.Mark(file, error.position, text.count("\n", 0, error.position), 0, None, 0)
        message = f"has a control character (#x{int(error.character):04x})"
        raise document.error([document.finding("", message, "remove it", mark)]) from None
    return replace(document, data=data)


def _value(document: Document, node: yaml.Node, location: Location) -> Any:
    """Turn a node into data, and record the position of every value."""
    # Each use of an alias counts, so a document cannot grow without bound while it is read.
    if len(document.values) >= 20_000 or len(location) > _Loader.max_depth:
        raise yaml.composer.ComposerError(None, None, "too many values", node.start_mark)
    document.values[location] = node.start_mark
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        data: dict[str, Any] = {}
        for key_node, item in node.value:
            here = (*location, key := str(key_node.value))
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                _refuse(document, key_node, location, "a key must be a word", "put it in quotes")
            elif key in data:
                first = f"the first is on line {document.keys[here].line + 1}"
                _refuse(document, key_node, here, f"is given twice; {first}", "keep one of them")
            else:
                document.keys[here] = key_node.start_mark
                data[key] = _value(document, item, here)
        return data
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_value(document, item, (*location, index)) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_TAG) in ("str", *_PLAIN):
        return _scalar(document, node, location)
    return _refuse(document, node, location, f"the tag {node.tag.replace(_TAG, '!!')} is not known here")


def _scalar(document: Document, node: yaml.ScalarNode, location: Location) -> Any:
    kind = node.tag.removeprefix(_TAG)
    text = str(node.value)
    value: int | float | None = None
    if kind == "str":
        return text if is_text(text) else _refuse(document, node, location, "has half of a surrogate pair")
    if not re.fullmatch(_PLAIN[kind], text):
        return _refuse(document, node, location, f"{text!r} is not a !!{kind}")
    if kind in ("bool", "null"):
        return text.lower() == "true" if kind == "bool" else None
    with suppress(ValueError):  # Python reads integers of up to 4,300 digits
        value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if kind == "int" else float(text)
    if value is None or abs(value) > LARGEST:
        message = f"{text[:80]} is too large: numbers go up to {LARGEST}"
        return _refuse(document, node, location, message, "write a smaller number")
    return value


def _refuse(document: Document, node: yaml.Node, location: Location, message: str, hint: str = "") -> None:
    """Record a mistake, and return None in place of the value, so that the rest is read too."""
    document.findings.append(document.finding(dotted(location), message, hint, node.start_mark))


# -- writing --------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Writes a text in quotes if `_Loader` would read it as another type."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the entries of a list below its key."""
        super().increase_indent(flow, indentless=False)

    def represent_text(self, text: str) -> yaml.Node:
        """Escape a text of several lines, so that each value is on one line."""
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')

    def represent_words(self, values: list[Any]) -> yaml.Node:
        """Write a list without sections on one line."""
        has_sections = any(isinstance(value, dict) for value in values)
        return self.represent_sequence(_TAG + "seq", values, flow_style=not has_sections)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_words)


def render(data: dict[str, Any]) -> list[tuple[str, Location | None]]:
    """Return the lines of a YAML document that reads back as `data`.

    Returns:
        Each line with the location of the value on it, or None for a line that only opens a section.
    """
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=inf)
    document = read_document(text, "")
    marks = document.values | document.keys
    starts = {marks[location].line: location for location, _ in leaves(data)}
    return [(line, starts.get(number)) for number, line in enumerate(text.splitlines())]
