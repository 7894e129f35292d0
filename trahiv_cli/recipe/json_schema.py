"""The recipe's JSON Schema, for editors: draft-07, which is what their YAML language server reads."""

from __future__ import annotations

from typing import Any

from trahiv_cli.recipe.schema import TASK_SECTIONS, Recipe

TITLE = "trahiv recipe"


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft-07) of a recipe, with the defaults and descriptions of its fields."""
    schema = _draft_07(Recipe.model_json_schema())
    schema["required"].remove("name")  # the file's name stands in for it
    schema["title"] = TITLE
    schema["allOf"] = []
    for task, section in TASK_SECTIONS.items():  # a section that is there wants its task
        is_there = {"required": [section], "properties": {section: {"type": "object"}}}
        is_default = task == Recipe.model_fields["task"].default
        has_task = {"properties": {"task": {"const": task}}} | ({} if is_default else {"required": ["task"]})
        schema["allOf"].append({"if": is_there, "then": has_task})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _draft_07(node: Any) -> Any:
    """Rewrite what draft 2020-12 says otherwise: `$defs`, and words beside a `$ref`, which 07 ignores."""
    if isinstance(node, list):
        return [_draft_07(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {("definitions" if key == "$defs" else key): _draft_07(value) for key, value in node.items()}
    if isinstance(node.get("$ref"), str):
        node["$ref"] = node["$ref"].replace("#/$defs/", "#/definitions/")
        if len(node) > 1:
            node["allOf"] = [{"$ref": node.pop("$ref")}]
    return node
