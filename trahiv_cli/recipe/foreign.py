"""Tables of other tools' names for settings, and of choices that can't work in a swarm.

A foreign name is never accepted silently; the error shows its entry. Names as of axolotl 0.19,
LLaMA-Factory 0.9, torchtune 0.6, litgpt 0.5, unsloth 2026.10, TRL 1.16, transformers 5.23.
"""

from __future__ import annotations

from typing import Literal, get_args

Tool = Literal["axolotl", "LLaMA-Factory", "TRL", "others"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
"""Three tools, and all others together."""

CALLED_ELSEWHERE: dict[str, dict[Tool, str]] = {
    "`task`, and `pt` is `clm`": {"LLaMA-Factory": "stage"},
    "`model.model_name_or_path`": {"axolotl": "base_model"},
    "`model.dtype`": {"others": "torch_dtype"},
    "`training.bf16` or `training.fp16`": {"others": "precision"},
    "`model.attn_implementation`": {"axolotl": "flash_attention", "LLaMA-Factory": "flash_attn"},
    "`seq_cls.labels`, the names of the classes in the order of their numbers": {
        "axolotl": "num_labels",
        "others": "id2label",
    },
    "`quantization.load_in_4bit` or `quantization.load_in_8bit`": {
        "LLaMA-Factory": "quantization_bit",
        "others": "quantization_config",
    },
    "the section `peft`; without it every weight is trained": {
        "axolotl": "adapter",
        "LLaMA-Factory": "finetuning_type",
        "TRL": "use_peft",
    },
    "`peft.r`": {"axolotl": "lora_r", "LLaMA-Factory": "lora_rank", "TRL": "lora_r"},
    "`peft.target_modules`": {
        "axolotl": "lora_target_modules",
        "LLaMA-Factory": "lora_target",
        "TRL": "lora_target_modules",
    },
    "`peft.target_modules: all-linear`": {"axolotl": "lora_target_linear"},
    "`data.datasets`, a list whose entries have a `path`": {
        "axolotl": "datasets",
        "LLaMA-Factory": "dataset",
        "TRL": "dataset_name datasets",
    },
    "`data.eval.test_split_size`, a share of the data": {
        "axolotl": "val_set_size",
        "LLaMA-Factory": "val_size eval_dataset",
    },
    "`dataset_text_field` in the task's section": {"axolotl": "text_column"},
    "`clm.packing` or `sft.packing`": {"axolotl": "sample_packing"},
    "`max_length` in the task's section": {
        "axolotl": "sequence_len",
        "LLaMA-Factory": "cutoff_len",
        "others": "max_seq_length",
    },
    "`grpo.rewards`, a list of names": {"TRL": "reward_funcs", "others": "reward_functions"},
    "`data.chat_template`, a `.jinja` file; without it the tokenizer's own": {"LLaMA-Factory": "template"},
    "`sft.completion_only_loss`, the other way round": {"axolotl": "train_on_inputs"},
    "`training.per_device_train_batch_size`": {"axolotl": "micro_batch_size", "others": "batch_size"},
    "`hivemind_config.opt.target_batch_size`": {"others": "global_batch_size"},
    "`training.learning_rate`": {"others": "lr"},
    "`training.lr_scheduler_type`": {"axolotl": "lr_scheduler"},
    "`training.optim`": {"axolotl": "optimizer"},
    "`training.warmup_steps`, where a value below 1 is a share": {
        "axolotl": "warmup_ratio",
        "LLaMA-Factory": "warmup_ratio",
    },
    "`training.max_steps`: a swarm's length is counted in its steps": {
        "axolotl": "num_epochs",
        "LLaMA-Factory": "num_train_epochs",
        "TRL": "num_train_epochs",
        "others": "epochs",
    },
    "`training.activation_checkpointing`": dict.fromkeys(TOOLS[:3], "gradient_checkpointing"),
    "`training.report_to: [wandb]`": {"axolotl": "wandb_project"},
    "nothing: trahiv never runs code that a model or dataset brings": dict.fromkeys(
        TOOLS[:3], "trust_remote_code"
    ),
    "the option `--output-dir` of `init` and `join`": dict.fromkeys(TOOLS[:3], "output_dir"),
    "nothing: the same command resumes the run": dict.fromkeys(TOOLS[:3], "resume_from_checkpoint"),
}
"""Setting here -> tool -> the tool's names for it, separated by spaces."""

FOREIGN: dict[str, str] = {
    name: here
    for here, tools in CALLED_ELSEWHERE.items()
    for names in tools.values()
    for name in names.split()
}
"""Foreign name -> the setting here."""

FOREIGN_CHOICES = {
    "pretrain": "clm",
    "chat": "sft",
    "instruct": "sft",
    "rm": "reward",
    "reward-modeling": "reward",
    "fill-mask": "mlm",
    "classification": "seq-cls",
    "text-classification": "seq-cls",
    "meanstd16": "float16",  # hivemind's name of a codec, as is the next
    "quantile8": "blockwise8",
}
"""Other tools' names of tasks and codecs -> the choice here."""

REFUSED_CHOICES: dict[str, dict[str, tuple[str, str]]] = {
    "training.optim": dict.fromkeys(
        ("lomo", "adalomo", "galore_adamw", "galore_adafactor", "apollo_adamw", "schedule_free_adamw"),
        ("its weights or state can't be averaged or sent", "use `adamw_torch`; `adamw_8bit` saves memory"),
    ),
    "training.lr_scheduler_type": dict.fromkeys(
        ("reduce_lr_on_plateau", "greedy"),
        ("it follows a loss that each peer measures for itself", "use `cosine` or `warmup_stable_decay`"),
    ),
    **dict.fromkeys(
        ("hivemind_config.opt.state_averaging_compression", "hivemind_config.opt.load_state_compression"),
        {
            "blockwise4": (
                "a tenth of each weight would be lost for good, while gradients bring what is lost next time",
                "use `blockwise8`, `float16` or `none`; `grad_compression: blockwise4` is for gradients",
            )
        },
    ),
}
"""Field -> choice that can't work in a swarm -> (the reason, what to do instead)."""
