"""The tasks of recipes, and the section that each of them has.

Sections mirror one upstream class each and use its field names, as in `schema.py`.
"""

from __future__ import annotations

from statistics import mode
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from trahiv_cli.recipe.document import kind_of, leaves
from trahiv_cli.recipe.paths import closest, is_own_reward
from trahiv_cli.recipe.section import (
    AutoBool,
    Compared,
    Count,
    CountOrZero,
    NotNegative,
    NumTokens,
    Own,
    Positive,
    Rules,
    Section,
    Some,
    Suggested,
    Word,
)
from trahiv_cli.recipe.upstream import mistake_in_pattern

Task = Literal["clm", "sft", "dpo", "kto", "reward", "grpo", "mlm", "seq-cls"]

TASK_SECTIONS: dict[Task, str] = {task: task.replace("-", "_") for task in get_args(Task)}
"""Task -> the section that is about it; the others' sections have no place in its recipe."""

TASKS_OF_TRL = frozenset[Task](("sft", "dpo", "kto", "reward", "grpo"))
"""Tasks whose data TRL tokenizes: texts or conversations."""

WRITING_TASKS = frozenset[Task](("clm", "sft", "dpo", "kto", "grpo"))
"""Tasks whose model writes text."""

PAIRED_TASKS = frozenset[Task](("dpo", "reward"))
"""Tasks whose samples are pairs of answers: two sequences each."""

SCORING_TASKS = frozenset[Task](("reward", "seq-cls"))
"""Tasks that train a model with a new head, which gives each sequence classes or a score."""

