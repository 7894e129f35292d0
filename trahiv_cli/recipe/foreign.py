"""What other tools call things, what can't be in a swarm, what is not built yet: tables, nothing else.

A foreign name is never accepted in silence; its entry is what the error says. Names as of axolotl 0.19,
LLaMA-Factory 0.9, torchtune 0.6, litgpt 0.5, unsloth 2026.10, ludwig 0.11, AutoTrain 0.8, TRL 1.16,
transformers 5.23.
"""

from __future__ import annotations

OF_THE_TASK = "{section}"
"""Stands, in an entry of `FOREIGN`, for the section of the recipe's own task."""

FOREIGN: dict[str, tuple[str, str]] = {
    # the task
    "stage": ("LLaMA-Factory", "`task`, and its `pt` is `clm`"),
    "rl": ("axolotl", "`task`"),
    "trainer": ("AutoTrain", "`task`"),
    # the model
    "base_model": ("axolotl", "`model.model_name_or_path`"),
    "checkpoint_dir": ("litgpt", "`model.model_name_or_path`"),
    "model_name": ("unsloth", "`model.model_name_or_path`"),
    "revision_of_model": ("axolotl", "`model.revision`"),
    "model_revision": ("LLaMA-Factory", "`model.revision`"),
    "tokenizer": ("torchtune", "`model.tokenizer_name_or_path`"),
    "torch_dtype": ("older transformers", "`model.dtype`"),
    "precision": ("litgpt", "`training.bf16` or `training.fp16`"),
    "mixed_precision": ("AutoTrain", "`training.bf16` or `training.fp16`"),
    "flash_attention": ("axolotl", "`model.attn_implementation`"),
    "flash_attn": ("LLaMA-Factory", "`model.attn_implementation`"),
    "use_flash_attention_2": ("AutoTrain", "`model.attn_implementation`"),
    "num_labels": ("transformers", "`seq_cls.labels`, the names of the classes"),
    "id2label": ("transformers", "`seq_cls.labels`, the names of the classes in the order of their numbers"),
    "ref_model": ("LLaMA-Factory", "nothing: the reference is the model as it was at the start"),
    "model_ref": ("AutoTrain", "nothing: the reference is the model as it was at the start"),
    # quantization
    "quantization_bit": ("LLaMA-Factory", "`quantization.load_in_4bit` or `quantization.load_in_8bit`"),
    "quantization_method": ("LLaMA-Factory", "the section `quantization`, which is for bitsandbytes"),
    "quantization_type": ("LLaMA-Factory", "`quantization.bnb_4bit_quant_type`"),
    "double_quantization": ("LLaMA-Factory", "`quantization.bnb_4bit_use_double_quant`"),
    "use_bnb_nested_quant": ("TRL", "`quantization.bnb_4bit_use_double_quant`"),
    "bnb_config_kwargs": ("axolotl", "the section `quantization`"),
    "quantization_config": ("transformers", "the section `quantization`"),
    "quantize": ("litgpt", "the section `quantization`; its `bnb.nf4` is `load_in_4bit: true`"),
    "bits": ("ludwig", "`quantization.load_in_4bit` or `quantization.load_in_8bit`"),
    # adapters
    "adapter": (
        "axolotl",
        "the section `peft`, and for its `qlora` also `quantization: {load_in_4bit: true}`; without `peft` "
        "every weight is trained",
    ),
    "use_qlora": ("unsloth", "the section `peft` with `quantization: {load_in_4bit: true}`"),
    "finetuning_type": ("LLaMA-Factory", "the section `peft`; without it every weight is trained"),
    "training_type": ("unsloth", "the section `peft`; without it every weight is trained"),
    "use_peft": ("TRL", "the section `peft`; without it every weight is trained"),
    "lora": ("unsloth", "the section `peft`"),
    "lora_r": ("axolotl", "`peft.r`"),
    "lora_rank": ("LLaMA-Factory", "`peft.r`"),
    "rank": ("torchtune", "`peft.r`"),
    "alpha": ("ludwig", "`peft.lora_alpha`"),
    "lora_target_modules": ("axolotl", "`peft.target_modules`"),
    "lora_target_linear": ("axolotl", "`peft.target_modules: all-linear`"),
    "lora_target": ("LLaMA-Factory", "`peft.target_modules`"),
    "lora_attn_modules": ("torchtune", "`peft.target_modules`"),
    "lora_modules_to_save": ("axolotl", "`peft.modules_to_save`"),
    "additional_target": ("LLaMA-Factory", "`peft.modules_to_save`"),
    "peft_use_dora": ("axolotl", "`peft.use_dora`"),
    "peft_use_rslora": ("axolotl", "`peft.use_rslora`"),
    # the data
    "dataset": ("LLaMA-Factory", "`data.datasets`, a list whose entries have a `path`"),
    "dataset_name": ("TRL", "`data.datasets.0.path`"),
    "dataset_config": ("TRL", "`data.datasets.0.name`"),
    "dataset_train_split": ("TRL", "`data.datasets.0.split`"),
    "datasets": ("axolotl", "`data.datasets`"),
    "test_datasets": ("axolotl", "`data.eval.test_split_size`, a share of the data"),
    "dataset_test_split": ("TRL", "`data.eval.test_split_size`, a share of the data"),
    "eval_dataset": ("LLaMA-Factory", "`data.eval.test_split_size`, a share of the data"),
    "dataset_streaming": ("TRL", "`data.streaming`"),
    "data_dir": ("datasets", "the `path` itself, which may be a folder"),
    "ds_type": ("axolotl", "nothing: how a file is read follows from its suffix"),
    "file_name": ("LLaMA-Factory", "`data.datasets.0.path`"),
    "interleave_probs": ("LLaMA-Factory", "`data.datasets.0.fraction`, for each dataset"),
    "column_mapping": ("AutoTrain", "`data.datasets.0.columns`"),
    "column_map": ("torchtune", "`data.datasets.0.columns`, where the dataset's name comes first"),
    "message_property_mappings": ("axolotl", "`data.datasets.0.columns`"),
    "field_messages": ("axolotl", "`data.datasets.0.columns: {NAME: messages}`"),
    "prompt_text_column": ("AutoTrain", "`data.datasets.0.columns: {NAME: prompt}`"),
    "rejected_text_column": ("AutoTrain", "`data.datasets.0.columns: {NAME: rejected}`"),
    "target_column": ("AutoTrain", "`seq_cls.dataset_label_field`"),
    "label_column": ("AutoTrain", "`seq_cls.dataset_label_field`"),
    "text_column": ("AutoTrain", "`{section}.dataset_text_field`"),
    "sample_packing": ("axolotl", "`{section}.packing`"),
    "packed": ("torchtune", "`{section}.packing`"),
    "neat_packing": ("LLaMA-Factory", "`{section}.packing`"),
    "sequence_len": ("axolotl", "`{section}.max_length`"),
    "cutoff_len": ("LLaMA-Factory", "`{section}.max_length`"),
    "max_seq_len": ("torchtune", "`{section}.max_length`"),
    "max_seq_length": ("litgpt", "`{section}.max_length`"),
    "max_sequence_length": ("ludwig", "`{section}.max_length`"),
    "block_size": ("AutoTrain", "`{section}.max_length`"),
    "chat_template_jinja": ("axolotl", "`data.chat_template`"),
    "chat_template_path": ("TRL", "`data.chat_template`"),
    "template": ("LLaMA-Factory", "`data.chat_template`, a `.jinja` file; without it the tokenizer's own"),
    "prompt_style": ("litgpt", "`data.chat_template`, a `.jinja` file; without it the tokenizer's own"),
    # what is learnt
    "roles_to_train": ("axolotl", "`sft.assistant_only_loss`"),
    "train_on_inputs": ("axolotl", "`sft.completion_only_loss`, the other way round"),
    "train_on_input": ("torchtune", "`sft.completion_only_loss`, the other way round"),
    "train_on_prompt": ("LLaMA-Factory", "`sft.completion_only_loss`, the other way round"),
    "mask_prompt": ("litgpt", "`sft.completion_only_loss`"),
    "train_on_completions": ("unsloth", "`sft.completion_only_loss`"),
    "pref_beta": ("LLaMA-Factory", "`dpo.beta`"),
    "rl_beta": ("axolotl", "`dpo.beta`"),
    "dpo_beta": ("AutoTrain", "`dpo.beta`"),
    "pref_loss": ("LLaMA-Factory", "`dpo.loss_type`, a list"),
    "dpo_loss_type": ("axolotl", "`dpo.loss_type`, a list"),
    "pref_ftx": ("LLaMA-Factory", "`dpo.loss_type: [sigmoid, sft]` with `dpo.loss_weights`"),
    "dpo_label_smoothing": ("LLaMA-Factory", "`dpo.label_smoothing`"),
    "val_set_size": ("axolotl", "`data.eval.test_split_size`"),
    "val_size": ("LLaMA-Factory", "`data.eval.test_split_size`"),
    "preprocessing_num_workers": ("LLaMA-Factory", "`data.num_proc`"),
    "dataset_num_proc": ("TRL", "`data.num_proc`"),
    # training
    "micro_batch_size": ("axolotl", "`training.per_device_train_batch_size`"),
    "batch_size": ("torchtune", "`training.per_device_train_batch_size`"),
    "train_batch_size": ("AutoTrain", "`training.per_device_train_batch_size`"),
    "global_batch_size": ("litgpt", "`hivemind_config.opt.target_batch_size`"),
    "gradient_accumulation": ("AutoTrain", "`training.gradient_accumulation_steps`; leave it at 1"),
    "optimizer": ("axolotl", "`training.optim`"),
    "lr": ("AutoTrain", "`training.learning_rate`"),
    "lr_scheduler": ("axolotl", "`training.lr_scheduler_type`"),
    "scheduler": ("AutoTrain", "`training.lr_scheduler_type`"),
    "warmup_ratio": ("axolotl", "`training.warmup_steps`, where a value below 1 is a share"),
    "lr_warmup_steps": ("litgpt", "`training.warmup_steps`"),
    "num_warmup_steps": ("torchtune", "`training.warmup_steps`"),
    "num_epochs": ("axolotl", "`training.max_steps`: a swarm's length is counted in its steps"),
    "num_train_epochs": ("transformers", "`training.max_steps`: a swarm's length is counted in its steps"),
    "epochs": ("torchtune", "`training.max_steps`: a swarm's length is counted in its steps"),
    "train_steps": ("ludwig", "`training.max_steps`"),
    "gradient_checkpointing": ("older transformers", "`training.activation_checkpointing`"),
    "compile": ("torchtune", "`training.torch_compile`"),
    "random_seed": ("unsloth", "`training.seed`"),
    "saves_per_epoch": ("axolotl", "`training.save_steps`"),
    "evals_per_epoch": ("axolotl", "`training.eval_steps`"),
    "wandb_project": ("axolotl", "`training.report_to: [wandb]`"),
    "use_wandb": ("axolotl", "`training.report_to: [wandb]`"),
    "output_dir": ("transformers", "the option `--output-dir` of `init` and `join`"),
    "resume_from_checkpoint": ("transformers", "nothing: the same command goes on where the run stopped"),
    "auto_resume_from_checkpoints": ("axolotl", "nothing: the same command goes on where the run stopped"),
    # the swarm
    "initial_peers": ("hivemind.DHT", "`hivemind_config.dht.initial_peers`, or `join --peer`"),
}
"""Foreign name -> (who calls it so, what it is here)."""

FOREIGN_CHOICES: dict[str, dict[str, str]] = {
    "task": {
        "pt": "clm",
        "pretrain": "clm",
        "causal-lm": "clm",
        "llm-generic": "clm",
        "chat": "sft",
        "instruct": "sft",
        "llm-sft": "sft",
        "llm-dpo": "dpo",
        "fill-mask": "mlm",
        "masked-lm": "mlm",
        "classification": "seq-cls",
        "sequence-classification": "seq-cls",
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
