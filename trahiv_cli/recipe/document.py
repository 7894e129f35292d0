"""YAML text to plain data and back, with the place of every key and value, and what `--set` replaced.

1. `read_document` composes YAML nodes and turns them into data. It notes each place, and what YAML would let
   pass: a key that is given twice, a tag, a number that is too large.
2. `Document.replace` puts the values of `--set` over the data.
3. `Document.finding_at` says of anything that is wrong later on where the user wrote it.

Scalars follow YAML 1.2 as far as JSON can carry them: `2e-4` is a number; `no`, `12:30`, `1_000` and
`.nan` are texts. What the words mean is not known here; that is `schema.py`'s.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import yaml

from trahiv_cli.errors import Finding, RecipeError, TrahivError

MAX_CHARACTERS = 128 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Aliases count each time they are used, so a document cannot grow without bound while it is read."""

LARGEST = 2**63
"""Numbers go up to this, in both directions: other peers' languages and formats need not hold more."""

MAX_DIGITS = 300

Location = tuple[str | int, ...]
"""Where a value is: `("data", "datasets", 0, "path")`."""

_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
}
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes with YAML 1.2 tags; its constructor is not used."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node, refusing nesting that would exhaust the interpreter's stack."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = parent.start_mark if parent else None
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _kind, (_regexp, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_regexp})$"), _first)


@dataclass(frozen=True)
class Mark:
    """A place in a file; both count from 1."""

    line: int
    col: int


@dataclass(frozen=True)
class Override:
    """One `--set`, as typed and as understood."""

    text: str
    location: Location
    value: Any

    def covers(self, location: Location) -> bool:
        """Tell whether the value at `location` came from here."""
        return _words(location)[: len(self.location)] == _words(self.location)


@dataclass
class Document:
    """A recipe's data and where each part of it came from.

    Data that was never text (it came over the network) has no lines and no marks.
    """

    data: dict[str, Any]
    file: str
    lines: list[str] = field(default_factory=list)
    keys: dict[Location, Mark] = field(default_factory=dict)
    values: dict[Location, Mark] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)

    findings: list[Finding] = field(default_factory=list)
    """Mistakes found so far that did not keep the rest from being read."""

    files: dict[Location, str] = field(default_factory=dict)
    """Values that are the text of a file, and the name of that file as it was written."""

    strays: dict[str, str] = field(default_factory=dict)
    """Paths that only the current folder has, by dotted path."""

    def replace(self, texts: Sequence[str]) -> None:
        """Put the values of `--set` over a copy of the data; later ones win.

        Missing sections are made on the way. A text that can't be read or placed is a finding.

        Args:
            texts: `a.b=c` each. The value follows the same YAML rules as a recipe's.
        """
        self.data = copy.deepcopy(self.data)
        for text in texts:
            path, equals, value = text.partition("=")
            location = read_location(path.strip())
            file = f"--set {text}"
            if not equals or "" in location:
                self.findings.append(Finding(path, "expected `section.key=value`", file=file))
                continue
            try:
                override = Override(text, location, read_value(value))
                self.overrides.append(override)
                _assign(self.data, override)
            except RecipeError as error:
                self.findings += [
                    Finding(path, found.message, found.hint, file)
                    for found in error.findings or (Finding("", error.message),)
                ]

    def is_replaced(self, location: Location) -> bool:
        """Tell whether the value at `location` came from `--set`."""
        return any(override.covers(location) for override in self.overrides)

    def mark(self, location: Location, *, of_key: bool = False) -> Mark | None:
        """Return the place of a value or of its key; of what is not there, that of the section it is in."""
        if location in self.values and not of_key:
            return self.values[location]
        while location and location not in self.values:
            location = location[:-1]
        return self.keys.get(location) or self.values.get(location)

    def finding(self, path: str, message: str, hint: str = "", mark: Mark | None = None) -> Finding:
        """Make a finding at `mark`, with the source line that it stands on."""
        if mark is None:
            return Finding(path, message, hint, self.file)
        source = self.lines[mark.line - 1] if mark.line <= len(self.lines) else ""
        return Finding(path, message, hint, self.file, mark.line, mark.col, source)

    def finding_at(
        self, location: Location, message: str, hint: str = "", *, path: str = "", of_key: bool = False
    ) -> Finding:
        """Make a finding about what is at `location`, in the file or in a `--set`.

        Args:
            location: where to point; a section that `--set` made is that option's.
            message: what is wrong.
            hint: what to do about it.
            path: what is wrong, if it is something else than what is pointed at.
            of_key: point at the key and not at the value.
        """
        path = path or dotted(location)
        for override in self.overrides:
            makes_section = _words(override.location)[: len(location)] == _words(location)
            if override.covers(location) or (makes_section and location not in self.values):
                return Finding(path, message, hint, f"--set {override.text}")
        return self.finding(path, message, hint, self.mark(location, of_key=of_key))

    def error(
        self, findings: Sequence[Finding], kind: type[TrahivError] = RecipeError, hint: str = ""
    ) -> TrahivError:
        """Make the error of this document; findings without a line come last."""
        ordered = sorted(findings, key=lambda finding: (finding.line == 0, finding.line, finding.col))
        count = "1 error" if len(ordered) == 1 else f"{len(ordered)} errors"
        return kind(f"{self.file}: {count}", hint, tuple(ordered))


