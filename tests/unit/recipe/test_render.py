"""What `show` prints loads again as the same data."""

import pytest

from trahiv_cli.recipe.document import read_document, render


@pytest.mark.parametrize(
    "data",
    [
        {"a": 1, "b": {"c": None, "d": {}}, "e": [], "f": [1, "x"], "g": 1e-8, "h": 1e18, "i": -3},
        {
            "texts": {
                "a": "true",
                "b": "x: y",
                "c": "#x",
                "d": "",
                "e": "2e-4",
                "f": " x ",
                "g": "a\nb",
                "h": "\u00e9",
            }
        },
        {"keys": {"true": 1, "a: b": 2, "#": 3}},
        {"list": [{"a": 1, "b": {"c": [{"d": 1}, {"d": 2}]}}, {"b": {"c": 1}}, "word", {}], "after": 1},
    ],
)
def test_rendered_data_reads_as_itself(data):
    text = "\n".join(f"{line}  # from somewhere" for line, _ in render(data))
    assert read_document(text, "x.yaml").data == data
