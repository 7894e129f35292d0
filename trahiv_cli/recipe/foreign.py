"""Tables of other tools' names for settings, and of choices that can't work in a swarm.

A foreign name is never accepted silently; the error shows its entry. Names as of axolotl 0.19,
LLaMA-Factory 0.9, torchtune 0.6, litgpt 0.5, unsloth 2026.10, TRL 1.16, transformers 5.23.
"""

from __future__ import annotations

TOOLS = (AXOLOTL, LLAMA_FACTORY, TRL, OTHERS) = ("axolotl", "LLaMA-Factory", "TRL", "others")
_EACH = (AXOLOTL, LLAMA_FACTORY, TRL)

CALLED_ELSEWHERE: dict[str, dict[str, str]] = {
    "`task`, and `pt` is `clm`": {LLAMA_FACTORY: "stage"},
    "`model.model_name_or_path`": {AXOLOTL: "base_model"},
    "`model.dtype`": {OTHERS: "torch_dtype"},
    "`training.bf16` or `training.fp16`": {OTHERS: "precision"},
    "`model.attn_implementation`": {AXOLOTL: "flash_attention", LLAMA_FACTORY: "flash_attn"},
    "`seq_cls.labels`, the names of the classes in the order of their numbers": {
        AXOLOTL: "num_labels",
        OTHERS: "id2label",
    },
    "`quantization.load_in_4bit` or `quantization.load_in_8bit`": {
        LLAMA_FACTORY: "quantization_bit",
        OTHERS: "quantization_config",
    },
    "the section `peft`; without it every weight is trained": {
        AXOLOTL: "adapter",
        LLAMA_FACTORY: "finetuning_type",
        TRL: "use_peft",
    },
    "`peft.r`": {AXOLOTL: "lora_r", LLAMA_FACTORY: "lora_rank", TRL: "lora_r"},
    "`peft.target_modules`": {
        AXOLOTL: "lora_target_modules",
        LLAMA_FACTORY: "lora_target",
        TRL: "lora_target_modules",
    },
    "`peft.target_modules: all-linear`": {AXOLOTL: "lora_target_linear"},
    "`data.datasets`, a list whose entries have a `path`": {
        AXOLOTL: "datasets",
        LLAMA_FACTORY: "dataset",
        TRL: "dataset_name datasets",
    },
    "`data.eval.test_split_size`, a share of the data": {
        AXOLOTL: "val_set_size",
        LLAMA_FACTORY: "val_size eval_dataset",
    },
    "`dataset_text_field` in the task's section": {AXOLOTL: "text_column"},
    "`clm.packing` or `sft.packing`": {AXOLOTL: "sample_packing"},
    "`max_length` in the task's section": {
        AXOLOTL: "sequence_len",
        LLAMA_FACTORY: "cutoff_len",
        OTHERS: "max_seq_length",
    },
    "`data.chat_template`, a `.jinja` file; without it the tokenizer's own": {LLAMA_FACTORY: "template"},
    "`sft.completion_only_loss`, the other way round": {AXOLOTL: "train_on_inputs"},
    "`training.per_device_train_batch_size`": {AXOLOTL: "micro_batch_size", OTHERS: "batch_size"},
    "`hivemind_config.opt.target_batch_size`": {OTHERS: "global_batch_size"},
    "`training.learning_rate`": {OTHERS: "lr"},
    "`training.lr_scheduler_type`": {AXOLOTL: "lr_scheduler"},
    "`training.optim`": {AXOLOTL: "optimizer"},
    "`training.warmup_steps`, where a value below 1 is a share": {
        AXOLOTL: "warmup_ratio",
        LLAMA_FACTORY: "warmup_ratio",
    },
    "`training.max_steps`: a swarm's length is counted in its steps": {
        AXOLOTL: "num_epochs",
        LLAMA_FACTORY: "num_train_epochs",
        TRL: "num_train_epochs",
        OTHERS: "epochs",
    },
    "`training.activation_checkpointing`": dict.fromkeys(_EACH, "gradient_checkpointing"),
    "`training.report_to: [wandb]`": {AXOLOTL: "wandb_project"},
    "nothing: trahiv never runs code that a model or dataset brings": dict.fromkeys(
        _EACH, "trust_remote_code"
    ),
    "the option `--output-dir` of `init` and `join`": dict.fromkeys(_EACH, "output_dir"),
    "nothing: the same command resumes the run": dict.fromkeys(_EACH, "resume_from_checkpoint"),
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