_Pairwise = Literal["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"]
_OtherLosses = Literal["aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]
LossName = Literal[_Pairwise, _OtherLosses]
"""Losses of `trl.DPOConfig`."""


class _TextSection(Section):
    """A task whose samples may be texts of one column."""

    dataset_text_field: Compared[str] = "text"
    """The column that holds the text (TRL's name for it)."""

    max_length: NumTokens = 1024
    """Tokens in a sample; what is longer is cut off at its end, or cut up (`packing`)."""


class ClmSection(_TextSection):
    """Raw-text training: every token of the text is predicted from those before it."""

    packing: bool = True
    """Join documents by end-of-text tokens and cut blocks of `max_length`; else a document is a sample."""


class SftSection(_TextSection):
    """`trl.SFTConfig`. Datasets are conversations (`messages`), `prompt` and `completion`, or plain text.

    For a vision-language model they may have pictures: `images`, a list of files beside the data, or `image`.
    """

    packing: bool = False
    """Put several samples into one row of `max_length`; they do not see each other."""

    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """`bfd` (best fit decreasing) cuts long samples off; `bfd_split` goes on in another row; `wrapped` cuts
    wherever a row is full, and samples in a row do see each other."""

    completion_only_loss: AutoBool = "auto"
    """Train the completion, not the prompt. `auto`: where the dataset has both columns."""

    assistant_only_loss: bool = False
    """Train what the assistant says. Needs a chat template that marks it (`{% generation %}`)."""

    loss_type: Literal["nll", "dft"] = "nll"
    """`nll`: cross-entropy. `dft`: weighted by the model's own probability of each token."""

    @property
    def sees_borders(self) -> bool:
        """Tell whether samples are packed into rows in which they must not see each other."""
        return self.packing and self.packing_strategy != "wrapped"


class DpoSection(Section):
    """`trl.DPOConfig`. Datasets have `chosen` and `rejected`, and mostly `prompt`."""

    beta: Positive = 0.1
    """Pull towards the initial model; a higher value keeps the model nearer to it."""

    loss_type: Some[LossName] = ["sigmoid"]
    """One, or several that are added up."""

    loss_weights: list[float] | None = None
    """One weight for each of several losses. Default: 1."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of preferences that are taken to be the wrong way round. Only for `robust`, `exo_pair` (which
    needs it: 0.001), `aot` and `aot_unpaired`."""

    max_length: NumTokens = 1024
    """Tokens in prompt and answer together; what is longer is cut off at its end."""

    def _broken_rules(self) -> Rules:
        losses = self.loss_type
        weights = self.loss_weights
        if weights is not None and len(weights) != len(losses):
            yield f"has {len(weights)} weights for {len(losses)} losses", "loss_weights"
        if "exo_pair" in losses and not self.label_smoothing:
            yield "`exo_pair` needs a `label_smoothing` above 0 (its paper: 0.001)", "loss_type"


class KtoSection(Section):
    """`trl.KTOConfig`. Datasets have `prompt`, `completion` and `label` (true: a good one), or pairs."""

    beta: Positive = 0.1
    """Pull towards the initial model; a higher value keeps the model nearer to it."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto` compares with answers to other prompts of the batch, and needs at least two samples in it."""

    desirable_weight: Positive = 1.0
    """Weight of good completions. Where these are rarer, raise it until both kinds weigh about the same."""

    undesirable_weight: Positive = 1.0
    """Weight of bad completions."""

    max_length: NumTokens = 1024
    """Tokens in prompt and completion together; a longer sample is cut off at its end."""


class RewardSection(Section):
    """`trl.RewardConfig`: a model that scores answers. Datasets are as for `dpo`."""

    center_rewards_coefficient: NotNegative | None = None
    """Pull of the scores towards a mean of zero (0.01 is usual). Default: none."""

    max_length: NumTokens = 1024
    """Tokens in prompt and answer together; a pair with a longer answer is left out."""


RewardName = Literal["exact_match", "number", "regex", "json_schema", "length"]
"""Rewards of trahiv; see `RewardFunction`."""

TRL_REWARDS = frozenset(
    "accuracy_reward reasoning_accuracy_reward think_format_reward get_soft_overlong_punishment "
    "get_repetition_penalty_reward get_cosine_scaled_reward".split()
)
"""Rewards of `trl.rewards`."""


class RewardFunction(Section):
    """One reward of a completion. Of trahiv's own, each is 1 for a completion that is right, and else 0."""

    name: Word
    """`exact_match`: the text in `column`. `number`: its last number is the last one in `column`. `regex`:
    `pattern` is found in it. `json_schema`: JSON that fits `json_schema`. `length`: `min_tokens` to
    `max_tokens`. Or a name in `trl.rewards`, or your own function: `FILE.py:FUNCTION`."""

    weight: float = 1.0
    """The reward counts this many times in the sum."""

    column: Compared[Word] = "answer"
    """`exact_match` and `number`: the dataset's column with the right answer."""

    pattern: Compared[Word | None] = None
    """`regex`: the pattern, searched for at most a second in each completion, and none after that."""

    json_schema: Compared[dict[str, Any] | None] = None
    """`json_schema`: the schema. It may not refer to other documents, or have patterns."""

    min_tokens: CountOrZero = 0
    """`length`: tokens in the shortest good completion."""

    max_tokens: Count | None = None
    """`length`: tokens in the longest good completion."""

    options: dict[str, bool | int | float | str] = {}
    """Keywords of a reward of `trl.rewards` whose name begins with `get_`."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """The digest of your own function's file. Leave it out: `init` fills it in, and a peer with another file
    is refused. The file itself never travels."""

    @property
    def is_own(self) -> bool:
        """Whether it is a function in a file of the user."""
        return is_own_reward(self.name)

    def _broken_rules(self) -> Rules:
        if not self.is_own and self.name not in {*get_args(RewardName), *TRL_REWARDS}:
            known = [*get_args(RewardName), *sorted(TRL_REWARDS)]
            near = closest(self.name, known)
            instead = f"did you mean `{near}`?" if near else f"known are {', '.join(known)}"
            yield f"{kind_of(self.name)} is no reward, and no `FILE.py:FUNCTION`: {instead}", "name"
        for needed in ("pattern", "json_schema", "max_tokens"):
            reader = {"pattern": "regex", "max_tokens": "length"}.get(needed, needed)
            if self.name == reader and getattr(self, needed) is None:
                yield f"`{reader}` needs `{needed}`", "name"
            elif self.name != reader and getattr(self, needed) is not None:
                yield f"has no effect on `{self.name}`: it is for `{reader}`", needed
        if self.options and not self.name.startswith("get_"):
            yield f"have no effect on `{self.name}`: they are for `get_...` of `trl.rewards`", "options"
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield f"is above `max_tokens` ({self.max_tokens})", "min_tokens"
        if self.pattern is not None and (mistake := mistake_in_pattern(self.pattern)):
            yield f"is no regular expression: {mistake}", "pattern"
        for location, _ in leaves(self.json_schema or {}, is_deep=True):
            if unsafe := {"$ref", "$dynamicRef", "pattern", "patternProperties"}.intersection(location):
                yield f"has `{min(unsafe)}`, which is not supported; `regex` finds patterns", "json_schema"
                break


def _listed(rewards: object) -> object:
    """Write rewards in one way: a list of sections. The name alone is enough of one, or of the only one."""
    some = [rewards] if isinstance(rewards, str) else rewards
    return (
        [{"name": one} if isinstance(one, str) else one for one in some] if isinstance(some, list) else some
    )


class GrpoSection(Section):
    """`trl.GRPOConfig`. Datasets have `prompt`, and columns that rewards read. A completion is a sample."""

    rewards: Annotated[
        Some[RewardFunction],
        BeforeValidator(_listed, json_schema_input_type=str | list[str | RewardFunction]),
    ]
    """A name, or a list of names and of sections with settings. They are added up."""

    num_generations: Annotated[Count, Field(ge=2)] = 8
    """Completions that the model writes for each prompt. It learns from how their rewards differ."""

    max_length: NumTokens = 1024
    """Tokens in prompt and completion together; longer prompts are left out."""

    max_completion_length: NumTokens = 256
    """Tokens in a completion; it ends there."""

    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: CountOrZero = 0
    """Sample among this many tokens; 0: all."""

    steps_per_generation: Suggested[Count | None] = None
    """Batches that are generated at once. Default: `training.gradient_accumulation_steps`."""

    num_iterations: Count = 1
    """Times that each completion is trained."""

    beta: NotNegative = 0.0
    """Pull towards the initial model, which costs a forward pass more. Above 0 only with adapters."""

    epsilon: Positive = 0.2
    """The ratio of the probabilities after and before a step is clipped at 1 - epsilon and 1 + epsilon."""

    epsilon_high: Positive | None = None
    """Another upper bound. Default: `epsilon`."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo"] = "dapo"
    """How the losses of tokens are added up. In `dapo` tokens count alike, in `grpo` completions do."""

    entropy_coef: NotNegative = 0.0
    """Reward for uncertainty, against giving up all answers but one too early; 0.001 to 0.05."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards in a prompt's group, or in the batch."""

    mask_truncated_completions: bool = False
    """Learn nothing from completions that `max_completion_length` ended."""

    use_vllm: Own[bool] = False
    """Generate with vLLM, which must be installed; the next fields are for it."""

    vllm_mode: Own[Literal["colocate", "server"]] = "colocate"
    """In this process, or on a server that `trl vllm-serve` started."""

    vllm_server_base_url: Own[str | None] = None
    vllm_gpu_memory_utilization: Own[Annotated[float, Field(gt=0, le=1)]] = 0.3
    vllm_enable_sleep_mode: Own[bool] = False
    """Free vLLM's memory while the model trains."""

    def _broken_rules(self) -> Rules:
        functions = [one.name.rpartition(":")[2] for one in self.rewards if one.is_own]
        if len(set(functions)) < len(functions):
            yield f"two functions are called {mode(functions)!r}: rename one", "rewards"
        if self.max_completion_length >= self.max_length:
            message = f"leaves no room for a prompt in `max_length` ({self.max_length} tokens)"
            yield message, "max_completion_length", "max_length"


class MlmSection(_TextSection):
    """Masked language modelling (BERT): hidden tokens are predicted from those on both sides."""

    max_length: NumTokens = 512
    """Tokens in a sample; a document is one, cut off at its end."""

    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens that is hidden, anew in each pass; in the held-out share always the same ones."""


class SeqClsSection(_TextSection):
    """Sequence classification: one label for each text."""

    labels: Compared[Annotated[list[Word], Field(min_length=2)]]
    """Names of the classes, in the order of their numbers."""

    dataset_label_field: Compared[str] = "label"
    """The column that holds a class's number or its name."""

    max_length: NumTokens = 512
    """Tokens in a sample; what is longer is cut off at its end."""

    def _broken_rules(self) -> Rules:
        if len(set(self.labels)) < len(self.labels):
            yield f"names the class {kind_of(mode(self.labels))} twice", "labels"


TaskSection = (
    ClmSection
    | SftSection
    | DpoSection
    | KtoSection
    | RewardSection
    | GrpoSection
    | MlmSection
    | SeqClsSection
)
