"""Who decides a field: all peers together, or each for itself.

Everything is shared except what `OWN` lists, so a new field is shared until someone decides otherwise
(`tests/unit/recipe/test_agreement.py` pins the classification of every field).
"""

from __future__ import annotations

OWN = frozenset(
    """
    model.attn_implementation quantization.bnb_4bit_compute_dtype
    data.num_proc data.streaming
    training.per_device_train_batch_size training.per_device_eval_batch_size
    training.gradient_accumulation_steps training.bf16 training.fp16 training.activation_checkpointing
    training.torch_compile training.logging_steps training.eval_steps training.save_steps
    training.save_total_limit training.dataloader_num_workers training.report_to swarm.save_minutes
    swarm.public hivemind_config.dht
    hivemind_config.opt.averaging_timeout hivemind_config.opt.allreduce_timeout
    hivemind_config.opt.next_chunk_timeout hivemind_config.opt.load_state_timeout
    hivemind_config.opt.offload_optimizer hivemind_config.opt.client_mode
    hivemind_config.opt.averager_opts hivemind_config.opt.tracker_opts
    hivemind_config.opt.performance_ema_alpha hivemind_config.opt.shutdown_timeout
    hivemind_config.opt.verbose
    """.split()
)
"""What each peer chooses for itself: fields, and sections with all that is in them."""

SUGGESTED = frozenset(
    """
    data.streaming
    training.per_device_train_batch_size training.per_device_eval_batch_size
    training.gradient_accumulation_steps training.bf16 training.fp16 training.activation_checkpointing
    training.torch_compile training.logging_steps training.eval_steps training.save_steps
    training.save_total_limit swarm.save_minutes
    hivemind_config.opt.averaging_timeout hivemind_config.opt.allreduce_timeout
    hivemind_config.opt.next_chunk_timeout hivemind_config.opt.load_state_timeout
    """.split()
)
"""Own fields that a newcomer without a recipe copies from the swarm; it may then choose otherwise."""


def is_own(path: str) -> bool:
    """Tell whether the field at this dotted path, or the section it is in, is each peer's own choice."""
    parts = path.split(".")
    return any(".".join(parts[: end + 1]) in OWN for end in range(len(parts)))
