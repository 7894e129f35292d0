"""TRL's trainers with `SwarmTrainerMixin`."""

from __future__ import annotations

from trl import DPOTrainer, SFTTrainer

from trahiv_cli.train.trainer import SwarmTrainerMixin


class SwarmSFTTrainer(SwarmTrainerMixin, SFTTrainer):
    """Drop-in for `trl.SFTTrainer` that trains with a swarm when given `hivemind_config`."""


class SwarmDPOTrainer(SwarmTrainerMixin, DPOTrainer):
    """Drop-in for `trl.DPOTrainer` that trains with a swarm when given `hivemind_config`.

    Pass adapters as `peft_config`, not as a ready `PeftModel`. The reference is then the base model without
    adapters, and not a copy of this peer's adapters, which another peer may have trained further.
    """
