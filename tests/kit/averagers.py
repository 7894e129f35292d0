"""Averagers without a process and without a network: what they hold, not whom they know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.kit.identities import id_of, key_of
from trahiv_cli.optim.buffers import Buffers
from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.local_steps import OuterState
from trahiv_cli.optim.pace import Pace, RoundRules
from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.swarm.snapshot import JoinerActivity, views_of


def gradient_averager(
    weights: Sequence[torch.Tensor],
    cls: type[ExactGradientAverager] = ExactGradientAverager,
    name: str = "A",
    times: Mapping[str, Any] = MappingProxyType({"next_chunk_timeout": 5.0, "allreduce_timeout": 60.0}),
    **more: Any,
) -> ExactGradientAverager:
    """Make one for float32 weights on the CPU that has accumulated nothing.

    `times`, and the like, are those of its rounds; `more` are its attributes.
    """
    gradients = [weight.grad for weight in weights]
    dht = SimpleNamespace(peer_id=id_of(name), signing_key=key_of(name), client_mode=False)
    own = {"prefix": "run", "start": False, "interest": JoinerActivity(), "rules": RoundRules()}
    averager = cls(weights, dht=dht, **own, **times)
    for weight, gradient in zip(weights, gradients, strict=True):  # hivemind's has given them zeros
        weight.grad = gradient
    vars(averager).update(more)
    return averager


def state_averager(
    inner: torch.optim.Optimizer,
    weights: Sequence[torch.Tensor],
    *,
    peer: Any = "A",
    model: torch.nn.Module | None = None,
    **keywords: Any,
) -> Any:
    """Make one that holds an inner optimizer, at the beginning of a run; `keywords` are its constructor's.

    The buffers are those of a `model`.
    """
    dht = SimpleNamespace(peer_id=peer, client_mode=True)
    own = {"prefix": "run", "start": False, "interest": JoinerActivity(), "initialize_optimizer": False}
    buffers = Buffers(model)
    return ExactStateAverager(optimizer=inner, params=weights, dht=dht, buffers=buffers, **own, **keywords)


def giving_averager(
    history: History,
    peer: Any = "QmA",
    *,
    fill: float = 1.0,
    width: int = 3,
    kind: Any = torch.optim.AdamW,
    has_local_steps: bool = False,
    offload: bool = False,
) -> Any:
    """Make one that can give its state, and take one over: of a peer that trained all samples of a history.

    Its inner optimizer has taken a step; its one weight and its one buffer are full of a value.
    """
    weight = torch.nn.Parameter(torch.full((width,), fill))
    stepped = torch.nn.Parameter(weight.detach().clone()) if offload else weight
    inner, stepped.grad = kind([stepped], lr=0.1), torch.full((width,), fill + 0.5)
    inner.step()
    stepped.data.fill_(fill)
    more = {"scheduler": LambdaLR(inner, lambda step: 1 / (1 + step)), "parameter_names": ("weight",)}
    model = torch.nn.Module()
    model.register_buffer("statistic", torch.full((4,), fill))
    averager = state_averager(inner, (weight,), peer=peer, model=model, **more)
    averager.offload_optimizer = offload
    averager.history, averager.local_epoch = history, history.step
    averager.ledger = Ledger(Spans.of([(0, history.samples)]))
    averager.move_schedule(history.step)
    if has_local_steps:
        averager.pace = Pace("diloco", local_steps=4)
        averager.outer = OuterState([weight], learning_rate=0.7, momentum=0.9)
        averager.agreed = averager.outer.anchor
    return averager


def state_of(averager: ExactStateAverager) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Copy an averager's state as joiners get it: metadata and tensors."""
    metadata, [flat], infos = averager.get_current_state()
    return metadata, views_of(flat, infos)
