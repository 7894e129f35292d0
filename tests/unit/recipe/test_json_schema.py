"""The JSON Schema is draft-07 and agrees with the loader about the recipes we ship."""

import json

import jsonschema
import yaml

from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import read_document
from trahiv_cli.recipe.json_schema import recipe_schema


def test_the_schema_is_draft_07_with_defaults_and_descriptions_and_no_word_beside_a_reference():
    def nodes(node):
        yield node
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from nodes(child)

    schema = recipe_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    later = ("$defs", "prefixItems", "unevaluated", "dependent")
    assert not [word for word in later if word in json.dumps(schema)]
    references = [node for node in nodes(schema) if isinstance(node, dict) and "$ref" in node]
    assert references and all(len(node) == 1 for node in references)
    training = schema["definitions"]["TrainingSection"]["properties"]
    assert training["save_steps"]["default"] == 100
    assert training["max_steps"]["description"].startswith("The run ends here.")


def builtin(name):
    return read_document(builtin_recipes()[name].read_text(), name).data


RIGHT = """
task: clm
{task: sft, clm: null}
{task: dpo, clm: null, dpo: {}}
swarm: {solo: after 2.5 seconds}
swarm: {norm_limit: 0}
"""
WRONG = """
base_model: x
task: sft
sft: {}
version: 2
clm: {max_length: many}
quantization: {load_in_4bit: 1}
{task: dpo, clm: null, dpo: {packing: true}}
swarm: {solo: after 300 s}
swarm: {norm_limit: 1}
"""


def test_the_schema_takes_what_the_loader_takes():
    validator = jsonschema.Draft7Validator(recipe_schema())
    assert all(validator.is_valid(builtin(name)) for name in builtin_recipes())
    for changes, is_right in ((RIGHT, True), (WRONG, False)):
        for change in changes.strip().splitlines():
            assert validator.is_valid(builtin("quickstart") | yaml.safe_load(change)) is is_right, change
