"""Each field of transformers' `TrainingArguments` is decided: it does in a swarm what it does in Trainer,
is refused, or has no effect in a training of one process."""

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from tests.unit.conftest import refused
from trahiv_cli.errors import RecipeError
from trahiv_cli.train.settings import require_swarmable

DONE = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
adam_epsilon auto_find_batch_size batch_eval_metrics bf16 bf16_full_eval data_seed
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor debug eval_accumulation_steps eval_delay
eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval
full_determinism gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate
length_column_name liger_kernel_config load_best_model_at_end log_level logging_first_step
logging_nan_inf_filter logging_steps
logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model
neftune_noise_alpha num_train_epochs optim optim_args output_dir per_device_eval_batch_size
per_device_train_batch_size prediction_loss_only project push_to_hub remove_unused_columns report_to
run_name save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile
torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_steps
weight_decay
"""
"""`train_sampling_strategy` warns where it leaves the data undivided."""

REFUSED = {
    "dataloader_in_order": (False, "True"),
    "deepspeed": ("ds.json", "one peer for each GPU"),
    "enable_jit_checkpoint": (True, "SIGTERM"),
    "fsdp": ("full_shard", "one peer for each GPU"),
    "parallelism_config": (object(), "one peer for each GPU"),
    "restore_callback_states_from_checkpoint": (True, "omit it"),
}
"""Maps what a swarm refuses to a value that asks for it, and what to do instead."""

WITHOUT_EFFECT = {
    "of several processes, which are refused": """
        average_tokens_across_devices ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_static_graph ddp_timeout fsdp_config local_rank log_level_replica
        log_on_each_node save_on_each_node
    """,
    "of optimizers that are refused": "optim_target_modules",
    "of resuming from Trainer's checkpoints: a swarm goes on by itself": """
        ignore_data_skip resume_from_checkpoint save_only_model
    """,
    "of progress bars: rows of figures stand for them in a swarm": "disable_tqdm",
    "of scripts: Trainer does not read them": "do_eval do_predict do_train",
    "of the last batch of a pass: in a swarm, each batch is full": "dataloader_drop_last",
}


def test_every_field_is_decided_once():
    decided = [*DONE.split(), *REFUSED, *" ".join(WITHOUT_EFFECT.values()).split()]
    assert len(decided) == len(set(decided))
    assert {field.name for field in fields(TrainingArguments)} <= set(decided)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_field_is_named(arguments, samples, name):
    args = arguments()
    require_swarmable(args, {"train_dataset": samples})
    value, instead = REFUSED[name]
    setattr(args, name, value)
    with refused(f"(?i:In a swarm, .*{name}.* can't be used)", instead, RecipeError):
        require_swarmable(args, {"train_dataset": samples})
