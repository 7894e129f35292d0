"""A preview of the data as the model sees it: `build_preview` prepares some as training would, and reads it.

Nothing is tokenized, cut, packed or masked here: TRL's trainers and the collators in `assets/` do that, as in
training. For `grpo`, the model writes completions, and they get their rewards. `cli/preview.py` formats a
preview for the screen.
"""

from __future__ import annotations

import copy
import logging
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from trahiv_cli.assets.collators import IGNORED_LABEL, build_collator
from trahiv_cli.assets.data import Splits, build_datasets
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.assets.samples import prompt_ids
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.forms import require_a_batch
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.task_sections import SCORING_TASKS, TASK_SECTIONS, RewardFunction, Task
from trahiv_cli.train.tasks import (
    forwarding_trl_warnings,
    preparing,
    task_arguments,
    task_trainer,
    trainer_of_trl,
)

logger = logging.getLogger(__name__)

LOOKED_AT = 1000
"""Number of samples that the figures cover: TRL packs this number at a time, and tokenizes it in seconds."""

Tokens = list[tuple[int, bool]]
"""One input sequence of the model: each token's id, and whether it is trained."""


@dataclass(frozen=True)
class Piece:
    """Some text of a sample. It is trained as a whole or not at all, and has only special tokens or none."""

    text: str
    trained: bool
    special: bool = False


@dataclass(frozen=True)
class Part:
    """A section of a sample: the whole, the prompt, one of two answers, or one sample of a packed row."""

    name: str  # empty if there is only one part
    pieces: tuple[Piece, ...]
    reward: float | None = None  # of a completion


@dataclass(frozen=True)
class Sample:
    """One sample as the model's input: after cutting, and with packing a whole row."""

    tokens: int
    trained_tokens: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Preview:
    """Some samples, and figures of the first samples of the data."""

    name: str
    task: Task
    max_length: int
    packed: bool
    num_samples: int | None  # of the whole data, for `sft` before packing; None for a stream
    looked_at: int  # the number of samples that the figures cover
    rows: int  # the model's inputs from these: packing makes fewer, and TRL drops samples that train nothing
    tokens: int  # in these rows
    trained_tokens: int | None  # of `tokens`; None where a class or a score is trained, or completions
    lengths: dict[str, int]
    """Tokens of the `shortest`, `median` and `longest` sample after cutting; of a pair, with the longer
    answer; for `grpo`, of a prompt. Empty if nothing is cut, because the rest of a sample goes into the next
    row."""

    full_samples: int  # of `max_length` tokens: longer samples were cut to that
    classes: dict[str, int]  # number of samples by class, only for `seq-cls`
    samples: tuple[Sample, ...]


