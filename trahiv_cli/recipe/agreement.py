"""The part of a recipe that all peers share: its canonical form, its fingerprint, and what a run is called.

A field of the schema says itself whether it is in it (`schema.Own`). Local paths never travel: others see
`local:` and the file's name. Local data is what it holds (`content.py`), whatever it is called: the name is
only for people.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from trahiv_cli.recipe.content import read_contents
from trahiv_cli.recipe.document import Location, dotted, leaves
from trahiv_cli.recipe.paths import LOCAL, local_name
from trahiv_cli.recipe.schema import OWN, Recipe, marks_of

Differences = tuple[tuple[str, object, object], ...]

_RUN_ID = "hivemind_config.opt.run_id"


def agreement(recipe: Recipe) -> dict[str, Any]:
    """Return what every peer of the run must share, as plain data, with `run_id` filled in.

    Reads no file: of a recipe with local data it is only complete after `resolve` or `read_contents`.
    """
    shared = _shared(recipe)
    shared["hivemind_config"]["opt"]["run_id"] = run_id(recipe)
    return shared


def canonical(obj: Any) -> bytes:
    """Write plain data in the one form that is hashed: JSON in UTF-8, sorted, without spaces.

    Whole floats are written as integers, so that `1` and `1.0` in a free section are the same.
    """
    return json.dumps(
        _whole(obj), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def fingerprint(agreement_dict: dict[str, Any]) -> str:
    """Return an agreement's SHA-256 in hexadecimal; names of local data do not count. It may be anyone's."""
    return hashlib.sha256(canonical(_nameless(agreement_dict))).hexdigest()


def run_id(recipe: Recipe) -> str:
    """Return the run's name in the DHT: as given, or the recipe's name and 8 digits of its agreement."""
    given = recipe.hivemind_config.opt.run_id
    return given if given is not None else f"{recipe.name[:39]}-{fingerprint(_shared(recipe))[:8]}"


def resolve(recipe: Recipe) -> Recipe:
    """Return the recipe with its `run_id` and what its local data holds filled in; see `read_contents`."""
    return with_run_id(read_contents(recipe))


def with_run_id(recipe: Recipe) -> Recipe:
    """Return the recipe with its `run_id` filled in; reads no file."""
    return renamed(recipe, run_id(recipe))


def renamed(recipe: Recipe, name: str | None) -> Recipe:
    """Return the same recipe with another `run_id`, or with none."""
    config = recipe.hivemind_config
    named = config.model_copy(update={"opt": config.opt.model_copy(update={"run_id": name})})
    return recipe.model_copy(update={"hivemind_config": named})


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Differences:
    """List where two agreements differ: dotted path, our value, their value; `None` where there is none."""
    ours_named, theirs_named, ours_flat, theirs_flat = (
        {dotted(location): value for location, value in leaves(side)}
        for side in (ours, theirs, _nameless(ours), _nameless(theirs))
    )
    return tuple(
        (path, ours_named.get(path), theirs_named.get(path))
        for path in sorted({*ours_flat, *theirs_flat})
        if canonical(ours_flat.get(path)) != canonical(theirs_flat.get(path))
    )


def what_changed(earlier: Recipe, later: Recipe) -> tuple[list[str], list[str]]:
    """Tell what makes another run of a resolved recipe; more steps do not, nor a `run_id` made of the rest.

    Returns:
        Fields by their dotted paths, and the names of local data that was edited since.
    """
    may_differ = {"training.max_steps"}
    edited = {}
    if all(run_id(renamed(each, None)) == run_id(each) for each in (earlier, later)):
        may_differ.add(_RUN_ID)
    for index, (before, after) in enumerate(zip(earlier.data.datasets, later.data.datasets, strict=False)):
        is_same_name = local_name(before.path) == local_name(after.path)
        if before.content and after.content and before.content != after.content and is_same_name:
            edited[f"data.datasets.{index}.content"] = local_name(after.path).removeprefix(LOCAL)
    fields = [
        path
        for path, _, _ in differences(agreement(earlier), agreement(later))
        if path not in may_differ and path.rpartition(".")[0] not in edited
    ]
    return fields, list(edited.values())


def _shared(recipe: Recipe) -> dict[str, Any]:
    data = _without_own(recipe.to_data(), ())
    for key in ("model_name_or_path", "tokenizer_name_or_path"):
        data["model"][key] = local_name(data["model"][key])
    for dataset in data["data"]["datasets"]:
        if (travelling := local_name(dataset["path"])) != dataset["path"]:
            dataset |= {"path": travelling, "data_files": None}  # its `content` says which data it is
    return data


def _nameless(shared: dict[str, Any]) -> dict[str, Any]:
    """Return an agreement, maybe a stranger's, without names that only people read.

    These are of local data whose content is known, and of model folders, as `train/comparison.py` compares
    what was loaded from those.
    """
    nameless = copy.deepcopy(shared)
    model = nameless.get("model")
    named = [(model, key) for key in model] if isinstance(model, dict) else []
    data = nameless.get("data")
    datasets = data.get("datasets") if isinstance(data, dict) else None
    for dataset in datasets if isinstance(datasets, list) else ():
        if isinstance(dataset, dict) and dataset.get("content"):
            named.append((dataset, "path"))
    for section, key in named:
        if isinstance(value := section.get(key), str) and value.startswith(LOCAL):
            section[key] = LOCAL
    return nameless


def _without_own(data: dict[str, Any], location: Location) -> dict[str, Any]:
    return {
        key: _without_own(value, (*location, key)) if isinstance(value, dict) else value
        for key, value in data.items()
        if OWN not in marks_of((*location, key))
    }


def _whole(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: _whole(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [_whole(value) for value in obj]
    return int(obj) if isinstance(obj, float) and obj.is_integer() else obj
