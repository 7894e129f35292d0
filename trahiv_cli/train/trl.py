"""TRL's trainers with a swarm: the mixin is all it takes."""

from __future__ import annotations

from trl import DPOTrainer, SFTTrainer

from trahiv_cli.train.trainer import SwarmTrainerMixin


class SwarmSFTTrainer(SwarmTrainerMixin, SFTTrainer):
    """Drop-in for `trl.SFTTrainer` that trains with a swarm when given `hivemind_config`."""


class SwarmDPOTrainer(SwarmTrainerMixin, DPOTrainer):
    """Drop-in for `trl.DPOTrainer` that trains with a swarm when given `hivemind_config`.

    Give adapters as `peft_config`, not as a ready `PeftModel`: the reference is then the base without them,
    and not a copy of adapters that another peer may have further on.
    """
