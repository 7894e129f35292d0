"""What the code says of itself, for readers: pages of the site, and the manual page.

mkdocs loads this file as a hook (mkdocs.yml). It adds the pages that are not in `docs/`: the README and its
neighbours, the reference of recipes from their JSON Schema, and the reference of commands from the command
line. The manual page has the same source as the latter; tests/shape/test_site.py writes it to docs/man/.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from trahiv_cli.cli.app import app
from trahiv_cli.recipe.document import dotted
from trahiv_cli.recipe.foreign import CALLED_ELSEWHERE, FOREIGN_CHOICES, REFUSED_CHOICES, TOOLS
from trahiv_cli.recipe.schema import marks_of, recipe_schema
from trahiv_cli.recipe.section import OWN, SUGGESTED

ROOT = Path(__file__).parents[1]
PAGES_OF_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "report-a-vulnerability.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
NAMES_ELSEWHERE = "The names are in [`recipe/foreign.py`](../trahiv_cli/recipe/foreign.py)."
"""The sentence of docs/from-others.md that the tables take the place of."""


# -- the site -------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`."""
    for source, page in PAGES_OF_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "recipe.md", content=recipe_page()))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links of the repository lead to pages of the site, and to the repository where there is none."""
    is_of_the_root = page.file.src_uri in PAGES_OF_THE_ROOT.values()

    def lead(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("" if is_of_the_root else "docs", link[1]))
        if path in PAGES_OF_THE_ROOT or path.startswith("docs/"):
            return f"]({PAGES_OF_THE_ROOT.get(path, path.removeprefix('docs/'))}"
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which is not in the repository")
        return f"]({config.extra['repository']}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"

    if page.file.src_uri in ("recipe.md", "commands.md"):
        return markdown
    if NAMES_ELSEWHERE in markdown:
        page.meta["hide"] = ["toc"]  # its table is wide
        markdown = markdown.replace(NAMES_ELSEWHERE, names_elsewhere())
    return LINK.sub(lead, markdown)


# -- recipes --------------------------------------------------------------------------------------


def recipe_page() -> str:
    """Describe every section of a recipe and every field, in the order of the schema."""
    schema = recipe_schema()
    intro = (
        "Every section and every field of a recipe, as `trahiv schema` gives them to editors. "
        "`trahiv show RECIPE` prints the values that a recipe has, and where each came from.\n\n"
        "A field that is **shared** is part of the agreement: peers whose values differ are not in one run. "
        "A field that is a peer's **own** may differ. One that is **suggested** is a peer's own too, and a "
        "newcomer without a recipe takes the swarm's value."
    )
    return (
        "\n\n".join(["# Recipe", intro, "## At the top level", *_section((), schema, schema["definitions"])])
        + "\n"
    )


def _section(
    location: tuple[str | int, ...], section: dict[str, Any], known: dict[str, Any]
) -> Iterator[str]:
    """Describe the fields of a section, then the sections in it."""
    inner = []
    for name, field in section["properties"].items():
        place = (*location, name)
        if found := re.search(r"#/definitions/(\w+)", json.dumps(field)):
            is_list = any(kind.get("type") == "array" for kind in field.get("anyOf", [field]))
            inner.append(((*place, 0) if is_list else place, field, known[found[1]]))
            continue
        is_required = name in section.get("required", ())
        yield f"### `{dotted(place)}` {{ #{dotted(place)} }}"
        said = [_kind(field), "required" if is_required else _default(field), _sharing(place)]
        yield " · ".join(filter(None, said))
        yield _text(field)
    for place, field, definition in inner:
        yield f"## `{dotted(place)}` {{ #{dotted(place)} }}"
        yield _text(definition)
        if field.get("description") != definition["description"]:
            yield _text(field)
        yield from _section(place, definition, known)


def _text(described: dict[str, Any]) -> str:
    """Return a description, whose files of `docs/` are links."""
    text = " ".join(described.get("description", "").split())
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None else f"default `{json.dumps(default)}`"


def _sharing(location: tuple[str | int, ...]) -> str:
    marks = marks_of(location)
    return "suggested" if SUGGESTED in marks else "own" if OWN in marks else "shared"


def _kind(schema: dict[str, Any]) -> str:
    """Say what a value may be, in words."""
    match schema:
        case {"anyOf": kinds}:
            return " or ".join(_kind(kind) for kind in kinds if kind != {"type": "null"})
        case {"enum": choices}:
            return ", ".join(f"`{choice}`" for choice in choices)
        case {"const": only}:
            return f"`{only}`"
        case {"type": "array", "items": item}:
            return f"list of: {_kind(item)}"
        case {"type": "integer" | "number" as number}:
            limits = {"minimum": "at least", "exclusiveMinimum": "above"}
            limits |= {"maximum": "at most", "exclusiveMaximum": "below"}
            # The schema's 10**9 only catches typing errors.
            known = {words: schema[limit] for limit, words in limits.items() if limit in schema}
            said = [f"{words} {limit:,}" for words, limit in known.items() if limit != 10**9]
            return f"{'whole ' * (number == 'integer')}number {' and '.join(said)}".strip()
        case {"type": kind}:
            return {"string": "text", "boolean": "`true` or `false`", "object": "section of any keys"}[kind]
    raise ValueError(f"there are no words for {schema}")


# -- commands -------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An argument or option, and what its help says."""

    name: str
    help: str


