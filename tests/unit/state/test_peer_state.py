"""The state that is given to joiners, which they adopt entirely or not at all."""

import threading
from functools import partial

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo, TensorRole
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR

from tests.kit.states import giving_state, state_of
from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.committed import StateLock
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Ledger, Spans
from trahiv_cli.progress.pace import Pace
from trahiv_cli.progress.scores import Scores
from trahiv_cli.rounds.codecs import EightBitStatistics, read_tensor
from trahiv_cli.state import peer_state as module
from trahiv_cli.state.scored import ScoredSchedule
from trahiv_cli.state.snapshot import views_of

torch.set_num_threads(1)


AHEAD = History(3, 30, b"b" * 16)
OTHER = History(5, 25, b"c" * 16)
"""The history of the other half of a partitioned swarm: more steps, fewer samples."""


def everything(averager):
    """Return the history, the epoch, all tensors and the learning rate."""
    [held], [group] = averager.optimizer.state.values(), averager.optimizer.param_groups
    now = averager.committed.now
    assert now.ledger == Ledger(Spans.of([(0, now.history.samples)])), "the history's own"
    tensors = *averager.main_parameters, *averager.buffers.live.values(), *held.values()
    return now.history, averager.local_epoch, [one.tolist() for one in tensors], group["lr"]


@pytest.fixture
def donor():
    return giving_state(AHEAD, fill=2.0)


@pytest.fixture
def joiner():
    return giving_state(History())


def test_given_state_is_independent_copy(donor):
    _, flat, infos, _ = donor.copy()
    tensors = views_of(flat, infos)
    before = [tensor.tolist() for tensor in tensors]
    donor.optimizer.step()
    assert [tensor.tolist() for tensor in tensors] == before
    assert flat.is_shared()
    roles = [info.role for info in infos]
    assert roles == [TensorRole.PARAMETER, TensorRole.UNSPECIFIED, *[TensorRole.OPTIMIZER] * 3]


def test_step_waits_for_state_copy(donor, monkeypatch):
    done = []
    copied = module.copy_into

    def step():
        with donor.lock_state:
            done.append("step")

    def copy(*what):
        stepping.start()
        stepping.join(timeout=0.05)
        copied(*what)
        done.append("copy")

    stepping = threading.Thread(target=step)
    monkeypatch.setattr(module, "copy_into", copy)
    donor.copy()
    stepping.join()
    assert done == ["copy", "step"]


def test_state_adoption_is_atomic(download, donor, joiner):
    """`tests/unit/train/test_checkpoint.py` covers the state of every optimizer."""
    donor.optimizer.param_groups[0]["weight_decay"] = 0.5
    metadata, tensors = state_of(donor)
    assert "donor" not in metadata, "equal states are given in the same bytes"
    [held] = joiner.optimizer.state.values()
    had = dict(held)
    assert download(joiner, (metadata | {"donor": "QmB", "epoch": 4}, tensors)) is True
    assert joiner.committed.now.group == {"QmB"}
    assert everything(joiner) == everything(donor)
    assert everything(joiner)[:2] == (AHEAD, 3)
    assert everything(joiner)[3] == 0.025
    assert joiner.optimizer.param_groups[0]["weight_decay"] == 0.5
    [held] = joiner.optimizer.state.values()
    assert all(held[name] is had[name] for name in ("exp_avg", "exp_avg_sq")), "in the memory that it had"


def test_without_offer_state_stays(download, joiner):
    before = everything(joiner)
    assert download(joiner, None) is False
    assert everything(joiner) == before
    assert not joiner.committed.now.group


def test_offloading_joiner_adopts_plain_state(download, donor):
    joiner = giving_state(History(), offload=True)
    assert download(joiner, state_of(donor)) is True
    assert everything(joiner) == everything(donor)


def scored(history, **more):
    """Return a state whose best weights, full of 2, are two steps old."""
    state = giving_state(History(history.step - 2), fill=2.0, keeps_best="lowest", **more)
    state.judge(0.5)
    state.committed.change(history=History(history.step - 1))
    for weight in (*state.main_parameters, *(state.agreed or ())):
        weight.data.fill_(3.0)
    state.judge(0.75)
    state.committed.change(history=history, ledger=Ledger(Spans.of([(0, history.samples)])))
    return state