def dotted(location: Location) -> str:
    """Write a location as a recipe's user does: `data.datasets.0.path`."""
    return ".".join(map(str, location))


def read_location(path: str) -> Location:
    """Read a location as a recipe's user writes it; digits are the number of an entry in a list."""
    return tuple(int(part) if part.isdecimal() else part for part in path.split("."))


def leaves(data: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield every value of a recipe's plain data; a list of words is one value, an empty section too."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*location, key))
    elif isinstance(data, list) and any(isinstance(value, dict) for value in data):
        for index, value in enumerate(data):
            yield from leaves(value, (*location, index))
    else:
        yield location, data


def kind_of(value: object) -> str:
    """Name a value as its writer sees it: `'many'`, `a list`, `nothing`."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_text(text: str) -> bool:
    """Tell whether UTF-8 can carry it: a lone half of a surrogate pair cannot be hashed or stored."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


# -- reading --------------------------------------------------------------------------------------


def read_document(text: str, file: str) -> Document:
    """Read a whole recipe.

    Raises:
        RecipeError: it is not one YAML mapping; mistakes inside the mapping are `findings` instead.
    """
    document = _read(text, file)
    if document.data is None:
        hint = "`trahiv new quickstart` writes a commented recipe"
        raise document.error([document.finding("", "the file is empty", hint)])
    if not isinstance(document.data, dict):
        message = f"expected `key: value` lines, got {kind_of(document.data)}"
        hint = "`trahiv new quickstart` writes a whole recipe to start from"
        raise document.error([document.finding("", message, hint, document.values[()])])
    return document


def read_value(text: str) -> Any:
    """Read one value by the same rules, for `--set`.

    Raises:
        RecipeError: it is not YAML, or it has a mistake that YAML would let pass.
    """
    document = _read(text, "")
    if document.findings:
        raise document.error(document.findings)
    return document.data


def _words(location: Location) -> list[str]:
    """Compare as written: `id2label.0` may be an entry of a list or a key of a section."""
    return [str(part) for part in location]


def _assign(data: Any, override: Override) -> None:
    for depth, part in enumerate(override.location):
        where = dotted(override.location[:depth])
        if isinstance(data, list):
            if not isinstance(part, int) or part >= len(data):
                raise RecipeError(f"`{where}` has the entries 0 to {len(data) - 1}, not {part!r}")
        elif not isinstance(data, dict):
            raise RecipeError(f"`{where}` is a value, not a section")
        key = part if isinstance(data, list) else str(part)
        if depth == len(override.location) - 1:
            data[key] = override.value
            return
        if isinstance(data, dict) and data.get(key) is None:
            data[key] = {}
        data = data[key]


def _read(text: str, file: str) -> Document:
    document = Document({}, file, text.splitlines())
    if len(text) > MAX_CHARACTERS:
        message = f"is {len(text)} characters long; a recipe has at most {MAX_CHARACTERS}"
        raise document.error([document.finding("", message)])
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document.data = None if node is None else _Walk(document).value(node, ())  # type: ignore[assignment]
    except yaml.MarkedYAMLError as error:
        raise document.error([_syntax(error, document)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        col = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        message = f"has a control character (#x{int(error.character):04x})"
        raise document.error([document.finding("", message, "remove it", Mark(line, col))]) from None
    return document


_SYNTAX_HINTS = {
    "'\\t'": "YAML indents with spaces, not with tabs",
    "another document": "a recipe is one document: remove the `---`",
    "alias": "put a text that begins with `*` in quotes",
    "mapping values": "check the indentation, and quote a text that contains `: `",
    "escape": "between double quotes, `\\` is written twice; between single quotes it stands for itself",
    "quoted scalar": "a quote is opened here and never closed",
    "flow": "a bracket is opened on line {line} and not closed before this",
    "start any token": "put a text that begins with it in quotes",
    "block": "check the indentation",
}
"""Part of what YAML says -> what to do about it; the first that fits."""


def _syntax(error: yaml.MarkedYAMLError, document: Document) -> Finding:
    problem, context = error.problem or "not YAML", error.context or ""
    part = next((part for part in _SYNTAX_HINTS if part in f"{problem} {context}"), None)
    begin, mark = error.context_mark, error.problem_mark or error.context_mark
    if part == "quoted scalar":
        mark = begin
    if problem == "but found another document":
        problem = "a second document begins here"
    hint = _SYNTAX_HINTS[part].format(line=begin.line + 1 if begin else 1) if part else ""
    return document.finding("", f"not valid YAML: {problem}", hint, _mark(mark) if mark else None)


def _mark(mark: yaml.Mark) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


class _Walk:
    """Turns nodes into data while noting every place in the document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0

    def value(self, node: yaml.Node, location: Location) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or len(location) > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "too many values", node.start_mark)
        self.document.values[location] = _mark(node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return {key: self.value(item, (*location, key)) for key, item in self.pairs(node, location)}
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_TAG) in ("str", *_PLAIN):
            return self.scalar(node, location)
        return self.refuse(
            node, location, f"the tag {node.tag.replace(_TAG, '!!')} is not known here", "remove it"
        )

    def pairs(self, node: yaml.MappingNode, location: Location) -> Iterator[tuple[str, yaml.Node]]:
        seen: dict[str, Mark] = {}
        for key_node, item in node.value:
            mark = _mark(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                self.refuse(key_node, location, "a key must be a word", "put it in quotes")
                continue
            key = str(key_node.value)
            if key in seen:
                first = f"the first is on line {seen[key].line}"
                self.refuse(key_node, (*location, key), f"is given twice; {first}", "keep one of them")
                continue
            seen[key] = self.document.keys[(*location, key)] = mark
            yield key, item

    def scalar(self, node: yaml.ScalarNode, location: Location) -> Any:
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        if kind == "str":
            return text if is_text(text) else self.refuse(node, location, "has half of a surrogate pair")
        if not re.fullmatch(_PLAIN[kind][0], text):
            return self.refuse(node, location, f"{text!r} is not a !!{kind}")
        if len(text) > MAX_DIGITS:
            return self.refuse(node, location, f"has {len(text)} digits; at most {MAX_DIGITS} are read")
        value: object = None
        if kind == "bool":
            value = text.lower() == "true"
        elif kind != "null":
            value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if kind == "int" else float(text)
        if isinstance(value, int | float) and abs(value) > LARGEST:
            return self.refuse(
                node, location, f"{text} is too large: numbers go up to {LARGEST}", "write a smaller number"
            )
        return value

    def refuse(self, node: yaml.Node, location: Location, message: str, hint: str = "") -> Any:
        """Note what is wrong and go on with nothing in its place, so that the rest is read too."""
        mark = _mark(node.start_mark)
        self.document.findings.append(self.document.finding(dotted(location), message, hint, mark))
        return None


# -- writing --------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Writes a text in quotes where `_Loader` would read something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values in full, without anchors."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the entries of a list below its key."""
        super().increase_indent(flow, indentless=False)


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        _TAG + "str", text, style=None if text.isprintable() else '"'
    ),
)
_Dumper.add_representer(
    list,
    lambda dumper, values: dumper.represent_sequence(
        _TAG + "seq", values, flow_style=not any(isinstance(value, dict) for value in values)
    ),
)


def render(data: dict[str, Any]) -> list[tuple[str, Location | None]]:
    """Return the lines of a YAML document that reads as `data` again.

    Returns:
        Each line with the location of the value on it; a line that only opens a section has none.
    """
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=inf)
    places = read_document(text, "")
    marks = {location: places.mark(location, of_key=True) for location, _ in leaves(data)}
    starts = {mark.line: location for location, mark in marks.items() if mark is not None}
    return [(line, starts.get(number)) for number, line in enumerate(text.splitlines(), 1)]
