"""What other tools call things, what can't be in a swarm, what is not built yet: tables, nothing else.

A foreign name is never accepted in silence; its entry is what the error says. Names as of axolotl 0.19,
LLaMA-Factory 0.9, torchtune 0.6, litgpt 0.5, unsloth 2026.10, TRL 1.16, transformers 5.23.
"""

from __future__ import annotations

OF_THE_TASK = "{section}"
"""Stands, in an entry of `FOREIGN`, for the section of the recipe's own task."""

_LENGTH = "`training.max_steps`: a swarm's length is counted in its steps"
_RESUMES = "nothing: the same command goes on where the run stopped"

FOREIGN: dict[str, tuple[str, str]] = {
    "stage": ("LLaMA-Factory", "`task`, and its `pt` is `clm`"),
    "base_model": ("axolotl", "`model.model_name_or_path`"),
    "model_name": ("unsloth", "`model.model_name_or_path`"),
    "tokenizer": ("torchtune", "`model.tokenizer_name_or_path`"),
    "torch_dtype": ("older transformers", "`model.dtype`"),
    "precision": ("litgpt", "`training.bf16` or `training.fp16`"),
    "flash_attention": ("axolotl", "`model.attn_implementation`"),
    "flash_attn": ("LLaMA-Factory", "`model.attn_implementation`"),
    "num_labels": ("transformers", "`seq_cls.labels`, the names of the classes"),
    "id2label": ("transformers", "`seq_cls.labels`, the names of the classes in the order of their numbers"),
    "quantization_bit": ("LLaMA-Factory", "`quantization.load_in_4bit` or `quantization.load_in_8bit`"),
    "quantization_config": ("transformers", "the section `quantization`"),
    "adapter": (
        "axolotl",
        "the section `peft`, and for its `qlora` also `quantization: {load_in_4bit: true}`",
    ),
    "finetuning_type": ("LLaMA-Factory", "the section `peft`; without it every weight is trained"),
    "use_peft": ("TRL", "the section `peft`; without it every weight is trained"),
    "lora_r": ("axolotl", "`peft.r`"),
    "lora_rank": ("LLaMA-Factory", "`peft.r`"),
    "lora_target_modules": ("axolotl", "`peft.target_modules`"),
    "lora_target_linear": ("axolotl", "`peft.target_modules: all-linear`"),
    "lora_target": ("LLaMA-Factory", "`peft.target_modules`"),
    "dataset": ("LLaMA-Factory", "`data.datasets`, a list whose entries have a `path`"),
    "dataset_name": ("TRL", "`data.datasets.0.path`"),
    "datasets": ("axolotl", "`data.datasets`"),
    "eval_dataset": ("LLaMA-Factory", "`data.eval.test_split_size`, a share of the data"),
    "text_column": ("AutoTrain", "`{section}.dataset_text_field`"),
    "sample_packing": ("axolotl", "`{section}.packing`"),
    "sequence_len": ("axolotl", "`{section}.max_length`"),
    "cutoff_len": ("LLaMA-Factory", "`{section}.max_length`"),
    "max_seq_length": ("unsloth", "`{section}.max_length`"),
    "template": ("LLaMA-Factory", "`data.chat_template`, a `.jinja` file; without it the tokenizer's own"),
    "train_on_inputs": ("axolotl", "`sft.completion_only_loss`, the other way round"),
    "val_set_size": ("axolotl", "`data.eval.test_split_size`"),
    "val_size": ("LLaMA-Factory", "`data.eval.test_split_size`"),
    "micro_batch_size": ("axolotl", "`training.per_device_train_batch_size`"),
    "batch_size": ("torchtune", "`training.per_device_train_batch_size`"),
    "global_batch_size": ("litgpt", "`hivemind_config.opt.target_batch_size`"),
    "optimizer": ("axolotl", "`training.optim`"),
    "lr": ("AutoTrain", "`training.learning_rate`"),
    "lr_scheduler": ("axolotl", "`training.lr_scheduler_type`"),
    "warmup_ratio": ("axolotl", "`training.warmup_steps`, where a value below 1 is a share"),
    "num_epochs": ("axolotl", _LENGTH),
    "num_train_epochs": ("transformers", _LENGTH),
    "epochs": ("torchtune", _LENGTH),
    "gradient_checkpointing": ("older transformers", "`training.activation_checkpointing`"),
    "wandb_project": ("axolotl", "`training.report_to: [wandb]`"),
    "output_dir": ("transformers", "the option `--output-dir` of `init` and `join`"),
    "resume_from_checkpoint": ("transformers", _RESUMES),
    "initial_peers": ("hivemind.DHT", "`hivemind_config.dht.initial_peers`, or `join --peer`"),
}
"""Foreign name -> (who calls it so, what it is here)."""

