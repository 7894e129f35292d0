"""The content of files that a run needs: their digests, and where copies of them are.

Datasets of files are local files, or the text that comes with trahiv. Files are read as bytes, in bounded
memory, and compared by their SHA-256: names do not matter. By joining, a peer reveals to the swarm that it
has a copy of the recipe's files. So copies are searched only in the folder that the user names. The files of
a user's own rewards are code: they are compared, but never searched for.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import os
from functools import cache
from pathlib import Path

from trahiv_cli.errors import AssetError, RecipeMismatch
from trahiv_cli.recipe.builtin import TEXT, text_files, version
from trahiv_cli.recipe.document import is_text
from trahiv_cli.recipe.paths import LOCAL, READERS, closest_file, is_data, is_local, reader_of
from trahiv_cli.recipe.schema import ContentSection, DatasetSection, Recipe


def read_contents(recipe: Recipe) -> Recipe:
    """Return the recipe with the content of its datasets of files and its own rewards; files are read once.

    Raises:
        AssetError: files are missing or can't be read; the message covers all such datasets.
        RecipeMismatch: the recipe, from a swarm or a run's folder, already has a `content`, and the files
            here differ from it.
    """
    recipe = _with_digests_of_rewards(recipe)
    missing = []
    datasets = []
    for index, dataset in enumerate(recipe.data.datasets):
        try:
            found = content_of(dataset) if _is_of_files(dataset) else None
        except AssetError as error:
            missing.append(error)
            continue
        wanted = dataset.content
        if wanted is not None and wanted != found:
            hint = "bring an unchanged copy of the starter's; `--files DIR` finds it, whatever its name"
            if wanted.version:
                hint = f"install trahiv {wanted.version} unchanged on all machines, or start a new swarm"
            place = f"data.datasets.{index}.content"
            ours = found.model_dump() if found else {}
            pairs = [(f"{place}.{name}", ours.get(name), it) for name, it in wanted.model_dump().items()]
            raise RecipeMismatch(
                f"{dataset.path!r} is not what the run trains on: it has "
                f"{in_words(found) if found else 'no local files'}; the run has {in_words(wanted)}.",
                hint,
                tuple(pair for pair in pairs if pair[1] != pair[2]),
            )
        datasets.append(dataset.model_copy(update={"content": found}))
    if missing:
        hints = [error.hint for error in missing if error.hint]
        raise AssetError("\n".join(error.message for error in missing), hint=" ".join(hints))
    return recipe.changed("data", datasets=datasets)


def knows_contents(recipe: Recipe) -> bool:
    """Tell whether the recipe has the content of each dataset and reward, so that no file need be read."""
    rewards = recipe.grpo.rewards if recipe.grpo else []
    has_data = all(dataset.content or not _is_of_files(dataset) for dataset in recipe.data.datasets)
    return has_data and all(reward.sha256 or not reward.is_own for reward in rewards)


def content_of(dataset: DatasetSection) -> ContentSection:
    """Read the content of a dataset of files; `AssetError` if files are missing or can't be read."""
    is_builtin = dataset.path == TEXT
    try:
        files = text_files() if is_builtin else local_files(dataset)
        stats = [file.stat() for file in files]
        digests = [
            _sha256(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            for file, stat in zip(files, stats, strict=True)
        ]
    except OSError as error:
        raise unreadable(error) from error
    return ContentSection(
        sha256=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
        num_files=len(files),
        num_bytes=sum(stat.st_size for stat in stats),
        readers=["text"] if is_builtin else sorted({reader_of(file) for file in files}),
        version=version() if is_builtin else None,
    )


def unreadable(error: OSError) -> AssetError:
    """Make the error for a file that exists but can't be read."""
    said = f"{error.filename} can't be read: {error.strerror}."
    return AssetError(said, "Check its permissions, and the disk.")


def local_files(dataset: DatasetSection) -> list[Path]:
    """Find the files of a local dataset, at least one, sorted by path; none for another dataset.

    The dataset's `path` is a file, a glob, or a folder. A folder means its `data_files`, or every data file
    in it and below that is not hidden.

    Raises:
        AssetError: there is no file, or one of an unknown kind; the hint has a near match or the known kinds.
    """
    if not is_local(dataset.path):
        return []
    path = Path(dataset.path).expanduser()
    known = f"Known are {' '.join(READERS)}."
    if path.is_dir() and dataset.data_files is None:
        if not (files := [file for file in _data_files(path) if file.is_file()]):
            raise AssetError(f"The folder {dataset.path!r} holds no data files.", known)
        return files
    folder, names = (Path(), str(path)) if dataset.data_files is None else (path, dataset.data_files)
    files = []
    for name in [names] if isinstance(names, str) else names:
        wanted = folder / name
        there = next((part for part in (wanted, *wanted.parents) if part.exists()), Path())
        # A folder that exists is meant literally: only the rest of the name can be a pattern.
        pattern = Path(glob.escape(str(there))) / wanted.relative_to(there)
        found = [Path(match) for match in glob.glob(str(pattern), recursive=True) if os.path.isfile(match)]
        if not found:
            raise absent("file or folder", wanted)
        files += found
    for file in files:
        if not is_data(file):
            raise AssetError(f"{file.name!r} has a suffix that is not known.", known)
    return sorted(set(files), key=lambda file: file.parts)


def absent(what: str, path: Path) -> AssetError:
    """Make the error for a missing path; the hint has the nearest name beside it."""
    near = closest_file(path)
    hint = f"Did you mean {near!r}?" if near else f"Looked in {path.parent.absolute()}."
    return AssetError(f"There is no {what} {str(path)!r}.", hint)


def digest_of_function(file: Path, function: str) -> str:
    """Return the SHA-256 of a Python file, which must define a function; the file is not run.

    Raises:
        AssetError: the file is missing, can't be read, is no Python, or lacks the function.
    """
    try:
        code = file.read_bytes()
        body = ast.parse(code).body
    except FileNotFoundError as error:
        raise absent("file", file) from error
    except OSError as error:
        raise unreadable(error) from error
    except (SyntaxError, ValueError) as error:
        raise AssetError(f"{str(file)!r} is no Python file: {error}.", "Correct it.") from error
    known = [one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    if function not in known:
        there = f"It has {', '.join(known)}." if known else "It has none."
        raise AssetError(f"{str(file)!r} has no function {function!r}.", there)
    return hashlib.sha256(code).hexdigest()


def _with_digests_of_rewards(recipe: Recipe) -> Recipe:
    if recipe.grpo is None:
        return recipe
    rewards = []
    for index, reward in enumerate(recipe.grpo.rewards):
        if reward.is_own:
            file, _, function = reward.name.rpartition(":")
            digest = digest_of_function(Path(file), function)
            if reward.sha256 not in (None, digest):
                raise RecipeMismatch(
                    f"{file!r} is not the file that the run takes its rewards from: its SHA-256 is "
                    f"{digest[:12]}, and the run has {reward.sha256[:12]}.",
                    "bring an unchanged copy of the starter's",
                    ((f"grpo.rewards.{index}.sha256", digest, reward.sha256),),
                )
            reward = reward.model_copy(update={"sha256": digest})
        rewards.append(reward)
    return recipe.changed("grpo", rewards=rewards)


def in_words(content: ContentSection) -> str:
    """Describe content for people: number of files, size, and the first digits of the SHA-256."""
    files = "1 file" if content.num_files == 1 else f"{content.num_files} files"
    return f"{files}, {content.num_bytes:,} bytes, SHA-256 {content.sha256[:12]}"


def _is_of_files(dataset: DatasetSection) -> bool:
    return dataset.path == TEXT or is_local(dataset.path)


def _data_files(folder: Path) -> list[Path]:
    """List, sorted by path, the names in a folder and below that `datasets` would read as data files."""
    metadata = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        # `datasets` does not read metadata as data (datasets 5.2, `data_files.py:109`).
        data = {name for name in names if is_data(name) and not name.startswith(".")} - metadata
        found += [Path(parent, name) for name in data]
    return sorted(found, key=lambda file: file.parts)


@cache
def _sha256(file: Path, _inode: int, _size: int, _mtime_ns: int) -> str:
    """Hash a file. Inode, size and time are in the cache's key, so that a changed file is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def with_copies(recipe: Recipe, folder: Path | None) -> Recipe:
    """Return the recipe with the paths of copies, for datasets whose data is not at their own paths.

    A copy is a data file in `folder` or below. A dataset of several files matches a folder with these files
    and no other data files, because a folder in a recipe is read that way. A dataset is unchanged if no copy
    is found, or if its content is unknown.

    Args:
        recipe: this peer's own, or a stranger's, whose `local:` names are not looked up.
        folder: searched without hidden folders and links to folders; None: no copy is looked for.
    """
    if folder is None:
        return recipe
    folder = folder.absolute()
    missing = [dataset for dataset in recipe.data.datasets if _is_missing(dataset)]
    files = _data_files(folder) if missing else []
    sizes = {file: file.stat().st_size for file in files if os.path.isfile(file) and is_text(str(file))}
    inside: dict[Path, list[Path]] = {}  # each data file, and each folder with the data files in it and below
    for file in sizes:
        for place in (file, *file.parents[: len(file.parts) - len(folder.parts)]):
            inside.setdefault(place, []).append(file)

    def found(dataset: DatasetSection) -> DatasetSection:
        if (content := dataset.content) is None or dataset not in missing:
            return dataset
        wanted = content.num_files, content.num_bytes, set(content.readers)
        for place, files in inside.items():
            seen = len(files), sum(sizes[file] for file in files), {reader_of(file) for file in files}
            copy = dataset.model_copy(update={"path": str(place), "data_files": None})
            if seen == wanted and _is_unchanged(copy):
                return copy
        return dataset

    return recipe.changed("data", datasets=[found(dataset) for dataset in recipe.data.datasets])


def _is_missing(dataset: DatasetSection) -> bool:
    """Tell whether the content of a dataset of files is known, but is not at its path."""
    if dataset.content is None:
        return False
    return dataset.path.startswith(LOCAL) or (is_local(dataset.path) and not _is_unchanged(dataset))


def _is_unchanged(dataset: DatasetSection) -> bool:
    try:
        return content_of(dataset) == dataset.content
    except AssetError:
        return False