class Command(NamedTuple):
    """A command as its `--help` shows it."""

    name: str
    usage: str
    paragraphs: list[str]
    entries: list[Entry]


def commands() -> list[Command]:
    """Read the command line: `trahiv` itself, then its commands in the order of `--help`."""
    whole: Any = get_command(app)
    of_all = whole.make_context("trahiv", [], resilient_parsing=True)
    found = [_command("trahiv", whole, of_all, ["COMMAND", "..."])]
    for name, command in whole.commands.items():
        context = command.context_class(command, info_name=name, parent=of_all)
        found.append(_command(f"trahiv {name}", command, context, []))
    return found


def _command(name: str, command: Any, context: Any, more: list[str]) -> Command:
    """Read a command of typer; typer brings its own click, whose classes have no public names."""
    entries, words = [], [name, "[OPTIONS]", *more]
    for parameter in command.get_params(context):
        shown, help = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            shown, help = parameter.metavar, parameter.help
            words.append(shown if parameter.required else f"[{shown}]")
        # Versions of typer write choices as <a|b> or [a|b], and limits as [x>=1] or \[x>=1].
        name_of = re.sub(r"[<\[](\S+)[>\]]", r"\1", shown)
        entries.append(Entry(name_of, " ".join(help.replace(r"\[", "[").split())))
    paragraphs = [" ".join(paragraph.split()) for paragraph in command.help.split("\n\n")]
    return Command(name, " ".join(words), paragraphs, entries)


def commands_page() -> str:
    """Describe every command and option."""
    parts = [
        "# Commands",
        "Every command and option, as `trahiv --help` and `trahiv COMMAND --help` say them.",
    ]
    for name, usage, paragraphs, entries in commands():
        parts += [f"## `{name}`", f"```text\n{usage}\n```", *paragraphs]
        rows = [(f"`{name}`", help.replace("|", r"\|")) for name, help in entries]
        parts.append(_table(("argument or option", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def manual_page() -> str:
    """Write the manual page `trahiv(1)`, in the macros of man(7)."""
    whole, *each = commands()
    lines = [
        '.TH TRAHIV 1 "" "trahiv" "User Commands"',
        *(".SH NAME", rf"trahiv \- {_roff(whole.paragraphs[0].rstrip('.'))}"),
        *(".SH SYNOPSIS", ".B trahiv", _roff(whole.usage.removeprefix("trahiv "))),
        *(".SH OPTIONS", *_listed(whole.entries), ".SH COMMANDS"),
    ]
    for name, usage, paragraphs, entries in each:
        lines += [f".SS {_roff(name)}", _roff(usage)]
        lines += [line for paragraph in paragraphs for line in (".PP", _roff(paragraph))]
        lines += _listed(entries)
    return "\n".join([*lines, ".SH EXIT STATUS", *_listed(exit_codes())]) + "\n"


def exit_codes() -> list[Entry]:
    """Read the table that docs/exit-codes.md begins with."""
    rows = re.findall(
        r"^\| ([\d, ]+) \| (.+?) \|", (ROOT / "docs/exit-codes.md").read_text("utf-8"), re.MULTILINE
    )
    return [Entry(code, meaning) for code, meaning in rows]


def _listed(entries: list[Entry]) -> list[str]:
    return [line for name, help in entries for line in (".TP", rf"\fB{_roff(name)}\fR", _roff(help))]


def _roff(text: str) -> str:
    """Escape what roff reads as more than text."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("`", "")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


# -- names of other tools -------------------------------------------------------------------------


def names_elsewhere() -> str:
    """Write the tables of names and choices of other tools."""
    names = [
        (here, *(", ".join(f"`{name}`" for name in tools.get(tool, "").split()) for tool in TOOLS))
        for here, tools in CALLED_ELSEWHERE.items()
    ]
    choices = [(f"`{here}`", f"`{there}`") for there, here in FOREIGN_CHOICES.items()]
    refused = [
        (f"`{field}`", f"`{choice}`", reason, instead)
        for field, choices_of_it in REFUSED_CHOICES.items()
        for choice, (reason, instead) in choices_of_it.items()
    ]
    return "\n\n".join(
        [
            _table(("here", *TOOLS), names),
            "Choices of tasks and codecs that have another name here:",
            _table(("here", "elsewhere"), choices),
            "Choices that cannot be in a swarm:",
            _table(("field", "choice", "why", "instead"), refused),
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))
