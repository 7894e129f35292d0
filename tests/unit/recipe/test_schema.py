"""The schema agrees with upstream, with other tools' names, and with the JSON schema for editors."""

import contextlib
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
from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import dotted, read_document
from trahiv_cli.recipe.foreign import FOREIGN, FOREIGN_CHOICES, REFUSED_CHOICES
from trahiv_cli.recipe.load import load_recipe
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
    assert set(CONFIG_MAPPING) <= model_types() and "lama" not in model_types()


@pytest.mark.parametrize(
    ("template", "is_right"),
    [
        *((CHATML, True), (CHATML_MARKED, True), ("{% for x in messages %}{% break %}{% endfor %}", True)),
        *(("{{ strftime_now('%d') }}", True), ("{{ x", False), ("{% if x %}", False), ("{% foo %}", False)),
        *(("{%+ generation -%}{{ x }}{% endgeneration %}", True), ("{% generation %}", False)),
        ("{{" + "(" * 5000, False),
    ],
)
def test_template_check_matches_transformers(template, is_right):
    assert bool(mistake_in(template)) is not is_right
    with contextlib.nullcontext() if is_right else pytest.raises(Exception, match=r".*"):
        _compile_jinja_template(template)


def test_foreign_name_hints_at_ours():
    for field, refused in REFUSED_CHOICES.items():
        instead = {word for _, hint in refused.values() for word in hint.split("`")[1::2] if ":" not in word}
        assert instead <= choices(field) and not refused.keys() & choices(field)
    ours = choices("task") | choices("hivemind_config.opt.load_state_compression")
    assert set(FOREIGN_CHOICES.values()) <= ours and not FOREIGN_CHOICES.keys() & ours
    sections = sections_of_a_recipe()
    places = {dotted((*home, field)) for home, fields in sections.items() for field in fields}
    for key, here in FOREIGN.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe("quickstart", [f"{key}=1"])
        assert caught.value.findings[0].hint.endswith(here.removeprefix("nothing: "))
        words = (word.partition(":")[0] for word in here.split("`")[1::2])
        assert {word for word in words if "." in word and not word.startswith(".")} <= places


RIGHT = [
    *("task: clm", "{task: dpo, clm: null, dpo: {}}", "swarm: {solo: after 2.5 seconds}"),
    "swarm: {norm_limit: 0}",
]
WRONG = [
    *("base_model: x", "version: 2", "clm: {max_length: many}", "quantization: {load_in_4bit: 1}"),
    *("{task: dpo, clm: null, dpo: {packing: true}}", "swarm: {solo: after 300 s}"),
]


def test_schema_accepts_same_as_loader():
    jsonschema.Draft7Validator.check_schema(schema := recipe_schema())
    assert not [word for word in ("$defs", "prefixItems", "dependent") if word in json.dumps(schema)]
    training = schema["definitions"]["TrainingSection"]["properties"]
    assert training["save_steps"]["default"] == 100
    assert training["max_steps"]["description"].startswith("The run ends here.")
    validator = jsonschema.Draft7Validator(schema)
    recipes = {name: read_document(file.read_text(), name).data for name, file in builtin_recipes().items()}
    assert all(map(validator.is_valid, recipes.values()))
    for change in (*RIGHT, *WRONG):
        is_right = validator.is_valid(recipes["quickstart"] | yaml.safe_load(change))
        assert is_right is (change in RIGHT), change
