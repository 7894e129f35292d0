"""A joiner becomes what the donor is, or nothing changes; hivemind's own averager does neither."""

import threading
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from hivemind.compression import TensorRole
from hivemind.optim.state_averager import TrainingStateAverager, dump_optimizer_state, load_optimizer_state
from torch.optim.lr_scheduler import LambdaLR

from tests.kit.averagers import state_of
from trahiv_cli.errors import RoundFailed
from trahiv_cli.swarm import state_averager as module
from trahiv_cli.swarm.snapshot import JoinerActivity, views_of
from trahiv_cli.swarm.state_averager import CorrectedStateAverager, adopt_optimizer_state

torch.set_num_threads(1)

DHT = SimpleNamespace(client_mode=False, is_alive=lambda: False)
OURS, UPSTREAM = CorrectedStateAverager, TrainingStateAverager


def averager_of(optimizer, cls=OURS, step=0, **options):
    options |= {"interest": JoinerActivity()} if cls is OURS else {}
    averager = cls(dht=DHT, optimizer=optimizer, prefix="run", start=False, **options)
    averager.get_group_bits = lambda: "0"
    averager.local_epoch = step
    return averager


def state_averager(cls=OURS, step=0, fill=0.0, width=3, lr=0.1, optimizer_cls=torch.optim.AdamW):
    parameter = torch.nn.Parameter(torch.full((2, width), fill))
    optimizer = optimizer_cls([parameter], lr=lr)
    parameter.grad = torch.full_like(parameter, fill + 0.5)
    optimizer.step()
    return averager_of(optimizer, cls, step, extra_tensors=(torch.full((4,), fill),))


def everything(averager):
    """All that a state is, as one comparable value."""
    [group] = averager.optimizer.param_groups
    [parameter] = group["params"]
    statistics = averager.optimizer.state[parameter]
    named = {name: torch.as_tensor(value).tolist() for name, value in statistics.items()}
    return averager.local_epoch, group["lr"], parameter.tolist(), averager.extra_tensors[0].tolist(), named


# -- giving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [OURS, UPSTREAM], ids=["ours", "upstream still"])
def test_the_state_that_is_given_away_does_not_change_any_more(cls):
    donor = state_averager(cls=cls)
    metadata, given, infos = donor.get_current_state()
    tensors = views_of(given[0], infos) if cls is OURS else given
    before = [tensor.tolist() for tensor in tensors]
    donor.optimizer.step()
    assert ([tensor.tolist() for tensor in tensors] == before) == (cls is OURS)
    if cls is OURS:
        assert given[0].is_shared() and metadata["rank"] == [0, b""]
        roles = [info.role for info in infos]
        assert roles == [TensorRole.PARAMETER, TensorRole.UNSPECIFIED, *[TensorRole.OPTIMIZER] * 3]


def test_no_step_is_taken_while_a_state_is_copied(monkeypatch):
    donor, done = state_averager(), []

    def step():
        with donor.lock_state:
            done.append("step")

    def copy(*_):
        stepping.start()
        stepping.join(timeout=0.05)
        done.append("copy")

    stepping = threading.Thread(target=step)
    monkeypatch.setattr(module, "copy_into", copy)
    donor.get_current_state()
    stepping.join()
    assert done == ["copy", "step"]


# -- adopting --------------------------------------------------------------------------------------


def test_a_joiner_becomes_what_the_donor_is_if_that_is_further(download):
    donor, joiner = state_averager(step=5, fill=1.0, lr=0.3), state_averager()
    assert download(joiner, state_of(donor)) is True
    assert everything(joiner) == everything(donor)
    joiner = state_averager(step=6)
    before = everything(joiner)
    for given in (None, state_of(donor)):  # none is offered, or an older one
        assert download(joiner, given) is False and everything(joiner) == before


BROKEN = {
    "another model": lambda meta, tensors: state_of(state_averager(width=4)),
    "a stream that broke off": lambda meta, tensors: (meta, tensors[:-1]),
    "one tensor too many": lambda meta, tensors: (meta, [*tensors, torch.zeros(1)]),
    "no step": lambda meta, tensors: ({k: v for k, v in meta.items() if k != "epoch"}, tensors),
    "no layout": lambda meta, tensors: (meta | {"optimizer_metadata": None}, tensors),
    "a shorter layout": lambda meta, t: (meta | {"optimizer_metadata": meta["optimizer_metadata"][1:]}, t),
    "a layout of something else": lambda meta, t: (meta | {"optimizer_metadata": ["?"] * 99}, t),
    "another optimizer": lambda *_: state_of(state_averager(step=5, optimizer_cls=torch.optim.Adagrad)),
    "statistics of another type": lambda meta, t: (meta, [*t[:2], *(s.double() for s in t[2:])]),
    "weights that are not finite": lambda meta, t: (meta, [t[0] / 0, *t[1:]]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_state_of_something_else_is_refused_and_nothing_changes(download, broken):
    joiner = state_averager()
    before = everything(joiner)
    given = BROKEN[broken](*state_of(state_averager(step=5, fill=1.0)))
    with pytest.raises(RoundFailed):
        download(joiner, given)
    assert everything(joiner) == before


# -- an optimizer with bytes, codebooks, float32 and step counts -----------------------------------


def with_an_8_bit_optimizer(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((96, 96), (7,))]
    optimizer = bitsandbytes.optim.AdamW8bit(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
    return averager_of(optimizer, step=seed), weights


@pytest.mark.parametrize(
    ("adopt", "is_kept"),
    [(adopt_optimizer_state, True), (load_optimizer_state, False)],
    ids=["ours", "upstream still"],
)
def test_adopted_state_lies_where_the_optimizer_s_state_was(adopt, is_kept):
    (donor, [given, _]), (heir, [own, _]) = with_an_8_bit_optimizer(5), with_an_8_bit_optimizer(0)
    held = dict(heir.optimizer.state[own])
    adopt(heir.optimizer, *dump_optimizer_state(donor.optimizer))
    adopted = heir.optimizer.state[own]
    assert adopted.keys() == held.keys()
    for name in held.keys() - {"step"}:
        assert torch.equal(adopted[name], donor.optimizer.state[given][name])
    assert all(adopted[name] is held[name] for name in held.keys() - {"step"}) == is_kept


# -- the learning rate's schedule -----------------------------------------------------------------


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_a_schedule_is_moved_in_one_step():
    def scheduled():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        return averager_of(optimizer, scheduler=LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))

    walking, jumping = scheduled().scheduler, scheduled()
    walked = []
    for _ in range(14):
        walked.append((walking.get_last_lr(), walking.last_epoch, walking._step_count))
        walking.optimizer.step()
        walking.step()
    for step in (5, 7, 13, 13, 0, 4, 12, 1):
        jumping.move_schedule(step)
        schedule = jumping.scheduler
        assert (schedule.get_last_lr(), schedule.last_epoch, schedule._step_count) == walked[step]
    jumping.move_schedule(10**9)
    assert schedule.last_epoch == 10**9
