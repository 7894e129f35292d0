"""Commands about recipes: `new`, `check`, `show`, `schema`. None of them loads torch or opens a socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.libraries import quiet_libraries
from trahiv_cli.cli.options import RecipeArgument, SetOption, read_recipe
from trahiv_cli.cli.output import Format, FormatOption, out
from trahiv_cli.errors import AssetError, RecipeError, SetupError

if TYPE_CHECKING:
    from trahiv_cli.recipe.load import Loaded
    from trahiv_cli.recipe.schema import Recipe

SCHEMA_FILE = "recipe.schema.json"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (new, check, show, schema):
        app.command()(command)


def new(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A built-in recipe. Without it, all are listed.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE. Default: NAME.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
) -> None:
    """Write a commented recipe to start from."""
    from trahiv_cli.recipe.builtin import builtin_recipes
    from trahiv_cli.recipe.near import closest

    builtin = builtin_recipes()
    if name is None:
        width = max(map(len, builtin), default=0)
        for known, file in builtin.items():
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            out.data(f"{known:<{width}}  {first.removeprefix('#').strip()}")
    elif name not in builtin:
        near = closest(name, builtin, by_start=True)
        hint = f"did you mean `trahiv new {near}`? " if near else ""
        raise RecipeError(
            f"there is no built-in recipe {name!r}", f"{hint}built-in recipes: {', '.join(builtin)}"
        )
    else:
        _write_recipe(builtin[name], output or Path(f"{name}.yaml"), force)


def check(
    recipe: RecipeArgument,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also load the tokenizer, the config and a batch, and show the costs."),
    ] = False,
    overrides: SetOption = None,
    format: FormatOption = None,
) -> None:
    """Report everything that is wrong with a recipe at once.

    Local data that is not on this machine is a warning, not an error: a recipe is often checked where it is
    written or kept, and trained where the data is. What depends on the data is then not known.
    """
    out.use(format)
    from trahiv_cli.recipe.agreement import agreement, fingerprint, run_id
    from trahiv_cli.recipe.examine import require_sound
    from trahiv_cli.recipe.record import pack

    loaded = read_recipe(recipe, overrides)
    require_sound(loaded.recipe, loaded.document, out.advice, needs_data=False)
    pack(loaded.recipe)  # raises for a recipe that is complete, but that no other peer could get
    resolved = _resolved(loaded.recipe, is_told=False)  # what is not here has been said
    run = run_id(resolved) if resolved else loaded.recipe.hivemind_config.opt.run_id
    digest = fingerprint(agreement(resolved)) if resolved else None
    if out.format is Format.json:
        out.event("checked", file=loaded.file, run_id=run, fingerprint=digest)
    else:
        unknown = "depends on the data"
        out.data(f"{loaded.file}: ok\nrun_id       {run or unknown}\nfingerprint  {digest or unknown}")
    if deep:
        quiet_libraries()
        from trahiv_cli.cli.estimate import show_estimate

        show_estimate(loaded.recipe)


def show(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN_DIR", help="A recipe, or the folder of a run.", show_default=False
        ),
    ],
    overrides: SetOption = None,
) -> None:
    """Show every value of a recipe and where it came from."""
    resolved = Path(recipe) / "recipe.json"
    out.data(_with_origins(read_recipe(str(resolved) if resolved.is_file() else recipe, overrides)))


def schema() -> None:
    """Print the recipe's JSON Schema (draft-07), for editors."""
    out.data(_schema_text())


def _with_origins(loaded: Loaded) -> str:
    """Write a recipe as YAML that loads again, each value with its origin behind it."""
    from trahiv_cli.recipe.agreement import agreement, fingerprint, with_run_id
    from trahiv_cli.recipe.content import knows_contents
    from trahiv_cli.recipe.document import dotted, render

    # What a run's folder says of its data is shown whatever has become of the data.
    is_known = knows_contents(loaded.recipe)
    resolved = with_run_id(loaded.recipe) if is_known else _resolved(loaded.recipe, is_told=True)
    recipe = resolved or loaded.recipe
    origins = dict(loaded.origins)
    if resolved and loaded.recipe.hivemind_config.opt.run_id is None:
        origins["hivemind_config.opt.run_id"] = "name and agreement"
    lines = render(recipe.to_data())
    width = min(max(len(line) for line, _ in lines), 60)
    body = [
        f"{line:<{width}}  # {origins.get(dotted(location), 'the files')}" if location is not None else line
        for line, location in lines
    ]
    digest = fingerprint(agreement(recipe)) if resolved else "depends on the data"
    return "\n".join([f"# fingerprint {digest}", *body])


def _resolved(recipe: Recipe, *, is_told: bool) -> Recipe | None:
    """Fill in what follows from the rest of a recipe and from its data; warn if local data is not here.

    Returns:
        None if the data is not here and the recipe, unlike that in a run's folder, does not say what it is.
    """
    from trahiv_cli.recipe.agreement import resolve, with_run_id
    from trahiv_cli.recipe.content import knows_contents

    try:
        return resolve(recipe)
    except AssetError as error:
        if is_told:
            out.warning(error.code, error.message, error.hint)
        return with_run_id(recipe) if knows_contents(recipe) else None


def _write_recipe(builtin: Path, file: Path, force: bool) -> None:
    """Write a recipe and the schema that its first line names; files that are not ours are kept."""
    schema_file = file.parent / SCHEMA_FILE
    if file.exists() and not force:
        raise RecipeError(
            f"{file} exists; nothing was written", "choose another name with `-o`, or `--force`"
        )
    if schema_file.exists() and not _is_our_schema(schema_file):
        raise RecipeError(
            f"{schema_file} is not trahiv's; nothing was written", "choose another folder with `-o`"
        )
    header = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
    try:
        schema_file.write_text(_schema_text() + "\n", encoding="utf-8")
        file.write_text(header + builtin.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be written: {error.strerror}") from None
    out.say(f"wrote {file}, and {schema_file} for your editor")
    out.hint(f"`trahiv check {file}` after you changed it")


def _is_our_schema(file: Path) -> bool:
    from trahiv_cli.recipe.json_schema import TITLE

    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("title") == TITLE)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _schema_text() -> str:
    from trahiv_cli.recipe.json_schema import recipe_schema

    return json.dumps(recipe_schema(), indent=2)