class Row(NamedTuple):
    """One input of the model: a sample, or several packed samples."""

    sample: dict[str, Any]  # from the dataset; for TRL's tasks, tokenized by TRL
    batch: dict[str, torch.Tensor]  # the collator's output for this sample alone; empty for `grpo`
    sequences: list[Tokens]  # one sequence, or two of a pair: the prompt with each answer

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all sequences."""
        return sum(map(len, self.sequences))

    @property
    def num_trained(self) -> int:
        """The number of tokens on which the loss is computed."""
        return sum(is_trained for tokens in self.sequences for _, is_trained in tokens)


def build_preview(recipe: Recipe, num_shown: int) -> tuple[Preview, list[tuple[str, str]]]:
    """Prepare the recipe's data as training would; return figures, and the first `num_shown` rows as text.

    Only for `grpo` is the model loaded. Only the cache of `datasets` is written. The samples are in the order
    of a peer whose own seed is `training.seed`. Also returns warnings, each with a hint; one of them says
    that nothing is learned.

    Raises:
        AssetError: the tokenizer or the data can't be loaded, or do not fit the task.
    """
    seed = recipe.training.seed
    warnings: list[tuple[str, str]] = []
    tokenizer = build_tokenizer(recipe)
    with forwarding_trl_warnings(lambda message, hint: warnings.append((message, hint))):
        splits = build_datasets(recipe, tokenizer, peer_seed=seed)
        torch.manual_seed(seed)  # for the random choice of the tokens that `mlm` hides
        looked_at, rows = _rows_of(recipe, splits)
        warn_of_cuts(recipe, looked_at, rows)
    section = recipe.section
    classes = {}
    is_packed = getattr(section, "packing", False)
    lengths = []
    if not is_packed or getattr(section, "packing_strategy", "") == "bfd":
        lengths = [n for row in rows for n in row.sample.get("seq_lengths") or [max(map(len, row.sequences))]]
    trained = sum(row.num_trained for row in rows)
    if recipe.seq_cls is not None:
        counts = Counter(row.sample["labels"] for row in rows)
        classes = {name: counts[number] for number, name in enumerate(recipe.seq_cls.labels)}
    elif not trained and _trains_tokens(recipe):
        warnings.append(_nothing_to_learn(recipe, looked_at))
    if recipe.grpo is None:
        samples = [
            Sample(row.num_tokens, row.num_trained, parts_of(recipe, tokenizer, row))
            for row in rows[:num_shown]
        ]
    else:
        samples = _written(recipe, splits, num_shown)
        if samples and not any(len({part.reward for part in one.parts[1:]}) > 1 for one in samples):
            warnings.append(_ALIKE)
    spread: dict[str, int] = {}
    if lengths:
        spread = {"shortest": min(lengths), "median": statistics.median_low(lengths), "longest": max(lengths)}
    preview = Preview(
        name=recipe.name,
        task=recipe.task,
        max_length=section.max_length,
        packed=is_packed,
        num_samples=None if isinstance(splits.train, IterableDataset) else len(splits.train),
        looked_at=looked_at,
        rows=len(rows),
        tokens=sum(row.num_tokens for row in rows),
        trained_tokens=trained if _trains_tokens(recipe) else None,
        lengths=spread,
        full_samples=lengths.count(section.max_length),
        classes=classes,
        samples=tuple(samples),
    )
    return preview, warnings


def require_trainable(recipe: Recipe, splits: Splits) -> None:
    """Prepare the first samples as training will, without loading the model.

    Raises:
        AssetError: there is less than one local batch; no sample trains a token; or a sample is broken.
    """
    train = splits.train
    sft = recipe.sft
    training = recipe.training
    if isinstance(train, Dataset) and (sft is None or not sft.packing):
        local = training.per_device_train_batch_size * training.gradient_accumulation_steps
        require_a_batch(len(train), local // (recipe.grpo.num_generations if recipe.grpo else 1))
    looked_at, rows = _rows_of(recipe, splits)
    if _trains_tokens(recipe) and not any(row.num_trained for row in rows):
        raise AssetError(*_nothing_to_learn(recipe, looked_at))
    warn_of_cuts(recipe, looked_at, rows)


def warn_of_cuts(recipe: Recipe, looked_at: int, rows: Sequence[Row]) -> None:
    """Warn about samples that `max_length` cuts or excludes, or that have no trained token left."""
    section = recipe.section
    if recipe.task not in ("sft", "dpo", "kto", "reward") or getattr(section, "packing", False):
        return
    limit = f"{section.max_length:,} tokens (`{TASK_SECTIONS[recipe.task]}.max_length`)"
    if recipe.reward is not None:
        if num_left_out := looked_at - len(rows):
            said = "%d of the first %d pairs have an answer of more than %s, and are left out."
            logger.warning(said, num_left_out, looked_at, limit)
        return
    if num_cut := sum(max(map(len, row.sequences)) == section.max_length for row in rows):
        logger.warning(
            "%d of the first %d samples fill %s: answers of longer ones are cut in the middle.",
            num_cut,
            looked_at,
            limit,
        )
    num_trained = sum(row.num_trained > 0 for row in rows)
    if 0 < num_trained < looked_at:
        logger.warning(
            "%s%d of the first %d have nothing left to train once they are cut to %s.",
            "Most samples train nothing: " * (2 * num_trained < looked_at),
            looked_at - num_trained,
            looked_at,
            limit,
        )


_ALIKE = (
    "The completions of each prompt shown have the same reward: nothing is learned from such prompts.",
    "Look at the rewards; more prompts: -n 20.",
)


def _trains_tokens(recipe: Recipe) -> bool:
    """Tell whether tokens of the data are trained, and not scores or the model's own completions."""
    return recipe.task not in SCORING_TASKS and recipe.grpo is None


def _nothing_to_learn(recipe: Recipe, looked_at: int) -> tuple[str, str]:
    section = TASK_SECTIONS[recipe.task]
    limit = recipe.section.max_length
    return (
        f"There is nothing to learn: none of the first {looked_at:,} samples trains a token. "
        f"All in them is prompt, or was cut off at {limit:,} tokens.",
        f"Raise `{section}.max_length` (it is {limit}), or shorten the prompts.",
    )


