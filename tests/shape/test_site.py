"""The site builds without warnings, its links resolve, and its reference covers all that the code has."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.reference import PAGES_OF_THE_ROOT, manual_page
from tests.kit.documented import with_todays_typer
from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.document import dotted
from trahiv_cli.recipe.foreign import FOREIGN
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import section_in, sections_of_a_recipe

pytestmark = with_todays_typer

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "docs/man/trahiv.1"
REWRITE = "TRAHIV_REWRITE_CLI_SURFACE"
"""Set to 1 to write the manual page anew, when a command or an option was meant to change."""

PAGES = [*map(ROOT.joinpath, PAGES_OF_THE_ROOT), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FROM_ELSEWHERE = re.compile(r"""<(?:script|link|img)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*""")
EXTERNAL = re.compile(r"https?://[a-z0-9.-]+\.[a-z]{2,}(/[^\s<>]*)?")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's notice about the next mkdocs
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def text_of(path):
    """A page without its code, in which `#` begins a comment and a bracket is no link."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path):
    """Anchors that links to a page may name, as the repository's own view makes them."""
    headings = re.findall(r"^#+ (.*)", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        assert not FROM_ELSEWHERE.search(page.read_text(encoding="utf-8")), page
    drawn = [page.name for page in PAGES if "```mermaid" in page.read_text(encoding="utf-8")]
    assert not drawn, "the theme would load mermaid from elsewhere: commit the picture, as docs/rounds.svg is"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_resolve(page):
    for link in LINK.findall(text_of(page)):
        path, _, anchor = link.partition("#")
        if ":" in link:
            assert EXTERNAL.fullmatch(link), link
        else:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_reference_has_every_field_and_option(site):
    recipe = (site / "recipe.html").read_text(encoding="utf-8")
    for home, fields in sections_of_a_recipe().items():
        assert not home or f'id="{dotted(home)}"' in recipe
        for name, field in fields.items():
            path = dotted((*home, name))
            assert section_in(field.annotation) or f'id="{path}"' in recipe, path
    commands = (site / "commands.html").read_text(encoding="utf-8")
    written = dict(part.split('"', 1) for part in commands.split('<h2 id="')[1:])  # of each command
    for line in (ROOT / "tests/shape/cli_surface.txt").read_text(encoding="utf-8").splitlines():
        command, _, option = line.partition(" -")
        words = [word for word in command.split() if not word.isupper()]
        assert f"-{option}" in written["-".join(words)] if option else "-".join(words) in written, line


def test_manual_page_matches_commands():
    if os.environ.get(REWRITE) == "1":
        MANUAL.write_text(manual_page(), encoding="utf-8")
    assert manual_page() == MANUAL.read_text(encoding="utf-8"), f"meant to change? {REWRITE}=1 writes it anew"
    if groff := shutil.which("groff"):
        command = [groff, "-man", "-ww", "-z", "-Kutf8", str(MANUAL)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_foreign_names_page_matches_loader(site, tmp_path, monkeypatch):
    shown = (site / "from-others.html").read_text(encoding="utf-8")
    assert all(f"<code>{name}</code>" in shown for name in FOREIGN)
    page = (ROOT / "docs/from-others.md").read_text(encoding="utf-8")
    theirs, ours = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    Path("chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 200)
    Path("ours.yaml").write_text(ours)
    command = [sys.executable, "-m", "trahiv_cli", "check", "ours.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ours.yaml: ok\n"), done.stderr
    assert done.stderr == ""
    Path("theirs.yaml").write_text(theirs)
    with pytest.raises(RecipeError) as caught:
        load_recipe("theirs.yaml")
    unknown = {each.path: each.hint for each in caught.value.findings if each.message == "unknown key"}
    assert unknown.keys() == yaml.safe_load(theirs).keys()
    assert all("here it is" in hint or "belongs under" in hint for hint in unknown.values()), unknown
