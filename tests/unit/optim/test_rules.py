"""What rounds are judged by when nothing is said, in a recipe or in a script."""

import dataclasses

import pytest

from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.schema import SwarmSection


def test_the_defaults_are_those_of_a_recipe():
    section = SwarmSection()
    assert RoundRules() == RoundRules(section.solo_after_s, section.norm_limit, section.robust_mean)


def test_rules_do_not_change_within_a_run():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoundRules().norm_limit = 0.0
