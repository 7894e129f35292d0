"""The part of a recipe that all peers share: its canonical form, its fingerprint, and what a run is called.

A field of the schema says itself whether it is in it (`schema.Own`). Local paths never travel: others see
`local:` and the file's name. Local data is what it holds (`content.py`), whatever it is called: the name is
only for people.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trahiv_cli.recipe.content import read_contents
from trahiv_cli.recipe.document import Location, dotted, leaves
from trahiv_cli.recipe.paths import LOCAL, local_name
from trahiv_cli.recipe.schema import OWN, Recipe, marks_of

Differences = tuple[tuple[str, object, object], ...]


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
    """Return the SHA-256 of an agreement's canonical form, in hexadecimal.

    Args:
        agreement_dict: as from `agreement`, or a stranger's plain data; names of local data do not count.
    """
    return hashlib.sha256(canonical(_nameless(agreement_dict))).hexdigest()


def run_id(recipe: Recipe) -> str:
    """Return the run's name in the DHT: as given, or the recipe's name and 8 digits of its agreement."""
    given = recipe.hivemind_config.opt.run_id
    if given is not None:
        return given
    return f"{recipe.name[:39]}-{fingerprint(_shared(recipe))[:8]}"


def resolve(recipe: Recipe) -> Recipe:
    """Return the same recipe with its `run_id` and what its local data holds filled in.

    Raises:
        AssetError, RecipeMismatch: see `read_contents`.
    """
    return with_run_id(read_contents(recipe))


def with_run_id(recipe: Recipe) -> Recipe:
    """Return the same recipe with its `run_id` filled in; reads no file."""
    return renamed(recipe, run_id(recipe))


def renamed(recipe: Recipe, name: str | None) -> Recipe:
    """Return the same recipe with another `run_id`, or with none."""
    opt = recipe.hivemind_config.opt.model_copy(update={"run_id": name})
    hivemind_config = recipe.hivemind_config.model_copy(update={"opt": opt})
    return recipe.model_copy(update={"hivemind_config": hivemind_config})


def is_named_by_agreement(recipe: Recipe) -> bool:
    """Tell whether a recipe with its `run_id` filled in has the one that it gets where none is given."""
    return run_id(renamed(recipe, None)) == recipe.hivemind_config.opt.run_id


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
    """Tell what makes another run of a recipe; both must have their `run_id` and `content` filled in.

    More steps do not, nor a `run_id` that only follows from the rest.

    Returns:
        Fields by their dotted paths, and the names of local data that was edited: it has the same name in
        both, and holds something else.
    """
    may_differ = {"training.max_steps"}
    if is_named_by_agreement(earlier) and is_named_by_agreement(later):
        may_differ.add("hivemind_config.opt.run_id")
    edited = {
        f"data.datasets.{index}.content": local_name(after.path).removeprefix(LOCAL)
        for index, (before, after) in enumerate(zip(earlier.data.datasets, later.data.datasets, strict=False))
        if before.content
        and after.content
        and before.content != after.content
        and local_name(before.path) == local_name(after.path)
    }
    fields = [
        path
        for path, _, _ in differences(agreement(earlier), agreement(later))
        if path not in may_differ and path.rpartition(".")[0] not in edited
    ]
    return fields, list(edited.values())


def datasets_in(shared: dict[str, Any]) -> list[Any]:
    """Return the datasets of an agreement, which may be anyone's; nothing if it has no list of them."""
    data = shared.get("data")
    datasets = data.get("datasets") if isinstance(data, dict) else None
    return datasets if isinstance(datasets, list) else []


def _shared(recipe: Recipe) -> dict[str, Any]:
    data = recipe.to_data()
    _drop_own(data, ())
    for key in ("model_name_or_path", "tokenizer_name_or_path"):
        data["model"][key] = local_name(data["model"][key])
    for dataset in data["data"]["datasets"]:
        travelling = local_name(dataset["path"])
        if travelling != dataset["path"]:
            files = None if "content" in dataset else dataset["data_files"]
            if isinstance(files, list):
                dataset["data_files"] = [local_name(file, always=True) for file in files]
            else:
                dataset["data_files"] = local_name(files, always=True)
        dataset["path"] = travelling
    return data


def _nameless(shared: dict[str, Any]) -> dict[str, Any]:
    """Return an agreement without names that only people read; `shared` may be anyone's.

    These are names of local data whose content is known, and of local model folders: peers compare what
    they loaded from those (`assets/likeness.py`).
    """
    data, model, nameless = shared.get("data"), shared.get("model"), dict(shared)

    def without_local_name(value: Any) -> Any:
        return LOCAL if isinstance(value, str) and value.startswith(LOCAL) else value

    if isinstance(data, dict) and isinstance(data.get("datasets"), list):
        datasets = [
            {**dataset, "path": without_local_name(dataset["path"])}
            if isinstance(dataset, dict) and dataset.get("content") is not None and "path" in dataset
            else dataset
            for dataset in data["datasets"]
        ]
        nameless["data"] = {**data, "datasets": datasets}
    if isinstance(model, dict):
        nameless["model"] = {key: without_local_name(value) for key, value in model.items()}
    return nameless


def _drop_own(data: dict[str, Any], location: Location) -> None:
    for key in list(data):
        here = (*location, key)
        if OWN in marks_of(here):
            del data[key]
        elif isinstance(data[key], dict):
            _drop_own(data[key], here)


def _whole(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: _whole(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [_whole(value) for value in obj]
    return int(obj) if isinstance(obj, float) and obj.is_integer() else obj
