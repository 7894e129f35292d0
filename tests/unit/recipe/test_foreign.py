"""Every word that another tool knows is answered: with ours, or with a reason."""

from typing import get_args

import pytest
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.document import dotted
from trahiv_cli.recipe.foreign import FOREIGN, FOREIGN_CHOICES, REFUSED_CHOICES
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import sections_of_a_recipe

UPSTREAM = {"training.optim": OptimizerNames, "training.lr_scheduler_type": SchedulerType}


def finding_of(**more):
    """Return the only finding in a recipe that is right but for `more`."""
    data = {
        "name": "test",
        "model": {"model_name_or_path": "owner/model"},
        "data": {"datasets": [{"path": "owner/data"}]},
        "training": {"max_steps": 1},
    }
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data | more, "test")
    (finding,) = caught.value.findings
    return finding


def ours(field):
    """Return the choices of a field."""
    *section, name = field.split(".")
    annotation = sections_of_a_recipe()[tuple(section)][name].annotation
    return {choice for part in get_args(annotation) for choice in get_args(part) or [part]} - {type(None)}


@pytest.mark.parametrize("field", UPSTREAM)
def test_every_choice_of_transformers_is_ours_or_refused_with_a_reason(field):
    assert ours(field) | set(REFUSED_CHOICES[field]) == {name.value for name in UPSTREAM[field]}
    assert not ours(field) & set(REFUSED_CHOICES[field])


def test_a_refused_choice_is_told_the_reason_and_one_that_can_be_had():
    choices = {choice for field in REFUSED_CHOICES for choice in ours(field)} | {"peft"}
    for field, refused in REFUSED_CHOICES.items():
        section, *inner, name = field.split(".")
        for choice, (reason, instead) in refused.items():
            said = {inner[0]: {name: choice}} if inner else {"max_steps": 1, name: choice}
            finding = finding_of(**{section: said})
            assert finding.message == f"{choice!r} can't work in a swarm: {reason}"
            assert finding.hint == instead
            assert {word for word in instead.split("`")[1::2] if " " not in word} <= choices


def test_a_foreign_name_or_choice_leads_to_one_of_ours():
    for field, meant in FOREIGN_CHOICES.items():
        assert set(meant.values()) <= ours(field) and not meant.keys() & ours(field)
    sections = sections_of_a_recipe()
    places = {dotted((*home, field)) for home, fields in sections.items() for field in fields}
    for key, here in FOREIGN.items():
        assert finding_of(**{key: 1}).hint == f"other tools call it `{key}`; here it is {here}"
        words = (word.partition(":")[0] for word in here.split("`")[1::2])
        assert {word for word in words if "." in word and not word.startswith(".")} <= places
