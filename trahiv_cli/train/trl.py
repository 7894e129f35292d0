"""TRL's trainers with `SwarmTrainerMixin`."""

from __future__ import annotations

from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

from trahiv_cli.recipe.task_sections import Task
from trahiv_cli.train.trainer import SwarmTrainerMixin


class SwarmSFTTrainer(SwarmTrainerMixin, SFTTrainer):
    """Drop-in for `trl.SFTTrainer` that trains with a swarm when given `hivemind_config`."""


class SwarmDPOTrainer(SwarmTrainerMixin, DPOTrainer):
    """Drop-in for `trl.DPOTrainer` that trains with a swarm when given `hivemind_config`.

    Pass adapters as `peft_config`, not as a ready `PeftModel`. The reference is then the base model without
    adapters, and not a copy of this peer's adapters, which another peer may have trained further.
    """


class SwarmKTOTrainer(SwarmTrainerMixin, KTOTrainer):
    """Drop-in for `trl.KTOTrainer` that trains with a swarm when given `hivemind_config`.

    Pass adapters as `peft_config`, as for `SwarmDPOTrainer`.
    """


class SwarmRewardTrainer(SwarmTrainerMixin, RewardTrainer):
    """Drop-in for `trl.RewardTrainer` that trains with a swarm when given `hivemind_config`."""


class SwarmGRPOTrainer(SwarmTrainerMixin, GRPOTrainer):
    """Drop-in for `trl.GRPOTrainer` that trains with a swarm when given `hivemind_config`.

    Peers divide the prompts; all completions of a prompt stay on one peer. Rewards, which are code, are not
    compared between peers; those of a recipe are.
    """


TRAINERS: dict[Task, type[SwarmTrainerMixin]] = {
    "sft": SwarmSFTTrainer,
    "dpo": SwarmDPOTrainer,
    "kto": SwarmKTOTrainer,
    "reward": SwarmRewardTrainer,
    "grpo": SwarmGRPOTrainer,
}
"""A task of TRL -> its trainer."""
