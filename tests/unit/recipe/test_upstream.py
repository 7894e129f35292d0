"""What is known of installed libraries without importing them agrees with what they say of themselves."""

import contextlib
from typing import get_args

import pytest
from transformers import CONFIG_MAPPING
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.kit.stand_ins import CHATML, CHATML_MARKED
from trahiv_cli.recipe import upstream
from trahiv_cli.recipe.schema import TrackerName
from trahiv_cli.recipe.upstream import mistake_in


def test_every_model_type_of_transformers_is_known():
    assert set(CONFIG_MAPPING) <= upstream.model_types()
    assert "lama" not in upstream.model_types()


def test_the_trackers_are_those_of_transformers():
    assert set(get_args(TrackerName)) == {"all", "none", *INTEGRATION_TO_CALLBACK}


@pytest.mark.parametrize(
    ("template", "is_right"),
    [
        *((CHATML, True), (CHATML_MARKED, True), ("{% for x in messages %}{% break %}{% endfor %}", True)),
        *(("{{ strftime_now('%d') }}", True), ("{{ x", False), ("{% if x %}", False), ("{% foo %}", False)),
        *(("{%+ generation -%}{{ x }}{% endgeneration %}", True), ("{% generation %}", False)),
        ("{{" + "(" * 5000, False),
    ],
)
def test_a_template_has_a_mistake_where_transformers_does_not_read_it(template, is_right):
    assert bool(mistake_in(template)) is not is_right
    with contextlib.nullcontext() if is_right else pytest.raises(Exception, match=r".*"):
        _compile_jinja_template(template)
