"""The state and the gradients of a peer, without processes and without a network."""

import threading

import torch
from hivemind.compression import NoCompression
from torch.optim.lr_scheduler import LambdaLR

from trahiv_cli.progress.committed import Committed, CommittedCell
from trahiv_cli.progress.ledger import Ledger, Spans
from trahiv_cli.progress.pace import Pace
from trahiv_cli.rounds.averages import Averages
from trahiv_cli.rounds.buffers import Buffers
from trahiv_cli.state.outer import OuterState
from trahiv_cli.state.peer_state import PeerState
from trahiv_cli.state.snapshot import views_of
from trahiv_cli.state.state_service import StateExchange
from trahiv_cli.step.gradients import GradientBuffer


def averages_of(weights):
    """Averages of tensors with the shapes of the weights."""
    return Averages([weight.shape for weight in weights], threading.Lock())


def gradient_buffer(weights):
    """Make one for float32 weights on the CPU that has accumulated nothing."""
    return GradientBuffer(weights, averages_of(weights))


def peer_state(
    inner,
    weights,
    *,
    model=None,
    committed=None,
    **more,
):
    """Make one that holds an inner optimizer, at the beginning of a run; `more` are its constructor's.

    The buffers are those of a `model`.
    """
    groups = [{"params": list(weights)}]
    return PeerState(
        groups,
        lambda _: inner,
        committed=committed or CommittedCell(Committed()),
        buffers=Buffers(model),
        codec=NoCompression(),
        **more,
    )


class Giving(StateExchange):
    """Exchanges one peer's state: fetches a given state (metadata and tensors; None if there is none)."""

    def __init__(self, state, given):
        self._state = state
        self._given = given

    def fetch(self, wanted, report):
        metadata, tensors = self._given or ({}, ())
        return self._given and ({"donor": ""} | metadata, tensors)


def giving_state(
    history,
    *,
    fill=1.0,
    width=3,
    kind=torch.optim.AdamW,
    has_local_steps=False,
    offload=False,
    keeps_best=None,
):
    """Make one that can give its state, and take one over: of a peer that trained all samples of a history.

    Its inner optimizer has taken a step; its one weight and its one buffer are full of a value.
    """
    weight = torch.nn.Parameter(torch.full((width,), fill))
    stepped = torch.nn.Parameter(weight.detach().clone()) if offload else weight
    inner = kind([stepped], lr=0.1)
    stepped.grad = torch.full((width,), fill + 0.5)
    inner.step()
    stepped.data.fill_(fill)
    schedule = LambdaLR(inner, lambda step: 1 / (1 + step))
    model = torch.nn.Module()
    model.register_buffer("statistic", torch.full((4,), fill))
    options = {"make_schedule": lambda _: schedule, "offload": offload, "keeps_best": keeps_best}
    state = peer_state(inner, (weight,), model=model, **options)
    state.committed.change(history=history, ledger=Ledger(Spans.of([(0, history.samples)])))
    state.move_schedule(history.step)
    if has_local_steps:
        state.committed.change(pace=Pace("diloco", local_steps=4))
        state.outer = OuterState([weight], learning_rate=0.7, momentum=0.9)
        state.agreed = state.outer.anchor
    return state


def state_of(state):
    """Copy a state as joiners get it: metadata and tensors."""
    metadata, flat, infos, _ = state.copy()
    return metadata, views_of(flat, infos)
