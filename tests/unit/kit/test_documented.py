"""How commands are found in a page, and how an output is compared with what the page shows."""

import pytest

from tests.kit.documented import Shown, looks_like, shown_in

PAGE = """
```bash
trahiv watch     # a page
# nothing
trahiv  kick PEER
```
```console
alice$ trahiv status
one line
another
bob$ trahiv join --peer trahiv1:mR0k...
```
```python
print("trahiv new")
```
"""


def test_bash_and_prompt_lines_are_commands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert shown_in(page) == [
        Shown("page.md", "trahiv watch"),
        Shown("page.md", "trahiv kick PEER"),
        Shown("page.md", "trahiv status", "one line\nanother\n"),
        Shown("page.md", "trahiv join --peer trahiv1:..."),
    ]


@pytest.mark.parametrize(
    ("output", "shown", "is_like"),
    [
        ("step 12, loss 5.1, peers 2", "step 3, loss 0.25, peers 8", True),
        ("run parrot-0123abcd, peer QmAb", "run parrot-4f0c1d2e, peer QmXk...", True),
        ("first\nlast\n", "...\nfirst\n...\nlast\n...\n", True),  # alone, dots may stand for nothing
        ("peers 2. Took over.\nstep 1", "peers 2. ...\nstep 4", True),
        ("a  b\n c", "a b\nc", True),
        ("a b", "a c", False),
        ("a b and more", "a b", False),
        ("ab", "a b", False),
    ],
)
def test_output_matches_despite_ids_and_numbers(output, shown, is_like):
    assert looks_like(output, shown) is is_like