def _rows_of(recipe: Recipe, splits: Splits) -> tuple[int, list[Row]]:
    """Read the first samples; return their number, and the model's inputs made from them."""
    with preparing():
        samples = list(islice(splits.train, LOOKED_AT))
        if recipe.grpo is not None:
            prompts = [prompt_ids(splits.tokenizer, sample) for sample in samples]
            unread: dict[str, torch.Tensor] = {}
            return len(samples), [
                Row(sample, unread, [[(token, False) for token in ids]])
                for sample, ids in zip(samples, prompts, strict=True)
            ]
        collate = build_collator(recipe, splits.tokenizer)
        looked_at = len(samples)
        if collate is None:  # TRL neither caches the result of a dataset in memory, nor reads it from a cache
            rows = Dataset.from_list(samples, features=splits.train.features)
            trainer = _trl_trainer(recipe, splits, rows)
            samples = trainer.train_dataset
            collate = trainer.data_collator
    batches = ((sample, collate([dict(sample)])) for sample in samples)  # TRL changes rows with pictures
    return looked_at, [Row(sample, batch, _read(recipe, batch)) for sample, batch in batches]


def _trl_trainer(recipe: Recipe, splits: Splits, rows: Dataset) -> Any:
    """Make TRL's trainer for `rows` with a tiny model, and without a swarm."""
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokenizer = splits.tokenizer
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **size, **tokens)
    model = LlamaForCausalLM(config) if recipe.reward is None else LlamaForSequenceClassification(config)
    reference = {"ref_model": copy.deepcopy(model)} if recipe.dpo or recipe.kto else {}
    with tempfile.TemporaryDirectory() as folder:
        # In this process: others take longer to start than these rows take.
        args: Any = task_arguments(
            recipe, Path(folder), None, seed=recipe.training.seed, bf16=False, report_to=[]
        )
        common = {"args": args, "train_dataset": rows, "processing_class": splits.processing_class}
        return trainer_of_trl(recipe.task)(model=model, **common, **reference)


def _written(recipe: Recipe, splits: Splits, num_prompts: int) -> list[Sample]:
    """Let the recipe's model write completions for the first prompts, as in training, and score them."""
    if num_prompts == 0 or (grpo := recipe.grpo) is None:
        return []
    disable_progress_bar()
    tokenizer = splits.tokenizer
    copies = grpo.num_generations
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {"per_device_train_batch_size": copies, "per_device_eval_batch_size": copies}
        fields |= {"seed": recipe.training.seed, "bf16": recipe.training.bf16 is True, "report_to": []}
        recipe = recipe.changed("grpo", steps_per_generation=1)
        trainer: Any = task_trainer(recipe, task_arguments(recipe, Path(folder), None, **fields), splits)
        trainer.model.train()
        for row in islice(splits.train, num_prompts):
            written = trainer._generate_and_score_completions([row] * copies)
            rewards = [list(scores)[-copies:] for scores in trainer._logs["rewards"].values()]
            totals = [sum(scores) for scores in zip(*(map(_times, grpo.rewards, rewards)), strict=True)]
            prompt: Tokens = [(token, False) for token in prompt_ids(tokenizer, row)]
            parts = [Part("prompt", pieces_of(tokenizer, prompt))]
            ids, masks = written["completion_ids"], written["completion_mask"].bool()
            for number, (completion, mask, total) in enumerate(zip(ids, masks, totals, strict=True), 1):
                tokens: Tokens = [(token, True) for token in completion[mask].tolist()]
                parts.append(Part(f"completion {number}", pieces_of(tokenizer, tokens), total))
            num_trained = int(masks.sum())
            samples.append(Sample(len(prompt) + num_trained, num_trained, tuple(parts)))
    return samples


def _times(reward: RewardFunction, scores: list[float]) -> list[float]:
    """Return weighted scores; a reward that can't judge a completion gives NaN, which counts as 0."""
    return [0.0 if score != score else reward.weight * score for score in scores]


