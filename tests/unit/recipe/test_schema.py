"""The schema agrees with upstream, with other tools' names, and with the JSON schema for editors."""

import json
from typing import get_args

import jsonschema
import pytest
import yaml
from transformers import CONFIG_MAPPING, SchedulerType
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.kit.stand_ins import CHATML, CHATML_MARKED
from tests.unit.recipe.conftest import error_of, quickstart
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import dotted, read_document
from trahiv_cli.recipe.foreign import FOREIGN, FOREIGN_CHOICES, REFUSED_CHOICES
from trahiv_cli.recipe.schema import TrackerName, recipe_schema, sections_of_a_recipe
from trahiv_cli.recipe.upstream import mistake_in, model_types


def choices(field):
    *section, name = field.split(".")
    annotation = sections_of_a_recipe()[tuple(section)][name].annotation
    return {choice for part in get_args(annotation) for choice in get_args(part) or [part]} - {type(None)}


def test_choices_match_transformers():
    assert choices("training.optim") <= {name.value for name in OptimizerNames}
    followers = {"reduce_lr_on_plateau", "greedy"}
    assert choices("training.lr_scheduler_type") == {name.value for name in SchedulerType} - followers
    assert set(get_args(TrackerName)) == {"all", "none", *INTEGRATION_TO_CALLBACK}
    assert set(CONFIG_MAPPING) <= model_types()
    assert "lama" not in model_types()


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHATML_MARKED,
        "{% for x in messages %}{% break %}{% endfor %}",
        "{{ strftime_now('%d') }}",
        "{%+ generation -%}{{ x }}{% endgeneration %}",
    ],
)
def test_accepted_template_is_right(template):
    assert mistake_in(template) == ""
    _compile_jinja_template(template)


@pytest.mark.parametrize(
    "template", ["{{ x", "{% if x %}", "{% foo %}", "{% generation %}", "{{" + "(" * 5000]
)
def test_refused_template_is_mistake(template):
    assert mistake_in(template)
    with pytest.raises(Exception, match=r".*"):
        _compile_jinja_template(template)


def test_refused_choice_hints_at_known_one():
    for field, refused in REFUSED_CHOICES.items():
        instead = {word for _, hint in refused.values() for word in hint.split("`")[1::2] if ":" not in word}
        assert instead <= choices(field)
        assert not refused.keys() & choices(field)


def test_foreign_choice_hints_at_ours():
    ours = choices("task") | choices("hivemind_config.opt.load_state_compression")
    assert set(FOREIGN_CHOICES.values()) <= ours
    assert not FOREIGN_CHOICES.keys() & ours


def test_foreign_name_hints_at_ours():
    sections = sections_of_a_recipe()
    places = {dotted((*home, field)) for home, fields in sections.items() for field in fields}
    for key, here in FOREIGN.items():
        (found,) = error_of(quickstart, f"{key}=1").findings
        assert found.hint.endswith(here.removeprefix("nothing: "))
        words = (word.partition(":")[0] for word in here.split("`")[1::2])
        assert {word for word in words if "." in word and not word.startswith(".")} <= places


SCHEMA = recipe_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
RECIPES = {name: read_document(file.read_text(), name).data for name, file in builtin_recipes().items()}


def test_schema_is_plain_draft_7():
    VALIDATOR.check_schema(SCHEMA)
    assert not [word for word in ("$defs", "prefixItems", "dependent") if word in json.dumps(SCHEMA)]


def test_schema_explains_fields():
    training = SCHEMA["definitions"]["TrainingSection"]["properties"]
    assert training["save_steps"]["default"] == 100
    assert training["max_steps"]["description"].startswith("The run ends here.")


def test_builtin_recipes_fit_schema():
    assert all(map(VALIDATOR.is_valid, RECIPES.values()))


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ("{task: dpo, clm: null, dpo: {}}", True),
        ("swarm: {solo: after 2.5 seconds}", True),
        ("swarm: {norm_limit: 0}", True),
        ("base_model: x", False),
        ("version: 2", False),
        ("clm: {max_length: many}", False),
        ("quantization: {load_in_4bit: 1}", False),
        ("{task: dpo, clm: null, dpo: {packing: true}}", False),
        ("swarm: {solo: after 300 s}", False),
    ],
)
def test_schema_accepts_same_as_loader(change, is_right):
    assert VALIDATOR.is_valid(RECIPES["quickstart"] | yaml.safe_load(change)) is is_right
