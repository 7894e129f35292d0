"""Pictures in the rows of `sft`, and the processor with which a vision-language model reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset, Image, List
from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from transformers import (
    AutoProcessor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from trahiv_cli.assets.model import (
    expand_folder,
    read_config,
    sees_pictures,
    tokenizer_source,
    translated,
)
from trahiv_cli.assets.sources import Documents, Opened
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.builtin import BPE
from trahiv_cli.recipe.paths import BUILTIN, is_local
from trahiv_cli.recipe.rows import PICTURES, Tally, picture_error, picture_names
from trahiv_cli.recipe.schema import Recipe

PIECE = "<image>"
"""The token of a piece of a picture, beside the built-in tokenizer's own."""

HINT = (
    "Names are relative to the data file, or to the folder in `path`: bring the pictures, or mend the rows."
)


def has_pictures(rows: Documents) -> bool:
    """Whether rows have a column of pictures."""
    return not set(PICTURES).isdisjoint(rows.column_names or next(iter(rows), {}))


def with_pictures(opened: Opened) -> Documents:
    """Return the rows with their pictures, which are read when a row is: files by name, or `datasets`' own.

    Raises:
        AssetError: a picture is missing or can't be read, or the rows hold something else.
    """
    rows = opened.rows
    column = next((name for name in PICTURES if name in opened.first), "")
    feature = opened.features.get(column)
    kind = getattr(getattr(feature, "feature", feature), "dtype", "")
    if kind not in ("string", "large_string") and not picture_names(opened.first.get(column)):
        return rows
    if not is_local(opened.source.path) or not isinstance(rows, Dataset):
        raise AssetError(
            f"The column {column!r} of {opened.name} has the names of pictures, and not the pictures.",
            "Download the dataset, and name its folder; a stream can't have names of pictures.",
        )
    place = Path(opened.source.path).expanduser().absolute()
    folder = place if place.is_dir() else place.parent
    tally = Tally(opened.name)
    for number, row in enumerate(rows.select_columns([column]), 1):
        tally.add(number, picture_error(row, folder) or _damage(row[column], folder), "")
    if tally.errors:
        raise AssetError("\n".join(tally.sentences(tally.errors)), HINT)

    def named(value: Any) -> dict[str, Any]:
        found = [str(folder / name) for name in picture_names(value)]
        return {column: found if isinstance(value, list) else found[0]}

    pictures = List(Image()) if isinstance(opened.first[column], list) else Image()
    return rows.map(named, input_columns=[column]).cast_column(column, pictures)


def _damage(value: Any, folder: Path) -> str:
    """Return which named picture can't be read, as words to follow the row's number, or ""."""
    for name in picture_names(value):
        try:
            Pillow.open(folder / name).close()
        except (OSError, UnidentifiedImageError, Pillow.DecompressionBombError) as failure:
            return f"names a picture that can't be read: {name!r} ({failure})"
    return ""


def build_processor(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Load the processor from where the tokenizer comes from, and give it the tokenizer.

    A new LLaVA with the built-in tokenizer `BPE` gets pictures of its `image_size`, and a token for each
    piece of a picture.

    Raises:
        AssetError: the model can't see pictures, or there is no processor.
    """
    name, revision = tokenizer_source(recipe.model)
    config = read_config(recipe)
    if not sees_pictures(config):
        raise AssetError(
            f"The data has pictures, and a {config.model_type} can't see them.",
            "Name a vision-language model, or leave the column out (`columns: {images: unread}`).",
        )
    if name.startswith(BUILTIN):
        if config.model_type != "llava" or name != BPE:
            raise AssetError(
                f"A new {config.model_type} with {name!r} has no processor of pictures.",
                f"Take a new llava with {BPE!r}, or a folder that has one (`model.tokenizer_name_or_path`).",
            )
        tokenizer.add_special_tokens({"additional_special_tokens": [PIECE]})
        number = tokenizer.convert_tokens_to_ids(PIECE)
        if config.image_token_index != number:
            raise AssetError(
                f"`model.config.image_token_index` is {config.image_token_index}, and {PIECE} has the number "
                f"{number}.",
                f"Set it to {number}.",
            )
        # By Pillow, as torchvision may be missing; older versions of transformers have only one.
        by_pillow = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
        vision = config.vision_config
        size = vision.image_size
        processor: Any = LlavaProcessor(
            image_processor=by_pillow(size={"height": size, "width": size}, do_center_crop=False),
            tokenizer=tokenizer,
            patch_size=vision.patch_size,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            image_token=PIECE,
            num_additional_image_tokens=int(vision.model_type == "clip_vision_model"),
        )
    else:
        with translated("processor", name):
            folder = expand_folder(name)
            processor = AutoProcessor.from_pretrained(folder, revision=revision, trust_remote_code=False)
        if not isinstance(processor, ProcessorMixin):
            raise AssetError(
                f"{name!r} has no processor of pictures.", "Name a complete vision-language model."
            )
    template = tokenizer.chat_template or processor.chat_template
    vars(processor).update(tokenizer=tokenizer, chat_template=template)
    return processor
