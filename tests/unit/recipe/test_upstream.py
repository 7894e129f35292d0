"""What is known of installed libraries without importing them agrees with what they say of themselves."""

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


def test_nothing_is_said_of_model_types_where_transformers_looks_otherwise(monkeypatch):
    monkeypatch.setattr(upstream, "_MAPPINGS", ("__init__.py",))
    upstream.model_types.cache_clear()
    assert upstream.model_types() == frozenset()
    upstream.model_types.cache_clear()


def test_the_trackers_are_those_of_transformers():
    assert set(get_args(TrackerName)) == {"all", "none", *INTEGRATION_TO_CALLBACK}


def test_a_tracker_is_lacking_if_nothing_that_it_imports_is_there():
    assert not upstream.lacks_tracker("tensorboard")
    assert upstream.lacks_tracker("neptune")
    assert not upstream.lacks_tracker("kubeflow")  # settings decide, which only transformers knows


@pytest.mark.parametrize(
    "template",
    [CHATML, CHATML_MARKED, "{% for x in messages %}{% break %}{% endfor %}", "{{ strftime_now('%d') }}"],
)
def test_a_template_that_transformers_reads_has_no_mistake(template):
    _compile_jinja_template(template)
    assert mistake_in(template) == ""


@pytest.mark.parametrize(
    "template", ["{{ x", "{% if x %}", "{% generation %}", "{% foo %}", "{{" + "(" * 5000]
)
def test_a_template_that_it_does_not_read_has_one(template):
    assert mistake_in(template)
    with pytest.raises(Exception, match=r".*"):
        _compile_jinja_template(template)
