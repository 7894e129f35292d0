"""The command lines that the README and the pages show, and the list of what executes each of them."""

import re
import shlex
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

with_todays_typer = pytest.mark.skipif(
    Version(metadata.version("typer")) < Version("0.26"), reason="an older typer tells less of arguments"
)

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "shape" / "documented_commands.txt"
NOT_RUN = "not run"
FIGURES = re.compile(r"Qm\w*|trahiv1:[\w-]+|(?<=parrot-)\w+|\b[0-9a-f]{8,}\b|\d+(?:[.,:]\d+)*")
"""What differs from run to run: ids, invitations, the end of a run's name, fingerprints, and numbers."""


@dataclass(frozen=True)
class Shown:
    """A command line as a page shows it, without its comment, and the output that is shown below it."""

    page: str
    line: str
    output: str = ""


def pages():
    """Find the texts whose commands are executed."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, *languages):
    """Return the fenced blocks of a page that are in one of these languages."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(fence, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shown_in(page):
    """Return the command lines of a page: each line of `bash`, and in `console` what follows a prompt."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words, _, _ = line.partition(" # ")
            if words.strip() and not words.startswith("#"):
                found.append(Shown(page.name, normal(words)))
    for block in blocks(page, "console"):
        for part in re.split(r"^\w*\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            found.append(Shown(page.name, normal(line), output))
    return found


def normal(line):
    """Return a command line with single spaces, and with the one word that stands for an invitation."""
    return re.sub(r"trahiv1:[\w-]+\.{3}", "trahiv1:...", " ".join(line.split()))


def listed():
    """Read the list: the command lines of each scenario, or `not run` with a reason after each."""
    found = {}
    for entry in LIST.read_text(encoding="utf-8").splitlines():
        if entry and not entry.startswith("#"):
            where, _, line = entry.partition(" | ")
            found.setdefault(where, []).append(line)
    return found


class Script:
    """The command lines of one scenario, each to be executed once."""

    def __init__(self, where):
        self.left = listed()[where]

    def words(self, line, **replaced):
        """Take a line as the page has it; return its words, after `trahiv` if it has that, some replaced.

        Raises:
            ValueError: the list does not have the line in this scenario, or it was taken before.
        """
        self.left.remove(line)
        words = [replaced.get(word, word) for word in shlex.split(line)]
        return words[words.index("trahiv") + 1 :] if "trahiv" in words else words


def looks_like(output, shown):
    """Tell whether an output is as shown, where `...` stands for anything, but for ids, numbers and gaps."""
    got, want = (FIGURES.sub("#", text).strip() for text in (output, shown))
    parts = re.split(r"\s*(?<!\S)\.{3}(?!\S)\s*|\.{3}", want)  # where it stands alone, it may be nothing
    pattern = ".*".join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts)
    return re.fullmatch(pattern, got, re.DOTALL) is not None
