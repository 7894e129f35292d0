"""What other tools call things, and choices that can't be in a swarm: tables, nothing else.

A foreign name is never accepted in silence; its entry is what the error says. Names as of axolotl 0.19,
LLaMA-Factory 0.9, torchtune 0.6, litgpt 0.5, unsloth 2026.10, TRL 1.16, transformers 5.23.
"""

from __future__ import annotations

_CALLED_ELSEWHERE: dict[str, str] = {
    "`task`, and `pt` is `clm`": "stage",
    "`model.model_name_or_path`": "base_model",
    "`model.dtype`": "torch_dtype",
    "`training.bf16` or `training.fp16`": "precision",
    "`model.attn_implementation`": "flash_attention flash_attn",
    "`seq_cls.labels`, the names of the classes in the order of their numbers": "num_labels id2label",
    "`quantization.load_in_4bit` or `quantization.load_in_8bit`": "quantization_bit quantization_config",
    "the section `peft`; without it every weight is trained": "adapter finetuning_type use_peft",
    "`peft.r`": "lora_r lora_rank",
    "`peft.target_modules`": "lora_target_modules lora_target",
    "`peft.target_modules: all-linear`": "lora_target_linear",
    "`data.datasets`, a list whose entries have a `path`": "dataset dataset_name datasets",
    "`data.eval.test_split_size`, a share of the data": "eval_dataset val_set_size val_size",
    "`dataset_text_field` in the task's section": "text_column",
    "`clm.packing` or `sft.packing`": "sample_packing",
    "`max_length` in the task's section": "sequence_len cutoff_len max_seq_length",
    "`data.chat_template`, a `.jinja` file; without it the tokenizer's own": "template",
    "`sft.completion_only_loss`, the other way round": "train_on_inputs",
    "`training.per_device_train_batch_size`": "micro_batch_size batch_size",
    "`hivemind_config.opt.target_batch_size`": "global_batch_size",
    "`training.learning_rate`": "lr",
    "`training.warmup_steps`, where a value below 1 is a share": "warmup_ratio",
    "`training.max_steps`: a swarm's length is counted in its steps": "num_epochs num_train_epochs epochs",
    "`training.activation_checkpointing`": "gradient_checkpointing",
    "`training.report_to: [wandb]`": "wandb_project",
    "nothing: trahiv never runs code that a model or dataset brings": "trust_remote_code",
    "the option `--output-dir` of `init` and `join`": "output_dir",
    "nothing: the same command goes on where the run stopped": "resume_from_checkpoint",
}

FOREIGN: dict[str, str] = {name: here for here, names in _CALLED_ELSEWHERE.items() for name in names.split()}
"""Foreign name -> what it is here."""

FOREIGN_CHOICES = {
    "pretrain": "clm",
    "chat": "sft",
    "instruct": "sft",
    "fill-mask": "mlm",
    "classification": "seq-cls",
    "text-classification": "seq-cls",
    "meanstd16": "float16",  # a codec of hivemind's, as is the next
    "quantile8": "blockwise8",
}
"""What other tools choose, of tasks and codecs -> the choice here that means it."""

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
