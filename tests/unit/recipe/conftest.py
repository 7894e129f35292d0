"""Recipes and files that several tests of recipes begin with."""

from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe

LOADED = ("model.config=", "model.model_name_or_path=owner/model")
"""Changes of a recipe to a model on the hub."""


def quickstart(*overrides):
    return load_recipe("quickstart", overrides).recipe


def of_file(path, *overrides):
    """Resolve the quickstart, trained on a file."""
    return resolve(quickstart(f"data.datasets.0.path={path}", *overrides))
