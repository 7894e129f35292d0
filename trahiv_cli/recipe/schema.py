"""What a run is: every word a recipe may say, its unit, its default and the reason for it.

Sections mirror one upstream class each and use its field names, so that upstream's documentation
applies. Nothing here loads torch, transformers or hivemind; values that only those can judge (is this
optimizer known? does this dataset have that column?) are checked where they are used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,48}$")]
"""Letters, digits, `-` and `_`, at most 48: it becomes a folder, a DHT key and a libp2p namespace."""

Task = Literal["clm"]

CompressionName = Literal["none", "float16", "meanstd16", "uniform8", "quantile8", "blockwise8"]

OptimName = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "adagrad",
    "rmsprop",
    "sgd",
]

SchedulerName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]


def broken_rule(message: str, *places: str) -> PydanticCustomError:
    """Make the error of a rule between fields; `places` are where to point, the first that was written."""
    return PydanticCustomError("broken_rule", "{message}", {"message": message, "places": places})


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, nothing is converted, values are frozen once checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # `max_steps: true` is no step and `fp16: "no"` is no choice
        validate_default=True,  # so that a default of 32 and a written 32 are the same float
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class ModelSection(Section):
    """`from_pretrained`, or `config` to train a model from scratch."""

    model_name_or_path: str | None = None
    """Hub id or local folder of a causal language model. Either this or `config`."""

    config: dict[str, Any] | None = None
    """A `transformers` config to build from scratch: `model_type` and its fields. No download."""

    revision: str = "main"
    """Branch, tag or commit of a hub model."""

    tokenizer_name_or_path: str | None = None
    """Hub id or local folder; `builtin/bytes` is transformers' ByT5 tokenizer, which needs no file.
    Default: the model's own; required with `config`."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """How frozen weights are held; trainable weights are always float32. `auto` asks the checkpoint."""

    attn_implementation: str = "auto"
    """`auto` leaves the choice to transformers (sdpa where the model has it), or one of its names."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model_name_or_path is None) == (self.config is None):
            raise broken_rule(
                "give either `model_name_or_path` or `config`, not both and not neither",
                "model.config",
                "model",
            )
        if self.config is not None:
            if "model_type" not in self.config:
                raise broken_rule("`config` needs a `model_type`, for example `llama`", "model.config")
            if self.tokenizer_name_or_path is None:
                raise broken_rule(
                    "`config` needs a `tokenizer_name_or_path`: a new model has none of its own",
                    "model.config",
                )
        return self


class PeftSection(Section):
    """`peft.LoraConfig`. Absent: every weight is trained."""

    r: Annotated[int, Field(ge=1)] = 16
    """Rank of the adapters."""

    lora_alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the adapters; the update is multiplied by lora_alpha / r."""

    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0 keeps peers comparable and the fused kernels in use."""

    target_modules: str | list[str] = "all-linear"
    """`all-linear`, or the names of the layers to adapt."""

    modules_to_save: list[str] = []
    """Layers trained in full beside the adapters."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)."""

    use_dora: bool = False
    """Weight-decomposed adapters (DoRA): slower, sometimes better at low rank."""


class DatasetSection(Section):
    """One call of `datasets.load_dataset`."""

    path: str
    """Hub id, local folder, file (`.txt .jsonl .json .csv .parquet`) or glob; `builtin/python-stdlib`
    is the source text of the running Python's standard library, which every machine has."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str = "train"
    """Split to train on."""

    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""

    data_files: str | list[str] | None = None
    """Files inside a hub dataset or folder."""

    @field_validator("path")
    @classmethod
    def _not_empty(cls, path: str) -> str:
        if not path.strip():
            raise ValueError("is empty: name a hub dataset, a folder or a file")
        return path


class EvalSection(Section):
    """What is held out from training, to measure with."""

    test_split_size: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents (below 1) that is held out. Every peer holds out the same ones.
    With `streaming` it must be 0."""


