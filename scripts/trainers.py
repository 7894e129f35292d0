"""Train each trainer of docs/trainers.md in a swarm, and write the table of that page.

    .venv/bin/python scripts/trainers.py

It takes 40 minutes on two cores, and fails if a trainer does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/trainers.md"
TESTS = (
    "test_one_peer_equals_trainer_alone",
    "test_two_peers_equal_a_larger_batch",
    "test_late_and_interrupted_peer_ends_equal",
    "test_launched_row_ends_equal",
)


def outcomes() -> dict[str, dict[str, bool]]:
    """Run the tests; return by row and test whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "tests/swarm/test_trainers.py", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"TRAHIV_ALL_ROWS": "1"}, check=False)
        found: dict[str, dict[str, bool]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            test, _, row = case.attrib["name"].removesuffix("]").partition("[")
            found.setdefault(row, {})[test] = not case.findall("failure") + case.findall("error")
        return found


def main() -> int:
    """Write the table; return 1 if a test failed."""
    found = outcomes()
    page = PAGE.read_text()
    rows = [
        f"| {row} | "
        + " | ".join({True: "✔", False: "✘", None: "–"}[passed.get(test)] for test in TESTS)
        + " |"
        for row, passed in found.items()
    ]
    written = re.sub(r"(\| ---.*\n)(\|.*\n)+", lambda head: head[1] + "\n".join(rows) + "\n", page, count=1)
    PAGE.write_text(written)
    return not all(all(passed.values()) for passed in found.values())


if __name__ == "__main__":
    sys.exit(main())
