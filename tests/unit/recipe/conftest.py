"""Recipes and files that several tests of recipes begin with."""

import pytest

from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Write files below the working directory: path -> text; returns that folder."""
    monkeypatch.chdir(tmp_path)

    def put(texts):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return put


@pytest.fixture
def of_file():
    """`of_file(path, *overrides)`: the resolved quickstart, trained on a file."""
    return lambda path, *overrides: resolve(
        load_recipe("quickstart", [f"data.datasets.0.path={path}", *overrides]).recipe
    )
