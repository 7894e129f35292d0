"""Says how large the house is: figures to look at, not limits."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def count(folder: str) -> None:
    """Print the figures of one folder, and what is largest in it."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in sorted((ROOT / folder).rglob("*.py"))}
    nodes = [(file, node) for file, text in texts.items() for node in ast.walk(ast.parse(text))]
    functions = [node.name for _, node in nodes if isinstance(node, FUNCTION)]
    private = sum(name.startswith("_") and not name.startswith("__") for name in functions)
    files = {file: len(text.splitlines()) for file, text in texts.items()}
    share = f"{private / len(functions):.0%} of {len(functions):,} functions private"
    print(f"{folder}: {sum(files.values()):,} lines in {len(files)} files, {share}")
    sizes = {"file": files}
    for what, kind in (("class", ast.ClassDef), ("function", FUNCTION)):
        of_kind = [(f"{file}:{node.name}", node) for file, node in nodes if isinstance(node, kind)]
        sizes[what] = {name: node.end_lineno - node.lineno + 1 for name, node in of_kind}
    for what, lines in sizes.items():
        largest = sorted(lines, key=lines.__getitem__, reverse=True)[:3]
        print(f"  largest {what}: " + ", ".join(f"{name} {lines[name]}" for name in largest))


for each in ("trahiv_cli", "tests", "benchmarks"):
    count(each)