def _read(recipe: Recipe, batch: dict[str, torch.Tensor]) -> list[Tokens]:
    """Return a batch's tokens, and whether each is trained: TRL's collators cut and mask, too.

    The first token is not trained, because no token before it predicts it. In `mlm` it may be.
    """
    ids = batch["input_ids"]
    lengths = [None]
    if recipe.task in ("dpo", "kto"):
        trained = batch["completion_mask"].bool()
        lengths = batch["attention_mask"].sum(dim=1).tolist()
    elif recipe.task in SCORING_TASKS:
        trained = torch.zeros_like(ids, dtype=torch.bool)
        lengths = batch["attention_mask"].sum(dim=1).tolist()
    else:
        trained = batch["labels"] != IGNORED_LABEL
    if recipe.mlm is None:
        trained[:, 0] = False
    rows = zip(ids.tolist(), trained.tolist(), lengths, strict=True)
    return [list(zip(numbers, mask, strict=True))[:length] for numbers, mask, length in rows]


def parts_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[Part, ...]:
    """Divide a sample into the parts that its task has."""
    if recipe.reward is not None:
        answers = zip(("chosen", "rejected"), row.sequences, strict=True)
        return tuple(Part(name, pieces_of(tokenizer, tokens)) for name, tokens in answers)
    if recipe.kto is not None:
        [pieces] = (pieces_of(tokenizer, tokens) for tokens in row.sequences)
        prompt, answer = (tuple(one for one in pieces if one.trained is wanted) for wanted in (False, True))
        judgement = Piece("good" if row.sample["label"] else "bad", trained=False)
        return Part("prompt", prompt), Part("completion", answer), Part("label", (judgement,))
    if recipe.dpo is not None:
        chosen, rejected = (pieces_of(tokenizer, tokens) for tokens in row.sequences)
        named = {"prompt": (chosen, False), "chosen": (chosen, True), "rejected": (rejected, True)}
        return tuple(
            Part(name, tuple(piece for piece in pieces if piece.trained is wanted))
            for name, (pieces, wanted) in named.items()
        )
    [tokens] = row.sequences
    if recipe.seq_cls is not None:
        of_class = Piece(recipe.seq_cls.labels[row.sample["labels"]], trained=True)
        return Part("text", pieces_of(tokenizer, tokens)), Part("class", (of_class,))
    if recipe.mlm is not None:
        pairs = zip(tokens, row.batch["labels"][0].tolist(), strict=True)
        whole = [(label if is_hidden else token, is_hidden) for (token, is_hidden), label in pairs]
        hidden = Part("the model sees", pieces_of(tokenizer, tokens))
        return hidden, Part("and is to guess", pieces_of(tokenizer, whole))
    what = "sample"
    ends = list(accumulate(row.sample.get("seq_lengths") or ()))
    if recipe.clm is not None:
        what = "document"
        eos = tokenizer.eos_token_id
        ends = [number for number, (token, _) in enumerate(tokens, 1) if token == eos]
    bounds = sorted({0, *ends, len(tokens)})
    stretches = [pieces_of(tokenizer, tokens[first:last]) for first, last in pairwise(bounds)]
    names = [f"{what} {number}" for number in range(1, len(bounds))] if len(bounds) > 2 else [""]
    return tuple(map(Part, names, stretches))


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> tuple[Piece, ...]:
    """Decode tokens in runs that are trained or not, special or not; the runs together are the whole text.

    A single token may decode to part of a character, or lose the space before it. So all tokens up to the end
    of a run are decoded at once, and the run ends where this text stops agreeing with the whole text. A
    character that two runs share belongs to the later one. A special token that repeats is written once.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)

    def decoded(some: Tokens) -> str:
        ids = [number for number, _ in some]
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text = decoded(tokens)
    pieces = []
    start = 0
    end = 0
    for kind, run in groupby((is_trained, number in special) for number, is_trained in tokens):
        some = list(run)
        end += len(some)
        stop = len(text)
        if end < len(tokens):
            stop = max(start, len(os.path.commonprefix([decoded(tokens[:end]), text])))
        if stop > start:
            written = text[start:stop]
            pieces.append(
                Piece(_shortened(written, [number for number, _ in some]) if kind[1] else written, *kind)
            )
        start = stop
    return tuple(pieces)


def _shortened(text: str, ids: list[int]) -> str:
    """Shorten the text of one token that stands several times in a row, such as the pieces of a picture."""
    token = text[: len(text) // len(ids)]
    is_repeated = len(ids) > 3 and len(set(ids)) == 1 and token * len(ids) == text
    return f"{token} x{len(ids)} " if is_repeated else text
