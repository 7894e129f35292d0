"""Measure how the code reads, and fail where a measure exceeds its limit.

    measure.py                 print each measure with its limit and its goal
    measure.py --show prose    also list the places of the measures whose name begins so

A limit is today's value: no change may exceed it, and a change that improves it lowers it here. A goal has
some room above the values of well-kept codebases of this field (httpx, trio, torchft, hivemind, nanochat).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "trahiv_cli", ROOT / "tests"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIGHT_COMMANDS = (
    "--help",
    "check quickstart",
    "status",
    "pause",
    "resume",
    "finish",
    "members",
    "invite",
    "kick 123456",
)

PATTERNS = {
    "free relatives": r"\b[Ww]hat (?:is|was|were|has|had|can|may|it|this|others|they|comes|came|a|each|all"
    r"|most|must|belongs|peers|members|an|the|follows|needs|stands|stays|he|goes|went|would|could|does|did|makes"
    r"|somebody|nobody|anybody)\b",
    "who without a noun": r"(?<![\w'])(?:[Ww]ho(?:ever)|[Ww]ho (?:is|has|was|can|may|comes|does|did|gives"
    r"|joins|joined|had|votes|starts|serves|waits|asks|misses|missed|goes|tries|trains|calls|shows|are|needs|meets"
    r"|brings|said|wants|writes|signed|came|hears|looks|takes|listens))\b",
    "those": r"\b(?:[Tt]hose (?:that|of|who|which|to|in|whose)|that of)\b",
    "so many": r"\b[Ss]o (?:many|long|often|few|old|young|large)\b",
    "passives of telling": r"\b(?:is|are|was|were) (?:said|told|heard|asked|named|met|held|brought|reckoned"
    r"|believed|judged|wished)\b",
    "nobody, somebody": r"\b(?:[Nn]obody|[Ss]omebody|[Aa]nybody|[Ee]verybody|[Ww]ho(?:ever))\b",
}
MIDDLE = re.compile(
    r"(Of|Times|With which|And|That|To|By|At|From|Beside|Not|For|In|On|Whose|How|What|Who|Where|Why|Which|So"
    r"|As|But|Within|After|Before|Between|Behind|Through|Until|Also|Else|Again|Below|Above|Instead)\b"
)
GOALS = {
    "free relatives": 1.0,
    "who without a noun": 0.2,
    "those": 0.6,
    "so many": 0.2,
    "passives of telling": 0.4,
    "nobody, somebody": 0.2,
}

LIMITS: dict[str, float] = {
    "tokens": 187_300,
    "largest file": 511,
    "messages: so many per 1,000 words": 0.4,
    "messages: nobody, somebody per 1,000 words": 0.4,
}
"""Of the measures that exceed their goals; the goal is the limit of all others."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measure:
    """One figure, its goal, and the places that count towards it."""

    value: float
    goal: float
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """A Python file, read once."""

    path: Path
    text: str
    tree: ast.Module

    def place(self, line: int, text: str) -> str:
        """Describe a line of this file for a person."""
        return f"{self.path.relative_to(ROOT)}:{line}: {' '.join(text.split())[:100]}"

    @property
    def docstrings(self) -> Iterator[ast.Constant]:
        """All strings that stand alone as statements: of modules, classes, functions, attributes."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    yield node.value

    @property
    def comments(self) -> Iterator[tokenize.TokenInfo]:
        """All comments."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token


def read(folder: Path) -> list[Source]:
    """Read all Python files below a folder."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def measure_prose(name: str, passages: list[tuple[str, str]]) -> dict[str, Measure]:
    """Count each pattern per 1,000 words of these passages, each with the place where it stands."""
    words = sum(len(re.findall(r"\w+", text)) for _, text in passages)
    measures = {}
    for kind, pattern in PATTERNS.items():
        hits = [
            f"{place}{text[max(0, hit.start() - 30) : hit.end() + 40]!r}"
            for place, text in passages
            for hit in re.finditer(pattern, text)
        ]
        measures[f"{name}: {kind} per 1,000 words"] = Measure(1000 * len(hits) / words, GOALS[kind], hits)
    return measures


def passages_of_code(sources: list[Source]) -> list[tuple[str, str]]:
    """Return all docstrings and comments."""
    found = []
    for source in sources:
        found += [(source.place(one.lineno, ""), str(one.value)) for one in source.docstrings]
        found += [(source.place(one.start[0], ""), one.string.lstrip("# ")) for one in source.comments]
    return found


def passages_of_messages(sources: list[Source]) -> list[tuple[str, str]]:
    """Return the strings that a person may see: all with two spaces or more that are no docstrings."""
    found = []
    for source in sources:
        docstrings = {id(one) for one in source.docstrings}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                if node.value.count(" ") > 1:
                    found.append((source.place(node.lineno, ""), node.value))
    return found


def passages_of_pages() -> list[tuple[str, str]]:
    """Return the paragraphs of the written pages, without code."""
    found = []
    for path in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [(f"{path.relative_to(ROOT)}: ", paragraph) for paragraph in text.split("\n\n")]
    return found


def measure_size(sources: list[Source]) -> dict[str, Measure]:
    """Measure the package: tokens, and the largest file, class, function and list of parameters."""
    sizes: dict[str, list[tuple[int, str]]] = defaultdict(list)
    tokens = 0
    for source in sources:
        kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
        tokens += sum(
            token.type in kinds for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        )
        if source.path.name != "schema.py":
            sizes["file"].append((source.text.count("\n"), source.place(1, "")))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                sizes["class"].append((_lines(node), source.place(node.lineno, node.name)))
            if isinstance(node, Function):
                sizes["function"].append((_lines(node), source.place(node.lineno, node.name)))
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(one.arg not in ("self", "cls") for one in given)
                sizes["list of parameters"].append((count, source.place(node.lineno, node.name)))
    measures = {"tokens": Measure(tokens, 163_000)}
    goals = {"file": 450, "class": 350, "function": 60, "list of parameters": 22}
    for kind, goal in goals.items():
        largest = sorted(sizes[kind], reverse=True)[:5]
        measures[f"largest {kind}"] = Measure(largest[0][0], goal, [f"{place} ({n})" for n, place in largest])
    return measures


def _lines(node: ast.ClassDef | Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to, tuples taken apart."""
    match node:
        case ast.Assign(targets=targets):
            return [one for target in targets for one in getattr(target, "elts", [target])]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
    return []


