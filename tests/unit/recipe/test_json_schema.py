"""The JSON Schema is draft-07 and agrees with the loader about the recipes we ship."""

import json

import jsonschema
import pytest
import yaml

from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import read_document
from trahiv_cli.recipe.json_schema import recipe_schema


def test_the_schema_is_valid_draft_07_and_has_no_later_words():
    schema = recipe_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    text = json.dumps(schema)
    assert not [word for word in ("$defs", "prefixItems", "unevaluated", "dependent") if word in text]


def test_no_word_stands_beside_a_reference():
    def nodes(node):
        yield node
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from nodes(child)

    references = [node for node in nodes(recipe_schema()) if isinstance(node, dict) and "$ref" in node]
    assert references
    assert all(len(node) == 1 for node in references)


def test_defaults_and_descriptions_are_kept():
    training = recipe_schema()["definitions"]["TrainingSection"]["properties"]
    assert training["save_steps"]["default"] == 100
    assert training["max_steps"]["description"].startswith("The run ends here.")


def quickstart():
    file = builtin_recipes()["quickstart"]
    return read_document(file.read_text(), file.name).data


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_builtin_recipe_is_valid(name):
    file = builtin_recipes()[name]
    jsonschema.validate(read_document(file.read_text(), file.name).data, recipe_schema())


@pytest.mark.parametrize(
    "change",
    [
        *("task: clm", "{task: sft, clm: null}", "{task: dpo, clm: null, dpo: {}}"),
        *("swarm: {solo: never, norm_limit: 0}", "swarm: {solo: always, norm_limit: 1.5}"),
        *("swarm: {solo: after 1 second}", "swarm: {solo: after 2.5 seconds}"),
    ],
)
def test_the_schema_takes_what_the_loader_takes(change):
    jsonschema.validate(quickstart() | yaml.safe_load(change), recipe_schema())


@pytest.mark.parametrize(
    "mistake",
    [
        *("base_model: x", "task: sft", "task: seq_cls", "sft: {}", "version: 2", "clm: {max_length: many}"),
        *("quantization: {load_in_4bit: 1}", "{task: dpo, clm: null, dpo: {packing: true}}"),
        *("swarm: {solo: 300}", "swarm: {solo: after 300 s}"),
        *("swarm: {norm_limit: 1}", "swarm: {norm_limit: -1}"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(mistake):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(quickstart() | yaml.safe_load(mistake), recipe_schema())
