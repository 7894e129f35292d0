"""Recipes and files that several tests of recipes begin with."""

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import AgreedRun, resolve
from trahiv_cli.recipe.load import load_recipe

LOADED = ("model.config=", "model.model_name_or_path=owner/model")
"""Changes of a recipe to a model on the hub."""


def quickstart(*overrides):
    return load_recipe("quickstart", overrides).recipe


def of_task(task):
    """Return the changes of the quickstart to another task."""
    needed = {"seq-cls": ["seq_cls.labels=[no, yes]"], "grpo": ["grpo.rewards=number"]}
    return ["clm=", f"task={task}", *needed.get(task, [])]


def run_of(*overrides):
    return AgreedRun.of(quickstart(*overrides))


def error_of(function, *arguments):
    """Return the error that a function raises about a recipe."""
    with pytest.raises(RecipeError) as caught:
        function(*arguments)
    return caught.value


def of_file(path, *overrides):
    """Resolve the quickstart, trained on a file."""
    return resolve(quickstart(f"data.datasets.0.path={path}", *overrides))