def measure_habits(sources: list[Source]) -> dict[str, Measure]:
    """Measure the package: foreign writes, constants, parallel assignments, docstrings, circles."""
    foreign, parallel, middle = list[str](), list[str](), list[str]()
    constants: dict[str, list[str]] = defaultdict(list)
    lines = 0
    for source in sources:
        lines += source.text.count("\n")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                if isinstance(node.value, ast.Tuple):
                    parallel.append(source.place(node.lineno, ast.unparse(node)))
            for target in _targets(node):
                if isinstance(target, ast.Attribute):
                    owner = target.value
                    if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                        foreign.append(source.place(node.lineno, ast.unparse(target)))
        for statement in source.tree.body:
            for target in _targets(statement):
                if isinstance(target, ast.Name) and target.id.lstrip("_").isupper():
                    constants[target.id].append(source.place(statement.lineno, target.id))
        for one in source.docstrings:
            text = str(one.value).strip()
            if "\n" not in text and MIDDLE.match(text):
                middle.append(source.place(one.lineno, text))
    everywhere = [place for found in constants.values() for place in found]
    shared = {name: found for name, found in constants.items() if len({f.split(":")[0] for f in found}) > 1}
    circles = find_circles(sources)
    return {
        "docstrings of one line that begin in mid-sentence": Measure(len(middle), 10, middle),
        "import circles, type imports included": Measure(len(circles), 0, circles),
        "attributes written from outside": Measure(len(foreign), 60, foreign),
        "constants per 1,000 lines": Measure(1000 * len(everywhere) / lines, 10, everywhere),
        "names of constants in several modules": Measure(len(shared), 5, sorted(shared)),
        "parallel assignments per 1,000 lines": Measure(1000 * len(parallel) / lines, 6, parallel),
    }


def find_circles(sources: list[Source]) -> list[str]:
    """Return the groups of modules that import each other, directly or not."""
    modules = {}
    for source in sources:
        parts = source.path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = source
    imported: dict[str, set[str]] = {}
    for name, source in modules.items():
        found = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{one.name}" for one in node.names]
                found |= {one if one in modules else node.module for one in whole}
        imported[name] = found & modules.keys() - {name}

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = imported[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in modules}
    circles = {
        tuple(sorted(one for one in reach[name] if name in reach[one]))
        for name in modules
        if name in reach[name]
    }
    return [" ".join(circle) for circle in sorted(circles)]


def measure_tests(sources: list[Source]) -> dict[str, Measure]:
    """Measure the tests: the words in their names, and the module constants that they patch."""
    lengths, long, patched = list[int](), list[str](), list[str]()
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), 1):
            if re.search(r"monkeypatch\.setattr\([^,]+, \"[A-Z_]+\"", line):
                patched.append(source.place(number, line))
        for node in ast.walk(source.tree):
            if isinstance(node, Function) and node.name.startswith("test_"):
                lengths.append(node.name.count("_"))
                if lengths[-1] > 9:
                    long.append(source.place(node.lineno, node.name))
    return {
        "words in a test's name, on average": Measure(sum(lengths) / len(lengths), 6),
        "tests whose names have more than nine words": Measure(len(long), 20, long),
        "module constants that tests patch": Measure(len(patched), 10, patched),
    }


def measure_commands() -> dict[str, Measure]:
    """Count the modules that each light command loads in an empty folder."""
    measures = {}
    with tempfile.TemporaryDirectory() as folder:
        for words in LIGHT_COMMANDS:
            command = [sys.executable, "-X", "importtime", "-m", "trahiv_cli", *words.split()]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, input="")
            loaded = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
            measures[f"modules loaded by trahiv {words}"] = Measure(len(loaded), 400)
    return measures


def main() -> None:
    """Print all measures; exit with 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--show", default="-", help="list the places of the measures that begin with this")
    show = parser.parse_args().show
    sources = read(PACKAGE)
    measures = {
        **measure_size(sources),
        **measure_habits(sources),
        **measure_prose("prose", passages_of_code(sources)),
        **measure_prose("messages", passages_of_messages(sources)),
        **measure_prose("pages", passages_of_pages()),
        **measure_tests(read(TESTS)),
        **measure_commands(),
    }
    exceeded = []
    for name, one in measures.items():
        limit = LIMITS.get(name, one.goal)
        print(f"{round(one.value, 2):>10,} (limit {limit:,}, goal {one.goal:,})  {name}")
        exceeded += [name] if round(one.value, 2) > limit else []
        if name.startswith(show):
            print(*(f"{'':>12}{place}" for place in one.places), sep="\n")
    if exceeded:
        sys.exit(f"Over their limits (`scripts/measure.py --show NAME` lists the places): {exceeded}")


if __name__ == "__main__":
    main()
