"""Commands about recipes: `new`, `check`, `show`, `schema`. Only `check --deep` loads torch or uses a hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.options import RECIPE, SetOption, argument, option
from trahiv_cli.cli.output import FormatOption, out
from trahiv_cli.errors import AssetError, Finding, RecipeError, SetupError

if TYPE_CHECKING:
    from trahiv_cli.recipe.agreement import AgreedRun
    from trahiv_cli.recipe.document import Document
    from trahiv_cli.recipe.schema import Recipe

UNKNOWN = "depends on the data"


def new(
    name: Annotated[str | None, argument("NAME", "A built-in recipe. Without it, all are listed.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write to FILE. Default: NAME.yaml."),
    ] = None,
    force: Annotated[bool, option("--force", "Overwrite FILE if it exists.")] = False,
) -> None:
    """Write a commented recipe to start from."""
    from trahiv_cli.recipe.builtin import builtin_recipes
    from trahiv_cli.recipe.paths import closest

    builtin = builtin_recipes()
    if name is None:
        width = max(map(len, builtin), default=0)
        for known, path in builtin.items():
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            out.data(f"{known:<{width}}  {first.removeprefix('#').strip()}")
        return
    if name not in builtin:
        near = closest(name, builtin)
        hint = f"did you mean `trahiv new {near}`? " if near else ""
        hint += f"built-in recipes: {', '.join(builtin)}"
        raise RecipeError(f"there is no built-in recipe {name!r}", hint)
    file = output or Path(f"{name}.yaml")
    try:
        with file.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(builtin[name].read_text(encoding="utf-8"))
    except FileExistsError:
        hint = "choose another name with `-o`, or `--force`"
        raise RecipeError(f"{file} exists; nothing was written", hint) from None
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be written: {error.strerror}") from None
    out.say(f"wrote {file}")
    out.hint(f"`trahiv check {file}` after you changed it; `trahiv schema` is for your editor")


def check(
    recipe: Annotated[str, RECIPE],
    deep: Annotated[
        bool,
        option("--deep", "Also load the tokenizer, the config and a batch, and show the costs."),
    ] = False,
    overrides: SetOption = None,
    format: FormatOption = None,
) -> None:
    """Report everything that is wrong with a recipe at once.

    If only local data is not on this machine, that is a warning, not an error: a recipe is often checked
    where it is written or kept, and trained where the data is. What depends on the data is then not known.
    """
    out.use(format)
    from trahiv_cli.recipe.agreement import AgreedRun
    from trahiv_cli.recipe.load import load_recipe
    from trahiv_cli.recipe.record import pack

    loaded = load_recipe(recipe, overrides or ())
    run, doubts = resolved_here(loaded.recipe, loaded.document)
    pack(AgreedRun.of(loaded.recipe))  # raises if no other peer could get the recipe
    run_id = run.run_id if run else loaded.recipe.hivemind_config.opt.run_id
    digest = run and run.fingerprint
    file = loaded.document.file
    text = f"{file}: ok\nrun_id       {run_id or UNKNOWN}\nfingerprint  {digest or UNKNOWN}"
    out.record(text, "checked", file=file, run_id=run_id, fingerprint=digest)
    if deep:
        from trahiv_cli.cli.estimate import show_estimate

        show_estimate(loaded.recipe, doubts)


def show(
    recipe: Annotated[str, argument("RECIPE|RUN_DIR", "A recipe, or the folder of a run.")],
    overrides: SetOption = None,
) -> None:
    """Show every value of a recipe and where it came from."""
    from trahiv_cli.recipe.agreement import AgreedRun
    from trahiv_cli.recipe.content import knows_contents
    from trahiv_cli.recipe.document import render
    from trahiv_cli.recipe.load import load_recipe

    of_run = Path(recipe) / "recipe.json"
    loaded = load_recipe(of_run if of_run.is_file() else recipe, overrides or ())
    # The content in a run's folder is shown even if the data has changed or is gone.
    is_known = knows_contents(loaded.recipe)
    run = AgreedRun.of(loaded.recipe) if is_known else resolved_here(loaded.recipe)[0]
    lines = render((run.recipe if run else loaded.recipe).to_data())
    width = min(max(len(line) for line, _ in lines), 60)
    filled_in = {"run_id": "name and agreement", "content": "the files"}
    out.data(f"# fingerprint {run.fingerprint if run else UNKNOWN}")
    for line, location in lines:  # YAML that loads again, each value with its origin behind it
        origin = "" if location is None else loaded.document.origin_of(location)
        if origin == "default":  # unless it was filled in
            origin = next((filled_in[part] for part in location or () if part in filled_in), origin)
        out.data(f"{line:<{width}}  # {origin}" if origin else line)


def schema() -> None:
    """Print the recipe's JSON Schema (draft-07), for editors."""
    from trahiv_cli.recipe.schema import recipe_schema

    out.data(json.dumps(recipe_schema(), indent=2))


def resolved_here(
    recipe: Recipe, document: Document | None = None
) -> tuple[AgreedRun | None, Sequence[Finding]]:
    """Agree on a recipe with the content of its data; return doubts about the data too.

    If the data is not here, warn; the result is then None, unless the recipe has the content already. With
    its `document`, an unsound recipe is refused, and doubts are shown as warnings. A warning has the position
    in the recipe where a missing file occurs.
    """
    from trahiv_cli.recipe.agreement import AgreedRun, resolve
    from trahiv_cli.recipe.content import knows_contents
    from trahiv_cli.recipe.examine import require_sound

    doubts: list[Finding] = []
    try:
        if document is not None:
            doubts = require_sound(recipe, document)
        for doubt in doubts:
            out.warning(doubt.code, str(doubt), doubt.hint)
        return resolve(recipe), doubts
    except AssetError as error:
        for missing in error.findings or [Finding("", error.message, error.hint)]:
            out.warning(error.code, str(missing), missing.hint)
        return AgreedRun.of(recipe) if knows_contents(recipe) else None, doubts
