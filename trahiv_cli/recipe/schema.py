"""What a run is: every word a recipe may say, its unit, its default and the reason for it.

Sections mirror one upstream class each and use its field names, so that upstream's documentation
applies. Nothing here loads torch, transformers or hivemind, or looks at a file; what only those can judge
(is this package installed? does this dataset have that column?) is checked where it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from statistics import mode
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from trahiv_cli.recipe.document import Location, dotted, kind_of, leaves
from trahiv_cli.recipe.pasted import INVITATION_PREFIX
from trahiv_cli.recipe.paths import PACKAGED_BUILDERS, Reader, is_template_file, reaches_out
from trahiv_cli.recipe.section import (
    AutoBool,
    Compared,
    Count,
    CountOrZero,
    Dtype,
    LookedUp,
    Name,
    NotNegative,
    Own,
    Positive,
    Rules,
    Section,
    Share,
    Some,
    Suggested,
    Word,
)
from trahiv_cli.recipe.task_sections import (
    PAIRED_TASKS,
    TASK_SECTIONS,
    TASKS_OF_TRL,
    ClmSection,
    DpoSection,
    GrpoSection,
    KtoSection,
    MlmSection,
    RewardSection,
    SeqClsSection,
    SftSection,
    Task,
    TaskSection,
)
from trahiv_cli.recipe.upstream import mistake_in, mistakes_in_schedule

CompressionName = Literal["none", "float16", "uniform8", "blockwise8", "blockwise4"]
WeightCompressionName = Literal["none", "float16", "uniform8", "blockwise8"]
"""4 bits are missing: they lose a tenth of each weight, and no later message corrects that."""

_Torch = Literal["adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd", "stable_adamw"]
_AdamOf8Bits = Literal["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
_Ademamix = Literal["ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"]
_Lion = Literal["lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"]
_Rmsprop = Literal["rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"]
OptimName = Literal[_Torch, _AdamOf8Bits, _Ademamix, _Lion, _Rmsprop]
"""Optimizers of transformers that work in a swarm. Others update weights during the backward pass (LOMO),
keep two sets of weights (schedule-free), or have a state that is not made of plain tensors and can't travel
to a joiner (GaLore, Apollo, torchao)."""

_Decaying = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
_ToAMinimum = Literal["cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"]
SchedulerName = Literal[_Decaying, Literal["constant", "constant_with_warmup"], _ToAMinimum]
"""Schedules of transformers but those that follow a loss, which each peer measures for itself."""

_Tracker = Literal["azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte"]
_MoreTrackers = Literal["kubeflow", "mlflow", "neptune", "swanlab", "tensorboard", "trackio", "wandb"]
TrackerName = Literal[Literal["all", "none"], _Tracker, _MoreTrackers]
"""Names in transformers' `INTEGRATION_TO_CALLBACK`; `all` that are installed, or `none`."""

_SOLO = r"^(never|always|after ([0-9]{1,9}(\.[0-9]{1,3})?) seconds?)$"


def _solo(value: object) -> str:
    """Write a wait in one way, `after 1 second` or `always`: equal waits make equal agreements."""
    match = re.fullmatch(_SOLO, value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"should be never, always or, for example, after 300 seconds, got {kind_of(value)}")
    if match[2] is None:
        return match[1]
    seconds = float(match[2])
    number = int(seconds) if seconds.is_integer() else seconds
    return f"after {number} second{'' if seconds == 1 else 's'}" if seconds else "always"