class DataSection(Section):
    """What is trained on."""

    datasets: Annotated[list[DatasetSection], Field(min_length=1)]
    """One or more datasets, read one after the other and then shuffled together."""

    eval: EvalSection = EvalSection()

    shuffle: bool = True
    """Each peer shuffles with a seed of its own, derived from `training.seed` and its peer id."""

    streaming: bool = False
    """Read while training, in bounded memory and disk, instead of before it."""

    num_proc: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenize. Default: one."""

    @model_validator(mode="after")
    def _no_split_of_a_stream(self) -> Self:
        if self.streaming and self.eval.test_split_size:
            raise broken_rule(
                "`streaming` has no known length, so `eval.test_split_size` must be 0",
                "data.eval.test_split_size",
            )
        return self


class ClmSection(Section):
    """Raw-text training: every token of the text is predicted from those before it."""

    dataset_text_field: str = "text"
    """The column that holds the text (TRL's name for it)."""

    max_length: Annotated[int, Field(ge=2)] = 1024
    """Tokens in a block."""

    packing: bool = True
    """Join documents, with the end-of-text token between them, and cut blocks of exactly `max_length`;
    otherwise one document is one sample, cut off at `max_length`."""


def _auto_or_bool(value: object) -> object:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError(f"expected auto, true or false, got {value!r}")
    return value


AutoBool = Annotated[bool | Literal["auto"], BeforeValidator(_auto_or_bool)]


class TrainingSection(Section):
    """`transformers.TrainingArguments`. Steps are steps of the whole swarm."""

    max_steps: Annotated[int, Field(ge=1)]
    """The run ends here. Local passes over the data repeat as needed."""

    per_device_train_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples in one forward pass on this peer; peers may differ."""

    per_device_eval_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples in one forward pass of an evaluation."""

    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Local. Leave at 1: the swarm accumulates."""

    learning_rate: Annotated[float, Field(ge=0)] = 2e-4
    lr_scheduler_type: SchedulerName = "cosine"
    lr_scheduler_kwargs: dict[str, Any] = {}
    warmup_steps: Annotated[float, Field(ge=0)] = 0.03
    """A whole number of steps, or a share of `max_steps` if below 1."""

    optim: OptimName = "adamw_torch"
    optim_args: str | None = None
    """`key=value,key=value`, as in TrainingArguments."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Applied once per step, to the averaged gradient. 0: not at all."""

    bf16: AutoBool = "auto"
    """Compute in bfloat16. `auto`: where the GPU has it; never on a CPU."""

    fp16: bool = False
    """Compute in float16, with loss scaling; for GPUs without bfloat16."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    torch_compile: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Shared: it draws the same initial weights on every peer. Data order and dropout differ by peer."""

    logging_steps: Annotated[int, Field(ge=1)] = 1
    eval_steps: Annotated[int, Field(ge=0)] = 0
    """Evaluate on the held-out share every so many steps; 0: only at the end, if there is one."""

    save_steps: Annotated[int, Field(ge=0)] = 100
    """Write a checkpoint every so many steps, besides the one at each clean stop. 0: only that one."""

    save_total_limit: Annotated[int, Field(ge=1)] = 2
    """Older checkpoints are deleted."""

    dataloader_num_workers: Annotated[int, Field(ge=0)] = 0
    report_to: list[str] = []
    """Trackers that transformers knows: tensorboard, wandb, trackio, mlflow..."""

    @model_validator(mode="after")
    def _one_precision(self) -> Self:
        if self.fp16 and self.bf16 is True:
            raise broken_rule("`fp16` and `bf16` are both on: choose one", "training.fp16")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise broken_rule(
                f"expected a whole number, or a share below 1, got {self.warmup_steps}",
                "training.warmup_steps",
            )
        return self


class DhtSection(Section):
    """Keywords of `hivemind.DHT`; this peer's own."""

    initial_peers: list[str] = []
    """Multiaddrs of peers to join; usually given by `join --peer`."""

    host_maddrs: list[str] = ["/ip4/0.0.0.0/tcp/0"]
    """Where to listen; port 0 takes a free one. QUIC (`/ip4/0.0.0.0/udp/0/quic-v1`) can be added; it is
    not the default, because libp2p then prefers it, and rounds of three peers on loopback stalled for
    20 s in every second run with it, never with TCP."""

    announce_maddrs: list[str] = []
    """Addresses to tell others, where a router forwards a port to this machine."""

    identity_path: str | None = None
    """Key file that fixes the peer id. Default: `identity.key` in the run's folder."""

    client_mode: bool = False
    """Dial out only: for a network that lets nothing in. Cannot lead rounds or share the state."""

    use_relay: bool = True
    use_auto_relay: bool = False
    use_ipfs: bool = False
    auto_nat: bool = True
    nat_port_map: bool = True
    """Ask the router (UPnP, NAT-PMP) to forward the port."""

    startup_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for the network daemon to start. Raise it at "daemon failed to start"."""

    wait_timeout: Annotated[float, Field(gt=0)] = 3.0
    """Seconds for one DHT request."""


class OptSection(Section):
    """Keywords of `hivemind.Optimizer`."""

    run_id: Name | None = None
    """Name of the run in the DHT. Default: the recipe's name and 8 digits of its agreement."""

    target_batch_size: Annotated[int, Field(ge=1)] = 256
    """Samples per step over all peers."""

    matchmaking_time: Annotated[float, Field(gt=0)] = 5.0
    """Seconds a peer waits for others to join its group; a full group starts at once."""

    averaging_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one round, group and exchange together; then it is tried again."""

    allreduce_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds for the exchange alone. Default: `averaging_timeout`."""

    next_chunk_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds without a byte from a groupmate before it is left out. Default: `matchmaking_time`, but at
    least 10. Raise it at "a groupmate left before it had returned its share"."""

    load_state_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for the download of the swarm's state."""

    offload_optimizer: AutoBool = "auto"
    """Keep optimizer state on the CPU and step there. `auto`: yes, except for 8-bit and paged optimizers."""

    average_state_every: Annotated[int, Field(ge=1)] = 10
    """Average the weights too, every so many steps. Averaged gradients are bit-equal on every peer, so
    this only removes what unlike processors round differently in the optimizer step."""

    client_mode: bool | None = None
    """Default: as the DHT."""

    grad_compression: CompressionName = "none"
    state_averaging_compression: CompressionName = "none"
    load_state_compression: CompressionName = "none"

    averager_opts: dict[str, Any] = {}
    tracker_opts: dict[str, Any] = {}
    performance_ema_alpha: Annotated[float, Field(gt=0, le=1)] = 0.1
    shutdown_timeout: Annotated[float, Field(gt=0)] = 5.0
    verbose: bool = False


class HivemindConfig(Section):
    """`{dht: hivemind.DHT keywords, opt: hivemind.Optimizer keywords}`, as `SwarmTrainer` takes it."""

    dht: DhtSection = DhtSection()
    opt: OptSection = OptSection()


class SwarmSection(Section):
    """What is ours."""

    mode: Literal["sync"] = "sync"
    """`sync`: gradients are averaged once per `target_batch_size` samples; all peers step together."""


class Recipe(Section):
    """One run, as its starter wrote it and every peer agrees on it."""

    version: Literal[1] = 1
    """Version of this format."""

    name: Name
    """Default: the name of the file."""

    task: Task = "clm"
    """What is learnt: `clm` is raw-text language modelling."""

    model: ModelSection
    peft: PeftSection | None = None
    data: DataSection
    clm: ClmSection = ClmSection()
    training: TrainingSection
    hivemind_config: HivemindConfig = HivemindConfig()
    swarm: SwarmSection = SwarmSection()

    @model_validator(mode="after")
    def _local_batch_fits(self) -> Self:
        training, target = self.training, self.hivemind_config.opt.target_batch_size
        local = training.per_device_train_batch_size * training.gradient_accumulation_steps
        if local > target:
            raise broken_rule(
                f"one local batch is {local} samples (training.per_device_train_batch_size x "
                f"gradient_accumulation_steps) but hivemind_config.opt.target_batch_size is {target}",
                "hivemind_config.opt.target_batch_size",
                "training.per_device_train_batch_size",
                "training",
            )
        return self

    @property
    def warmup_steps(self) -> int:
        """`training.warmup_steps` as a whole number of swarm steps (a share is rounded up)."""
        share = self.training.warmup_steps
        return int(share) if share >= 1 else -int(-share * self.training.max_steps // 1)
