"""Facts on the pages that can be checked: executed commands, exit codes, names, versions, figures."""

import re
import tomllib

import pytest

import trahiv_cli
from tests.kit.documented import LIST, NOT_RUN, ROOT, listed, pages, shown_in
from trahiv_cli import errors
from trahiv_cli.swarm.status import PROTOCOL

FIGURE = re.compile(r"(?<![\w.-])[+-]?\d(?:[\d.,]*\d)?(?:\s(?:%|s|min|Mbit/s|ms|GB|MB))?(?![\w-])")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_shown_commands_are_executed_or_excused():
    shown = {one.line: one.page for page in pages() for one in shown_in(page)}
    by_scenario = listed()
    reasons = dict(entry.split(" | ") for entry in by_scenario.pop(NOT_RUN))
    known = {*reasons, *(line for lines in by_scenario.values() for line in lines)}
    missing = {line: page for line, page in shown.items() if line not in known}
    assert not missing, f"nothing executes these; write in {LIST.name} what does"
    assert not known - set(shown), f"no page shows these: remove them from {LIST.name}"
    assert all(reasons.values())


def test_shown_targets_and_scripts_exist():
    shown = {one.line for page in pages() for one in shown_in(page)}
    targets = set(re.findall(r"^(\w+):.*## ", text_of("Makefile"), re.MULTILINE))
    assert {line.removeprefix("make ") for line in shown if line.startswith("make ")} <= targets
    assert all((ROOT / line.split()[0]).exists() for line in shown if line.startswith("scripts/"))


def test_listed_scenarios_are_executed():
    tests = text_of("tests/swarm/test_docs_commands.py") + text_of("tests/unit/cli/test_documented.py")
    assert set(re.findall(r'Script\("([a-z ]+)"\)', tests)) == set(listed()) - {NOT_RUN}


def test_pages_list_every_exit_code():
    codes = {0, 130, 143} | {one.exit_code for one in vars(errors).values() if hasattr(one, "exit_code")}
    to_restart = text_of("docs/running.md").partition("## When to restart")[2]
    for text in (text_of("docs/exit-codes.md"), to_restart):
        cells = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
        assert {int(code) for cell in cells for code in cell.split(",")} == codes


VERSION = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]


def test_stable_page_names_protocol_and_exports():
    page = text_of("docs/stable.md")
    assert f"version {VERSION} speaks protocol {PROTOCOL}" in page
    names = page.partition("## Python names")[2].partition(" Their upstream")[0]
    assert set(re.findall(r"`(\w+)`", names)) == set(trahiv_cli.__all__)


def test_changelog_begins_with_version_and_protocol():
    changes = text_of("CHANGELOG.md")
    assert changes.split("\n## ")[1].startswith(VERSION)
    assert re.search(r"protocol (\d+)", changes)[1] == str(PROTOCOL)


ROWS = re.findall(r"^\|.*\.md.*\|$", text_of("docs/cost.md"), re.MULTILINE)


@pytest.mark.parametrize("row", ROWS)
def test_cost_figures_match_their_source(row):
    *cells, source = row.split(" | ")
    [name] = re.findall(r"\((\w+\.md)", source)
    figures = [re.compile(rf"(?<![\d.]){re.escape(one)}(?!\d)") for one in FIGURE.findall(" ".join(cells))]
    assert any(all(one.search(line) for one in figures) for line in text_of(f"docs/{name}").splitlines())
