"""States as joiners get them, without a network."""

from __future__ import annotations

from typing import Any

import torch

from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.swarm.snapshot import views_of


def state_of(averager: ExactStateAverager) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Copy an averager's state: metadata and tensors."""
    metadata, [flat], infos = averager.get_current_state()
    return metadata, views_of(flat, infos)