def repeated_too_often(config: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """Yield where a `transformers` config, maybe a stranger's, would take for ever to be read, and why."""
    for location, value in leaves(config, is_deep=True):
        names = [name for name in location if isinstance(name, str)]
        is_large = isinstance(value, int | float) and value > 10_000
        # The number in such a field is the length of a list that the config itself makes.
        if is_large and names and re.fullmatch(".*(layers?|labels|types|blocks|replace)", names[-1]):
            yield location, f"asks for {value:,} `{names[-1]}`, and at most 10,000 are possible"


class ModelSection(Section):
    """`from_pretrained`, or `config` to train a model from scratch."""

    model_name_or_path: LookedUp[str | None] = None
    """Hub id or local folder of a model that fits the task. Either this or `config`."""

    config: dict[str, Any] | None = None
    """A `transformers` config to build from scratch: `model_type` and its fields. No download."""

    revision: str = "main"
    """Branch, tag or commit of a hub model."""

    tokenizer_name_or_path: LookedUp[str | None] = None
    """Hub id or local folder. `builtin/bytes` is transformers' ByT5 tokenizer; `builtin/bpe`, of 2,048
    tokens, is trained on `builtin/trahiv` at start. Default: the model's own; required with `config`."""

    dtype: Dtype = "auto"
    """Type of the frozen weights; `auto` asks the checkpoint. Trainable weights are always float32."""

    attn_implementation: Own[str] = "auto"
    """`auto` leaves the choice to transformers (sdpa where the model has it), or one of its names. Kernels
    of a hub are code, which is never loaded."""

    def _broken_rules(self) -> Rules:
        if "/" in self.attn_implementation:
            message = "names code on a hub, which is never run: install a package such as flash-attn"
            yield message, "attn_implementation"
        # By these fields a config may load code, weights or another kind of layer.
        loads = re.compile(
            "_.*|.*_implementation|.*name_or_path|auto_map|trust_remote_code|custom_pipelines|use_kernels"
            "|kernel_config|quantization_config|use_pretrained_backbone|use_timm_backbone"
        )
        names = {str(name) for location, _ in leaves(self.config or {}, is_deep=True) for name in location}
        for name in sorted(filter(loads.fullmatch, names)):
            said = f"`{name}` would load something besides the weights, which `config` must not do: remove it"
            yield f"{said} (`attn_implementation` and `quantization` have their own places)", "config"
        for location, message in repeated_too_often(self.config or {}):
            yield message, dotted(("config", *location)), "config"
        if (self.model_name_or_path is None) == (self.config is None):
            yield "give either `model_name_or_path` or `config`, not both and not neither", "config"
        if self.config is not None and "model_type" not in self.config:
            yield "`config` needs a `model_type`, for example `llama`", "config"
        if self.config is not None and self.tokenizer_name_or_path is None:
            yield "`config` needs a `tokenizer_name_or_path`: a new model has none of its own", "config"


class QuantizationSection(Section):
    """`transformers.BitsAndBytesConfig`: the frozen base in 4 or 8 bits. Absent: as `model.dtype` says."""

    load_in_4bit: bool = False
    """Four bits for each weight of the base, decoded layer by layer while computing (QLoRA)."""

    load_in_8bit: bool = False
    """Eight bits for each weight of the base (LLM.int8()). Either this or `load_in_4bit`."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4 bits only: how they are spread. `nf4` is QLoRA's; upstream's default is `fp4`."""

    bnb_4bit_use_double_quant: bool = False
    """4 bits only: quantize the scales too, 0.4 bits less for each weight."""

    bnb_4bit_compute_dtype: Own[Dtype] = "auto"
    """4 bits only: what weights are decoded to. `auto`: what this peer trains in."""

    llm_int8_threshold: NotNegative = 6.0
    """8 bits only: activations beyond this are multiplied in 16 bits. 0: none are."""

    llm_int8_skip_modules: list[Word] | None = None
    """Layers that stay as they are, in both widths. Default: the head."""

    def _broken_rules(self) -> Rules:
        if self.load_in_4bit == self.load_in_8bit:
            message = "turn on either `load_in_4bit` or `load_in_8bit`, and only one"
            yield message, "load_in_8bit", "load_in_4bit"


class PeftSection(Section):
    """`peft.LoraConfig`. Absent: every weight is trained."""

    r: Count = 16
    """Rank of the adapters."""

    lora_alpha: Positive = 32
    """Scale of the adapters; the update is multiplied by lora_alpha / r."""

    lora_dropout: Share = 0.0
    """0 keeps peers comparable and the fused kernels in use."""

    target_modules: Word | Some[Word] = "all-linear"
    """`all-linear`, a list with the names of the layers to adapt, or a regular expression for them."""

    modules_to_save: list[Word] = []
    """Layers trained in full beside the adapters."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)."""

    use_dora: bool = False
    """Weight-decomposed adapters (DoRA): slower, sometimes better at low rank."""


class ContentSection(Section):
    """The content of a dataset of files: equal for equal files, whatever they are called."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """The output of `sha256sum` for one file; for several, a digest of their digests, sorted by name."""

    num_files: Count
    """Number of files."""

    num_bytes: Annotated[int, Field(ge=0)]
    """Their size together."""

    readers: Some[Reader]
    """The readers of the files, by suffix: lines of JSON are another dataset when read as plain text."""

    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+!-]{0,31}$")] | None = None
    """The version of trahiv whose text it is (`builtin/trahiv`)."""


class DatasetSection(Section):
    """One call of `datasets.load_dataset`."""

    path: LookedUp[str]
    """Hub id, local folder, file (`.txt .jsonl .json .csv .parquet`) or glob, relative to the recipe's
    folder. `builtin/trahiv` is trahiv's own source and documentation, `builtin/arithmetic` sums to 9,
    `builtin/shapes` small pictures."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str = "train"
    """Split to train on."""

    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""

    data_files: Word | Some[Word] | None = None
    """Files inside a hub dataset or local folder, or globs for them."""

    columns: Compared[dict[Word, Word]] = {}
    """Columns to rename, the dataset's name to the task's: `{instruction: prompt, output: completion}`."""

    fraction: Positive | None = None
    """Share of this dataset in the mixture, for all datasets or none. Shares are made to sum to one; no row
    is repeated (TRL's `fraction`). Not with `streaming`."""

    content: ContentSection | None = None
    """Content of local files. Leave it out: `init` fills it in, and a peer with other files is refused."""

    def renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row, or other values by column, with the names that the task reads."""
        return {self.columns.get(name, name): value for name, value in row.items()}

    def _broken_rules(self) -> Rules:
        if not self.path.strip():
            yield "is empty: name a hub dataset, a folder or a file", "path"
        if "://" in self.path:
            yield "is a URL: download it and name the file, or name a hub dataset", "path"
        if self.path in PACKAGED_BUILDERS:
            yield f"{self.path!r} says how files are read, as their suffix does: name the files", "path"
        files = [self.data_files] if isinstance(self.data_files, str) else self.data_files or []
        if outside := [file for file in files if reaches_out(file)]:
            message = f"{kind_of(outside[0])} is not inside of the dataset: name the files in `path`"
            yield message, "data_files"
        if len(set(self.columns.values())) < len(self.columns):
            yield f"two columns would be named {kind_of(mode(self.columns.values()))}", "columns"


class EvalSection(Section):
    """Documents that are held out from training, to measure the loss."""

    test_split_size: Share = 0.0
    """Share of the documents that is held out, the same ones on every peer. 0 with `streaming`."""


class DataSection(Section):
    """The training data."""

    datasets: Some[DatasetSection]
    """One or more datasets, shuffled together; each must have the columns that the task reads."""

    eval: EvalSection = EvalSection()

    shuffle: bool = True
    """In an order that `training.seed` draws anew for each pass: one for all peers where they divide the data
    (`swarm.divide_data`), else each peer's own. `kto` draws one order for all passes."""

    streaming: Suggested[bool] = False
    """Read while training, in bounded memory and disk. Peers divide the files: have several for each."""

    num_proc: Own[Count | None] = None
    """Processes that tokenize. Default: one."""

    chat_template: Compared[str | None] = None
    """How conversations are written, in Jinja: a template, or a `.jinja` or `.j2` file whose text is taken
    and travels to joiners. For tasks that read conversations. Default: the tokenizer's own."""

    def _broken_rules(self) -> Rules:
        if (template := self.chat_template) is not None:
            said = kind_of(template)
            if is_template_file(template):  # one that could be read is its text by now
                yield f"{said} names a file, which is only read with a recipe's file", "chat_template"
            elif "{" not in template:
                yield f"{said} is neither a `.jinja` file nor a template: it has no `{{`", "chat_template"
            elif mistake := mistake_in(template):
                yield f"is not valid Jinja: {mistake}; correct the template there", "chat_template"
        without = [index for index, dataset in enumerate(self.datasets) if dataset.fraction is None]
        streaming = "`streaming` has no known length, so "
        share = "datasets.0.fraction"
        if 0 < len(without) < len(self.datasets):
            yield "give every dataset a `fraction`, or none of them", f"datasets.{without[0]}"
        if self.streaming and not without:
            yield f"{streaming}there are no fractions of it", share
        if not without and len(self.datasets) == 1:
            message = "is a share in a mixture, and the only dataset has all of it: remove it, or name a part"
            yield f"{message} of the dataset (`split: train[:10%]`)", share
        if self.streaming and self.eval.test_split_size > 0:
            yield f"{streaming}`eval.test_split_size` must be 0", "eval.test_split_size"


class TrainingSection(Section):
    """`transformers.TrainingArguments`. Steps are steps of the whole swarm."""

    max_steps: Count
    """The run ends here. Local passes over the data repeat as needed."""

    per_device_train_batch_size: Suggested[Count] = 8
    """Samples in one forward pass on this peer. Batches count by their trained tokens (`dpo`, `kto`, `reward`
    and `seq-cls`: by samples), so that every token of the swarm counts alike."""

    per_device_eval_batch_size: Suggested[Count] = 8
    """Samples in one forward pass of an evaluation."""

    gradient_accumulation_steps: Suggested[Count] = 1
    """Local. Leave at 1: the swarm accumulates."""

    learning_rate: NotNegative = 2e-4
    lr_scheduler_type: SchedulerName = "cosine"
    lr_scheduler_kwargs: dict[str, Any] = {}
    warmup_steps: NotNegative = 0.03
    """A whole number of steps, or a share of `max_steps` if below 1."""

    optim: OptimName = "adamw_torch_fused"
    optim_args: str | None = None
    """`key=value,key=value`, as in TrainingArguments."""

    weight_decay: NotNegative = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: Positive = 1e-8
    max_grad_norm: NotNegative = 1.0
    """Applied once per step, to the averaged gradient. 0: not at all."""

    bf16: Suggested[AutoBool] = "auto"
    """Compute in bfloat16. `auto`: where the GPU has it; never on a CPU."""

    fp16: Suggested[bool] = False
    """Compute in float16, with loss scaling; for GPUs without bfloat16."""

    activation_checkpointing: Suggested[bool] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    torch_compile: Suggested[bool] = False
    use_liger_kernel: Suggested[bool] = False
    """Fused kernels of the package liger-kernel, for GPUs: less memory with large vocabularies."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Shared: it draws the same initial weights on every peer. Data order and dropout differ by peer."""

    logging_steps: Suggested[Count] = 1
    eval_steps: Suggested[CountOrZero] = 0
    """Evaluate on the held-out share every so many steps; 0: only at the end, if there is one."""

    save_steps: Suggested[CountOrZero] = 100
    """Write a checkpoint every so many steps, besides the one at each clean stop. 0: only that one."""

    save_total_limit: Suggested[Count] = 2
    """Older checkpoints are deleted."""

    dataloader_num_workers: Own[CountOrZero] = 0
    report_to: Own[list[TrackerName]] = []
    """Trackers that transformers knows: tensorboard, wandb, trackio, mlflow... They group all peers' runs."""

    run_name: Own[str | None] = None
    """This peer's name in trackers. Default: that of `--name`, or the end of the peer's id."""

    trackio_space_id: Own[str | None] = None
    """A Space in which trackio shows the runs of all peers that name it."""

    def _broken_rules(self) -> Rules:
        if len(self.report_to) > 1 and {"all", "none"}.intersection(self.report_to):
            yield "`all` and `none` stand alone: name the trackers, or write one of the two", "report_to"
        steps = self.warmup_steps
        if self.fp16 and self.bf16 is True:
            yield "`fp16` and `bf16` are both on: choose one", "fp16"
        if steps >= 1 and steps != int(steps):
            yield f"should be a whole number, or a share below 1, got {steps}", "warmup_steps"
        # A share is of `max_steps` whatever that is, and a constant rate has no warm-up.
        if 1 <= self.max_steps < steps and self.lr_scheduler_type != "constant":
            message = f"the learning rate would rise for {steps:g} steps, and the run ends after"
            remedy = "write fewer, or a share such as 0.03"
            yield f"{message} {self.max_steps} (`training.max_steps`): {remedy}", "warmup_steps"
        keywords = self.lr_scheduler_kwargs
        for keyword, mistake in mistakes_in_schedule(self.lr_scheduler_type, keywords, self.learning_rate):
            place = f"lr_scheduler_kwargs.{keyword}" if keyword else "lr_scheduler_type"
            yield mistake, place, "lr_scheduler_kwargs", "lr_scheduler_type"


def _without_secrets(peers: list[str]) -> list[str]:
    if any(INVITATION_PREFIX in peer for peer in peers):
        raise ValueError("an invitation holds a secret: put it into a private file, and its name here: @FILE")
    return peers


class DhtSection(Section):
    """Keywords of `hivemind.DHT`; this peer's own."""

    initial_peers: Annotated[list[str], AfterValidator(_without_secrets)] = []
    """Multiaddrs of peers to join, or `@FILE` with an invitation; usually given by `join --peer`."""

    host_maddrs: list[str] = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
    """Listen here; port 0 takes a free one. An address that this machine does not have is announced, and its
    port listened on. QUIC (`/ip4/0.0.0.0/udp/0/quic-v1`; `/quic` means the same) is not the default: p2pd's
    connections over it stand still for good after some hundred streams that were cut off."""

    announce_maddrs: list[str] = []
    """Addresses to tell others, where a router forwards a port to this machine."""

    identity_path: LookedUp[str | None] = None
    """Key file that fixes the peer id. Default: `identity.key` in the run's folder."""

    client_mode: bool = False
    """Dial out only: for a network that lets nothing in. Cannot lead rounds or share the state."""

    use_relay: bool = False
    use_auto_relay: bool = False
    use_ipfs: bool = False
    auto_nat: bool = False
    nat_port_map: bool = False
    """Whether libp2p maps a port of the router; trahiv does not need it (docs/reach.md)."""

    startup_timeout: Positive = 60.0
    """Seconds for the network daemon to start. Raise it at "daemon failed to start"."""

    wait_timeout: Positive = 3.0
    """Seconds for one DHT request."""


class OptSection(Section):
    """Keywords of `hivemind.Optimizer`."""

    run_id: Name | None = None
    """Name of the run in the DHT. Default: the recipe's name and 8 digits of its agreement."""

    target_batch_size: Count = 256
    """Samples per step over all peers."""

    matchmaking_time: Positive = 5.0
    """Seconds a peer waits for others to join its group; a full group starts at once."""

    averaging_timeout: Suggested[Positive] = 60.0
    """Seconds to find a group for a round; then it is tried again."""

    allreduce_timeout: Suggested[Positive | None] = None
    """Seconds for an exchange. Default: as long as something comes (`next_chunk_timeout`)."""

    next_chunk_timeout: Suggested[Positive | None] = None
    """Seconds without a byte from a groupmate before it is left out. Default: `matchmaking_time`, at least
    10. Raise it at "sent nothing for too long"."""

    load_state_timeout: Suggested[Positive] = 60.0
    """Seconds without anything new of the swarm's state. Raise it at "nothing of the swarm's state came"."""

    offload_optimizer: Own[AutoBool] = "auto"
    """Keep optimizer state on the CPU and step there. `auto`: with a GPU, in `swarm.mode: sync`, but
    not 8-bit and paged optimizers. In `overlap` the loss is higher (docs/modes.md); other modes refuse it."""

    average_state_every: Count = 10
    """A peer whose weights differ adopts what most hold at once, but at most every so many steps. Averaged
    gradients are bit-equal, so only what unlike processors round differently is removed."""

    client_mode: Own[bool | None] = None
    """Default: where this peer can only dial (docs/reach.md)."""

    grad_compression: CompressionName | None = None
    """Codec of gradients, and of what local steps changed. Default: `none`, or what mode `auto` chooses."""

    state_averaging_compression: WeightCompressionName = "none"
    """Has no effect: weights are never averaged (`average_state_every`). Accepted because hivemind has it."""

    load_state_compression: WeightCompressionName = "none"
    """Codec of the weights that a joiner downloads."""

    tracker_opts: Own[dict[str, Any]] = {}
    performance_ema_alpha: Own[Annotated[float, Field(gt=0, le=1)]] = 0.1
    shutdown_timeout: Own[Positive] = 5.0
    verbose: Own[bool] = False
    """Log what hivemind says of its progress, and not only its warnings."""


class HivemindConfig(Section):
    """`{dht: hivemind.DHT keywords, opt: hivemind.Optimizer keywords}`, as `SwarmTrainer` takes it."""

    dht: Own[DhtSection] = DhtSection()
    opt: OptSection = OptSection()


class SwarmSection(Section):
    """Settings of trahiv: how peers step together, and how a round is judged."""

    mode: Literal["auto", "sync", "overlap", "diloco", "streaming"] = "auto"
    """What is averaged, and when. `auto`: chooses among the others and their codecs for all peers, by
    measured speed and links, and says why. `sync`: gradients, once per `target_batch_size` samples; training
    waits. `overlap`: the same while training goes on, so a step is taken up to one step late. `diloco`: what
    `local_steps` steps of each peer changed; training waits. `streaming`: the same, in fragments and while
    training goes on."""

    communication_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """`auto`: the share of its time that training may wait for others."""

    local_steps: Count = 50
    """`diloco` and `streaming`: steps between two exchanges of a weight; `auto` chooses. A step is
    `target_batch_size` samples of all peers in every mode. More send less, and let peers drift apart."""

    fragments: Count = 4
    """`streaming`, also as `auto` chooses it: parts of the weights that are exchanged one after the other."""

    outer_learning_rate: Positive = 0.7
    """`diloco`, `streaming`: how far the agreed weights follow what the peers changed on average."""

    outer_momentum: Share = 0.5
    """`diloco`, `streaming`: Nesterov momentum of the agreed weights. 0.9 is for hundreds of rounds."""

    solo: Annotated[str, BeforeValidator(_solo), Field(json_schema_extra={"pattern": _SOLO})] = (
        "after 300 seconds"
    )
    """When a peer that finds no group may step alone while others of the run are alive: `never`, `always` or
    `after N seconds`. Waiting keeps weights equal; a peer that others can't reach stands still as long."""

    min_peers: Count = 1
    """The first step of a run waits until so many peers are there, or until each peer's `--wait` is over."""

    norm_limit: NotNegative = 10.0
    """A contribution whose gradient norm is more than so many times the median of its group's is left out,
    and its peer named. Above 1; 0: only what is not finite is left out."""

    robust_mean: bool = False
    """Average by centered clipping (arXiv 2012.10333), for swarms whose members are not all trusted. Costs
    memory for one part of the gradient per peer, and some accuracy where peers' data are unlike."""

    divide_data: bool = True
    """Peers train different samples: a pass over the data covers each once. Of a stream they read different
    files; one of a single file, or one that `dataloader_num_workers` read, is not divided. `false`: each peer
    goes through all of the data in an order of its own."""

    public: Own[bool] = False
    """Anyone who learns an address may join, take the weights and send gradients. By default a swarm is
    closed and takes invitations. Of those that join nothing is asked here."""

    relay: Own[NotNegative | None] = None
    """Mbit/s that this peer passes on at most for members whose routers let nothing in, if others can dial
    it. 0: nothing. Default: no limit."""

    save_minutes: Suggested[NotNegative] = 10.0
    """A checkpoint is written so many minutes after the last one, too (`training.save_steps`). 0: none."""

    def _broken_rules(self) -> Rules:
        modes_of = {
            "communication_share": ["auto"],
            "local_steps": ["diloco", "streaming"],
            "fragments": ["streaming", "auto"],
            "outer_learning_rate": ["diloco", "streaming", "auto"],
            "outer_momentum": ["diloco", "streaming", "auto"],
        }
        for name, modes in modes_of.items():
            if self.mode not in modes and getattr(self, name) != type(self).model_fields[name].default:
                yield f"has no effect in mode {self.mode}: it is for {' and '.join(modes)}", name
        if 0 < self.norm_limit <= 1:
            message = "should be above 1, else honest contributions are left out, or 0 (off)"
            yield f"{message}, got {self.norm_limit}", "norm_limit"

    @property
    def may_step_locally(self) -> bool:
        """Whether peers take steps of their own in this mode, or may come to it."""
        return self.mode not in ("sync", "overlap")

    @property
    def solo_after_s(self) -> float:
        """Seconds behind `solo`: `math.inf` for `never`, 0 for `always`."""
        named = {"never": math.inf, "always": 0.0}
        return named[self.solo] if self.solo in named else float(self.solo.split()[1])


class Recipe(Section):
    """One run, as its starter wrote it and every peer agrees on it."""

    version: Literal[1] = 1
    """Version of this format."""

    name: Name
    """Default: the name of the file."""

    task: Task = "clm"
    """What is learnt: `clm` raw text, `sft` answers and conversations, `dpo` preferences, `kto` good and bad
    answers, `reward` a score of answers, `grpo` completions that earn rewards, `mlm` hidden words (BERT),
    `seq-cls` classes of texts. It has the section of that name, and no other task's."""

    model: ModelSection
    quantization: QuantizationSection | None = None
    peft: PeftSection | None = None
    data: DataSection
    clm: ClmSection | None = None
    sft: SftSection | None = None
    dpo: DpoSection | None = None
    kto: KtoSection | None = None
    reward: RewardSection | None = None
    grpo: GrpoSection | None = None
    mlm: MlmSection | None = None
    seq_cls: SeqClsSection | None = None
    training: TrainingSection
    hivemind_config: HivemindConfig = HivemindConfig()
    swarm: SwarmSection = SwarmSection()

    @model_validator(mode="before")
    @classmethod
    def _section_of_the_task(cls, data: Any) -> Any:
        """Give the task its section if it was left out or empty, with the defaults of its fields."""
        if not isinstance(data, dict):
            return data
        task = data.get("task", "clm")
        own = [section for name, section in TASK_SECTIONS.items() if name == task]
        return data | {section: {} for section in own if data.get(section) is None}

    def _broken_rules(self) -> Rules:
        for task, section in TASK_SECTIONS.items():
            if task != self.task and getattr(self, section) is not None:
                message = f"is about `task: {task}`, and the task of this recipe is `{self.task}`"
                yield f"{message}: change the task, or remove this section", section
        if self.data.chat_template is not None and self.task not in TASKS_OF_TRL:
            message = f"has no effect: `task: {self.task}` reads plain text, not conversations"
            yield message, "data.chat_template"
        if self.quantization is not None and self.peft is None:
            message = "a quantized model can't be trained itself: add a `peft` section to train adapters"
            yield f"{message} on it", "quantization"
        if self.quantization is not None and self.model.config is not None:
            message = "only a model that is loaded can be quantized; `model.config` makes a new one"
            yield message, "quantization"
        training = self.training
        batch = training.per_device_train_batch_size
        if self.kto is not None and self.data.streaming and self.data.shuffle:
            yield "`kto` reads a stream in its own order: write false", "data.shuffle", "data.streaming"
        if self.kto is not None and self.kto.loss_type == "kto" and batch == 1:
            message = "`kto` compares the answers of a batch: write at least 2, or"
            place = "training.per_device_train_batch_size"
            yield f"{message} `kto.loss_type: apo_zero_unpaired`", place, "kto"
        if self.grpo is not None:
            yield from self._broken_rules_of_grpo(self.grpo)
        opt = self.hivemind_config.opt
        local = training.per_device_train_batch_size * training.gradient_accumulation_steps
        if local > opt.target_batch_size:
            yield (
                f"one local batch is {local} samples (training.per_device_train_batch_size x "
                "gradient_accumulation_steps) but hivemind_config.opt.target_batch_size is "
                f"{opt.target_batch_size}: change one of them",
                "hivemind_config.opt.target_batch_size",
                "training.per_device_train_batch_size",
                "training",
            )
        if opt.offload_optimizer is True and self.swarm.may_step_locally:
            message = f"can't be on in mode {self.swarm.mode}: each local step would wait for the CPU"
            remedy = "remove it, or say `swarm: {mode: sync}`"
            yield f"{message}; {remedy}", "hivemind_config.opt.offload_optimizer"

    def _broken_rules_of_grpo(self, grpo: GrpoSection) -> Rules:
        training = self.training
        size = training.per_device_train_batch_size
        generated = size * (grpo.steps_per_generation or training.gradient_accumulation_steps)
        sizes = {"per_device_train_batch_size": generated}
        if self.data.eval.test_split_size > 0:
            sizes["per_device_eval_batch_size"] = training.per_device_eval_batch_size
        for name, number in sizes.items():
            if number % grpo.num_generations:
                message = f"{number} completions are generated at once, and `grpo.num_generations` is"
                remedy = "choose a multiple of it"
                yield (
                    f"{message} {grpo.num_generations}: {remedy}",
                    f"training.{name}",
                    "grpo.num_generations",
                    "grpo",
                )
        if grpo.beta and self.peft is None:
            message = "above 0 compares with the initial model, which only a model with adapters keeps: add a"
            yield f"{message} `peft` section, or write 0", "grpo.beta"
        if self.data.streaming:
            yield "a stream of prompts can't be divided by prompts; read them whole", "data.streaming"

    def to_data(self) -> dict[str, Any]:
        """Return plain data that reads as this recipe again.

        The sections of other tasks are left out, and `content` where there are no local files.
        """
        data = self.model_dump(mode="json")
        for task, section in TASK_SECTIONS.items():
            if task != self.task:
                del data[section]
        for dataset in data["data"]["datasets"]:
            if dataset["content"] is None:
                del dataset["content"]
        return data

    @property
    def section(self) -> TaskSection:
        """The section that is about the recipe's task."""
        section: TaskSection = getattr(self, TASK_SECTIONS[self.task])
        return section

    @property
    def shuffles_passes(self) -> bool:
        """Whether each pass has another order. In `kto`, TRL pairs each sample with one beside it."""
        return self.data.shuffle and self.kto is None

    @property
    def head(self) -> dict[str, Any]:
        """Fields of a transformers config about the head of a model that gives classes or a score."""
        if self.seq_cls is None:
            return {"num_labels": 1} if self.reward is not None else {}
        names = dict(enumerate(self.seq_cls.labels))
        numbers = {label: index for index, label in names.items()}
        return {"id2label": names, "label2id": numbers, "problem_type": "single_label_classification"}

    @property
    def sequences_per_sample(self) -> int:
        """The number of sequences that the model reads for each sample."""
        return 2 if self.task in PAIRED_TASKS else 1

    @property
    def has_reference(self) -> bool:
        """Whether a copy of the initial model is kept, to compare the trained model with."""
        return (self.dpo is not None or self.kto is not None) and self.peft is None

    @property
    def warmup_steps(self) -> int:
        """`training.warmup_steps` as a whole number of swarm steps (a share is rounded up)."""
        share = self.training.warmup_steps
        return int(share) if share >= 1 else math.ceil(share * self.training.max_steps)


# -- fields ---------------------------------------------------------------------------------------


@cache
def sections_of_a_recipe(
    section: type[Section] = Recipe, location: Location = ()
) -> dict[Location, dict[str, FieldInfo]]:
    """Return the fields of a section and of those in it, by location; an entry of a list has the index 0."""
    sections = {location: section.model_fields}
    for name, field in section.model_fields.items():
        if inner := section_in(field.annotation):
            index = (0,) if getattr(field.annotation, "__origin__", None) is list else ()
            sections |= sections_of_a_recipe(inner, (*location, name, *index))
    return sections


def marks_of(location: Location) -> set[str]:
    """Return what a field and the sections that it is in are marked with: `OWN`, `SUGGESTED`, `COMPARED`.

    Args:
        location: of a value, maybe a stranger's; it need not lead to a field.
    """
    sections = sections_of_a_recipe()
    place = general(location)
    fields = (sections.get(place[:end], {}).get(str(place[end])) for end in range(len(place)))
    return {mark for field in fields if field for mark in field.metadata if isinstance(mark, str)}


def general(location: Location) -> Location:
    """Return a location with 0 for the number of each entry of a list."""
    return tuple(0 if isinstance(part, int) else part for part in location)


def section_in(annotation: Any) -> type[Section] | None:
    """Find the section inside `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


# -- for editors ----------------------------------------------------------------------------------


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft-07) of a recipe, with the defaults and descriptions of its fields."""
    schema = Recipe.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs")  # as draft-07 calls it
    schema["required"].remove("name")  # the file's name stands in for it
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "trahiv recipe"}