@pytest.mark.parametrize("mode", [{}, {"has_local_steps": True}])
def test_joiner_adopts_scores_and_best_weights(download, mode):
    donor, joiner = scored(AHEAD, **mode), giving_state(History(), keeps_best="lowest", **mode)
    assert download(joiner, state_of(donor)) is True
    assert joiner.committed.now.scores == Scores(((1, 0.5), (2, 0.75)))
    assert [one.unique().tolist() for one in joiner.best.tensors] == [[2.0], [2.0]]
    assert joiner.own_metadata() == donor.own_metadata()
    assert joiner.load_best(last_score=0.4) == (3, 0.4)
    assert joiner.main_parameters[0].unique().tolist() == [3.0]
    assert joiner.load_best(last_score=0.5) == (1, 0.5)
    assert joiner.main_parameters[0].unique().tolist() == [2.0]
    assert joiner.buffers.live["statistic"].unique().tolist() == [2.0]


def test_false_best_weights_are_refused(download):
    metadata, tensors = state_of(scored(AHEAD))
    joiner = giving_state(History(), keeps_best="lowest")
    for change, why in {
        "digest": (lambda: tensors[-2].mul_(2), "another digest"),
        "infinite": (lambda: tensors[-2].mul_(torch.inf), "not finite"),
        "shapes": (lambda: tensors.pop(), "other shapes"),
    }.values():
        change()
        with pytest.raises(RoundFailed, match=why):
            download(joiner, (metadata, tensors))
    assert joiner.committed.now.scores == Scores()
    assert joiner.best.tensors == []


@pytest.mark.parametrize("make", [partial(ReduceLROnPlateau, cooldown=1), partial(GreedyLR, min_lr=1e-4)])
def test_learning_rates_follow_all_scores(make):
    def rates_after(scores, lr=0.1):
        schedule = make(torch.optim.SGD([torch.zeros(1)], lr=lr), patience=1, factor=0.5)
        for score in scores:
            schedule.step(score)
        return [group["lr"] for group in schedule.optimizer.param_groups]

    values = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = ScoredSchedule(make(inner, patience=1, factor=0.5))
    for count in (1, 2, 3, 40, 5):  # the last scores are those of another history
        schedule.follow(Scores(tuple(enumerate(values[:count]))))
        assert [group["lr"] for group in inner.param_groups] == rates_after(values[:count])
    assert len({*rates_after(values), *rates_after(values[:5]), 0.1}) == 3


