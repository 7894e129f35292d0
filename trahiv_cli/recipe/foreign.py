"""What other tools call things, and what this version does not build yet: tables, nothing else.

A foreign name is never accepted in silence; its entry is what the error says. Names as of axolotl 0.19,
LLaMA-Factory 0.9, torchtune 0.6, litgpt 0.5, unsloth 2026.10, ludwig 0.11, AutoTrain 0.8, transformers 5.23.
"""

from __future__ import annotations

FOREIGN: dict[str, tuple[str, str]] = {
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
    # adapters
    "adapter": ("axolotl", "the section `peft`; without it every weight is trained"),
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
    # the data
    "dataset": ("LLaMA-Factory", "`data.datasets`, a list whose entries have a `path`"),
    "dataset_name": ("TRL", "`data.datasets.0.path`"),
    "dataset_config": ("TRL", "`data.datasets.0.name`"),
    "dataset_train_split": ("TRL", "`data.datasets.0.split`"),
    "datasets": ("axolotl", "`data.datasets`"),
    "text_column": ("AutoTrain", "`clm.dataset_text_field`"),
    "sample_packing": ("axolotl", "`clm.packing`"),
    "packed": ("torchtune", "`clm.packing`"),
    "sequence_len": ("axolotl", "`clm.max_length`"),
    "cutoff_len": ("LLaMA-Factory", "`clm.max_length`"),
    "max_seq_len": ("torchtune", "`clm.max_length`"),
    "max_seq_length": ("litgpt", "`clm.max_length`"),
    "max_sequence_length": ("ludwig", "`clm.max_length`"),
    "block_size": ("AutoTrain", "`clm.max_length`"),
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
    # the swarm
    "initial_peers": ("hivemind.DHT", "`hivemind_config.dht.initial_peers`, or `join --peer`"),
}
"""Foreign name -> (who calls it so, what it is here)."""

UNBUILT_KEYS = frozenset(
    """quantization sft dpo hub load_in_4bit load_in_8bit quantization_bit quantize bnb_4bit_quant_type
    bnb_4bit_use_double_quant bnb_4bit_compute_dtype chat_template system_prompt completion_only_loss
    assistant_only_loss push_to_hub hub_model_id use_kernels save_minutes
    delay_optimizer_step delay_grad_averaging delay_state_averaging use_local_updates auxiliary""".split()
)
"""Keys that belong in a recipe one day. `trust_remote_code` is not one: a recipe must not bring code."""

UNBUILT_CHOICES: dict[str, frozenset[str]] = {
    "task": frozenset({"sft", "dpo", "mlm", "seq-cls"}),
    "swarm.mode": frozenset({"overlap", "diloco"}),
    "training.optim": frozenset(
        """adamw_torch_xla adamw_torch_npu_fused adamw_anyprecision adamw_torch_4bit adamw_torch_8bit
        ademamix adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit lion_32bit paged_adamw_32bit
        paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit
        rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor
        galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo
        grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd apollo_adamw
        apollo_adamw_layerwise stable_adamw""".split()
    ),
    "training.lr_scheduler_type": frozenset({"reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy"}),
}
"""Choices that transformers or our own contract knows and this version does not offer."""
