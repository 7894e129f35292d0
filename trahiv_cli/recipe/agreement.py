"""The agreement: the part of a recipe that all peers share; its canonical form and fingerprint; the run id.

A mark in the schema excludes a field from it (`schema.Own`). Local paths never leave this machine: other
peers see `local:` and the file's name. Local data is identified by its content (`content.py`); its name is
only for people.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Self

from trahiv_cli.recipe.content import read_contents
from trahiv_cli.recipe.document import Location, dotted, leaves
from trahiv_cli.recipe.paths import LOCAL, is_own_reward, local_name
from trahiv_cli.recipe.schema import Recipe, marks_of
from trahiv_cli.recipe.section import OWN

Differences = tuple[tuple[str, object, object], ...]


@dataclass(frozen=True)
class AgreedRun:
    """A run, as all of its peers agree on it.

    The command line makes one of the user's recipe, and `swarm/published_run.py` one of a swarm's recipe.
    """

    recipe: Recipe
    """This peer's own recipe, with `run_id` filled in."""

    run_id: str
    """The run's name in the DHT."""

    agreement: dict[str, Any]
    """The part of the recipe that all peers share, as plain data."""

    fingerprint: str
    """The SHA-256 of the agreement, hexadecimal."""

    @classmethod
    def of(cls, recipe: Recipe, run_id: str | None = None) -> Self:
        """Agree on a recipe; reads no file, so local data needs its `content` already.

        The recipe's own `run_id` goes before the one given here. The default is the recipe's name and 8
        digits of the hash of the rest.
        """
        shared = without_own(recipe.to_data(), ())
        for key in ("model_name_or_path", "tokenizer_name_or_path"):
            shared["model"][key] = local_name(shared["model"][key])
        for dataset in shared["data"]["datasets"]:
            if (travelling := local_name(dataset["path"])) != dataset["path"]:
                dataset |= {"path": travelling, "data_files": None}  # its `content` identifies the data
        for reward in shared.get("grpo", {}).get("rewards", ()):
            reward["name"] = local_name(reward["name"]) if is_own_reward(reward["name"]) else reward["name"]
        opt = shared["hivemind_config"]["opt"]
        opt["run_id"] = opt["run_id"] or run_id or f"{recipe.name[:39]}-{fingerprint(shared)[:8]}"
        return cls(_renamed(recipe, opt["run_id"]), opt["run_id"], shared, fingerprint(shared))


def resolve(recipe: Recipe, run_id: str | None = None) -> AgreedRun:
    """Agree on a recipe with the content of its local data; raises the same errors as `read_contents`."""
    return AgreedRun.of(read_contents(recipe), run_id)


def canonical(obj: Any) -> bytes:
    """Serialize plain data for hashing: JSON in UTF-8, with sorted keys and without spaces.

    Whole floats are written as integers, so that `1` and `1.0` in a free-form section are equal.
    """
    return json.dumps(
        _whole(obj), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def fingerprint(agreement_dict: dict[str, Any]) -> str:
    """Return the SHA-256 (hexadecimal) of an agreement, maybe a stranger's, without names of local data."""
    return hashlib.sha256(canonical(_nameless(agreement_dict))).hexdigest()


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Differences:
    """List the differences of two agreements: dotted path, our value, their value; `None` for no value."""
    here = _by_path(ours)
    there = _by_path(theirs)
    nameless_here = _by_path(_nameless(ours))
    nameless_there = _by_path(_nameless(theirs))
    return tuple(
        (path, here.get(path), there.get(path))
        for path in sorted(nameless_here.keys() | nameless_there.keys())
        if canonical(nameless_here.get(path)) != canonical(nameless_there.get(path))
    )


def what_changed(earlier: AgreedRun, later: AgreedRun) -> tuple[list[str], list[str]]:
    """Find the changes to a recipe that make it another run.

    Another number of steps does not, nor does a `run_id` that is derived from the other fields.

    Returns:
        The dotted paths of changed fields, and the names of local data that was edited.
    """
    may_differ = {"training.max_steps"}
    edited = {}
    if all(AgreedRun.of(_renamed(run.recipe, None)).run_id == run.run_id for run in (earlier, later)):
        may_differ.add("hivemind_config.opt.run_id")
    datasets = zip(earlier.recipe.data.datasets, later.recipe.data.datasets, strict=False)
    for index, (before, after) in enumerate(datasets):
        is_same_name = local_name(before.path) == local_name(after.path)
        if before.content and after.content and before.content != after.content and is_same_name:
            edited[f"data.datasets.{index}.content"] = local_name(after.path).removeprefix(LOCAL)
    fields = [
        path
        for path, _, _ in differences(earlier.agreement, later.agreement)
        if path not in may_differ and path.rpartition(".")[0] not in edited
    ]
    return fields, list(edited.values())


def _by_path(shared: dict[str, Any]) -> dict[str, Any]:
    return {dotted(location): value for location, value in leaves(shared)}


def _renamed(recipe: Recipe, run_id: str | None) -> Recipe:
    config = recipe.hivemind_config.changed("opt", run_id=run_id)
    return recipe.model_copy(update={"hivemind_config": config})


def _nameless(shared: dict[str, Any]) -> dict[str, Any]:
    """Return an agreement, maybe a stranger's, without names that only people read.

    These are the names of local data whose content is known, of files of rewards (their functions count), and
    of model folders: `train/comparison.py` compares the models and tokenizers that were loaded from them.
    """
    nameless = copy.deepcopy(shared)
    for location, value in leaves(shared, is_deep=True):
        if isinstance(value, str) and value.startswith(LOCAL):
            match location:
                case ("model", str(key)):
                    nameless["model"][key] = LOCAL
                case ("grpo", "rewards", int(index), "name"):
                    nameless["grpo"]["rewards"][index]["name"] = LOCAL + value.rpartition(":")[2]
                case ("data", "datasets", int(index), "path"):
                    dataset = nameless["data"]["datasets"][index]
                    dataset["path"] = LOCAL if dataset.get("content") else value
    return nameless


def without_own(data: dict[str, Any], location: Location) -> dict[str, Any]:
    """Return the data of a recipe, or of its section at `location`, without fields that are a peer's own."""
    return {
        key: without_own(value, (*location, key)) if isinstance(value, dict) else value
        for key, value in data.items()
        if OWN not in marks_of((*location, key))
    }


def _whole(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: _whole(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [_whole(value) for value in obj]
    return int(obj) if isinstance(obj, float) and obj.is_integer() else obj