FOREIGN_CHOICES: dict[str, dict[str, str]] = {
    "task": {
        "pretrain": "clm",
        "chat": "sft",
        "instruct": "sft",
        "fill-mask": "mlm",
        "classification": "seq-cls",
        "text-classification": "seq-cls",
    },
    "training.optim": {"adamw": "adamw_torch", "adamw_hf": "adamw_torch", "adamw_8bits": "adamw_8bit"},
    **dict.fromkeys(
        (
            "hivemind_config.opt.grad_compression",
            "hivemind_config.opt.state_averaging_compression",
            "hivemind_config.opt.load_state_compression",
        ),
        {"meanstd16": "float16", "quantile8": "blockwise8"},  # hivemind's
    ),
}
"""Field -> what other tools choose there -> the choice that means it."""

MEANINGLESS: dict[str, str] = {
    "packing": "packing joins samples into one row, and `task: {task}` has one in each: remove it",
    "dataset_text_field": "`task: {task}` has no text column: rename columns with `data.datasets.0.columns`",
}
"""Fields of some tasks' sections -> why the other tasks have none."""

UNBUILT_KEYS = frozenset(
    """
    hub push_to_hub hub_model_id hub_strategy
    kto orpo simpo reward grpo
    system_prompt padding_free eval_packing truncation_mode precompute_ref_log_probs sync_ref_model
    f_divergence_type use_weighting ld_alpha
    init_lora_weights target_parameters layers_to_transform rank_pattern alpha_pattern
    bnb_4bit_quant_storage llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    use_kernels use_liger_kernel activation_offloading tf32 neftune_noise_alpha label_smoothing_factor
    delay_optimizer_step delay_grad_averaging delay_state_averaging use_local_updates auxiliary
    """.split()
)
"""Keys that belong in a recipe one day. `trust_remote_code` is not one: a recipe must not bring code."""

UNBUILT_CHOICES: dict[str, frozenset[str]] = {
    "task": frozenset("kto orpo simpo rm reward grpo ppo rloo seq2seq token-classification".split()),
}
"""Choices that transformers, TRL or our own contract knows and this version does not offer."""

_REFUSED_OPTIMIZERS: dict[str, tuple[str, str]] = {
    "galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise apollo_adamw_layerwise": (
        "it updates each layer in a hook during the backward pass, before there is an averaged gradient",
        "`adamw_8bit`, or adapters (`peft`), save memory too",
    ),
    "lomo adalomo": (
        "it updates weights during the backward pass and keeps no gradient that could be averaged",
        "`adamw_8bit`, or adapters (`peft`), save memory too",
    ),
    "galore_adamw galore_adamw_8bit galore_adafactor apollo_adamw": (
        "its state holds projections that are no tensors and can't travel to a joiner",
        "`adamw_8bit`, or adapters (`peft`), save memory too",
    ),
    "schedule_free_radam schedule_free_adamw schedule_free_sgd": (
        "it keeps two sets of weights and must be switched between them, so that what peers average is not "
        "what is evaluated and saved",
        "`adamw_torch` with `lr_scheduler_type: constant_with_warmup` needs no end of the run either",
    ),
    "adamw_torch_4bit adamw_torch_8bit": (
        "its state is in torchao's own kind of tensors, which can't travel to a joiner",
        "use `adamw_8bit`",
    ),
    "grokadamw": (
        "it keeps its state among its settings, where neither a joiner nor a checkpoint finds it",
        "use `adamw_torch` or `ademamix`",
    ),
    "adamw_torch_xla adamw_torch_npu_fused": (
        "peers train on CPUs and NVIDIA GPUs, and this is for another device",
        "use `adamw_torch`",
    ),
    "adamw_anyprecision": (
        "its package torchdistx is no longer maintained",
        "use `adamw_torch`; trained weights are float32 anyway",
    ),
}

REFUSED_CHOICES: dict[str, dict[str, tuple[str, str]]] = {
    "training.optim": {name: why for names, why in _REFUSED_OPTIMIZERS.items() for name in names.split()},
    "training.lr_scheduler_type": dict.fromkeys(
        ("reduce_lr_on_plateau", "greedy"),
        (
            "it follows a loss that each peer measures for itself, so that rates would differ",
            "use `cosine` or `warmup_stable_decay`",
        ),
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
"""Field -> choice, known from transformers or another field, that can't work in a swarm -> (the reason, what
to do instead)."""