BROKEN = {  # small fields: simulation/test_states_of_a_liar.py
    "another model": lambda meta, tensors: state_of(giving_state(AHEAD, width=4)),
    "a stream that broke off": lambda meta, tensors: (meta, tensors[:-1]),
    "one tensor too many": lambda meta, tensors: (meta, [*tensors, torch.zeros(1)]),
    "another optimizer": lambda *_: state_of(giving_state(AHEAD, kind=torch.optim.Adagrad)),
    "statistics of another type": lambda meta, t: (meta, [*t[:2], *(s.double() for s in t[2:])]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_foreign_state_is_refused(download, donor, joiner, broken):
    (metadata, tensors), before = state_of(donor), everything(joiner)
    given = BROKEN[broken](metadata | {"pace": Pace("overlap").to_wire()}, tensors)
    with pytest.raises(RoundFailed):
        download(joiner, given, set_pace=lambda _: pytest.fail("its pace was taken over"))
    assert everything(joiner) == before


@pytest.mark.parametrize("poison", [torch.nan, -torch.inf])
def test_nonfinite_state_is_refused(download, donor, joiner, poison):
    (metadata, tensors), before = state_of(donor), everything(joiner)
    tensors[0][1] = poison
    with pytest.raises(RoundFailed, match="not finite"):
        download(joiner, (metadata, tensors))
    assert everything(joiner) == before
    assert not joiner.committed.now.group


@pytest.mark.parametrize("refusal", [{"is_believed": lambda *_: False}, {"is_wanted": lambda: False}])
def test_refused_state_keeps_pace(download, donor, refusal):
    joiner = giving_state(History(), has_local_steps=True)
    before = everything(joiner)
    outer = joiner.outer
    refusal |= {"set_pace": lambda _: pytest.fail("its pace was taken over")}
    assert download(joiner, state_of(donor), **refusal) is False
    assert everything(joiner) == before
    assert joiner.outer is outer
    assert outer.anchor[0].tolist() == [1.0] * 3


def test_state_grown_before_lock_is_whole(donor):
    grown = giving_state(AHEAD, has_local_steps=True)

    class Changing(StateLock):
        def __enter__(self):
            super().__enter__()
            donor.outer = grown.outer
            donor.agreed = grown.agreed
            donor.committed = grown.committed

    donor.lock_state = Changing()
    metadata, tensors = state_of(donor)
    assert len(tensors) == len(state_of(grown)[1])
    assert metadata["outer_rounds"] == 0


def test_state_with_fewer_samples_is_refused(download, donor):
    other = giving_state(OTHER)
    before = everything(donor)
    assert download(donor, state_of(other)) is False
    for _ in range(2):  # again, as peers of one history may hold different values
        assert download(other, state_of(donor)) is True
        assert everything(other) == everything(donor) == before


def test_local_steps_joiner_starts_from_agreed_weights(download):
    donor = giving_state(AHEAD, fill=2.0, has_local_steps=True)
    joiner = giving_state(History(), has_local_steps=True)
    donor.outer.step(range(1), [torch.ones(3)])
    assert download(joiner, state_of(donor)) is True
    [weight], outer = joiner.main_parameters, joiner.outer
    assert weight is not outer.anchor[0]
    assert weight.equal(donor.outer.anchor[0])
    assert outer.anchor[0].equal(donor.outer.anchor[0])
    assert outer.momentum[0].equal(donor.outer.momentum[0])
    assert outer.rounds == 1
    assert donor.main_parameters[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("has_local_steps", [False, True], ids=["shared gradients", "local steps"])
def test_joiner_verifies_state_digest(download, has_local_steps):
    donor = giving_state(AHEAD, fill=2.0, has_local_steps=has_local_steps)
    joiner = giving_state(History(), has_local_steps=has_local_steps)
    asked = []

    def is_believed(*what):
        asked.append(what)
        return False

    (metadata, tensors), before = state_of(donor), everything(joiner)
    *_, common = donor.copy()
    assert download(joiner, (metadata | {"donor": "QmB"}, tensors), is_believed=is_believed) is False
    assert everything(joiner) == before, "it was not believed"
    assert asked == [(AHEAD, common, "QmB")]
    assert len(common) == 32
    tensors[0][1] += 1.0
    download(joiner, (metadata, tensors), is_believed=is_believed)
    joiner.codec = compression.Float16Compression()  # rounded weights can't be confirmed
    download(joiner, (metadata, tensors), is_believed=is_believed)
    assert asked[1][1] != common
    assert asked[2] == (AHEAD, b"", "")


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_schedule_jumps_to_any_step():
    def now(state):
        return state.scheduler.get_last_lr(), state.scheduler.last_epoch, state.scheduler._step_count

    walking = giving_state(History())
    jumping = giving_state(History())
    walked = []
    for _ in range(14):
        walked.append(now(walking))
        walking.optimizer.step()
        walking.scheduler.step()
    for step in (5, 7, 13, 13, 0, 4, 12, 1):
        jumping.move_schedule(step)
        assert now(jumping) == walked[step]
    jumping.move_schedule(10**9)
    assert jumping.scheduler.last_epoch == 10**9


@pytest.mark.parametrize("decades", [0, 2, 4, 6])
def test_eight_bit_statistics_preserve_steps(decades):
    def through(tensor):
        message = EightBitStatistics().compress(tensor, CompressionInfo.from_tensor(tensor))
        return read_tensor(message), len(message.buffer)

    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (-decades * torch.rand(2**15, generator=generator))
    second = scale**2 * (0.5 + torch.rand(scale.shape, generator=generator))
    first = scale * torch.randn(scale.shape, generator=generator)
    (first_again, num_bytes), (second_again, _) = through(first), through(second)
    assert num_bytes < 0.27 * first.nbytes
    assert bool((second_again > 0).all())
    assert (second / second_again).sqrt().max() < 4, "of the step that is divided by it"
    if decades == 0:
        before = first / (second.sqrt() + 1e-12)
        after = first_again / (second_again.sqrt() + 1e-12)
        assert (after - before).norm() < 0.02 * before.norm()
    for tensor in (first[:4000], first.double(), first.to(torch.uint8), torch.tensor(7), first / 0):
        again, _ = through(tensor)
        assert again.dtype == tensor.dtype
        assert torch.equal(again.nan_to_num(), tensor.nan_to_num())
