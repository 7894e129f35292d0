"""The state that is given to joiners, which they adopt entirely or not at all."""

import threading

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo, TensorRole

from tests.kit.states import giving_state, state_of
from trahiv_cli.errors import RoundFailed
from trahiv_cli.progress.committed import StateLock
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Ledger, Spans
from trahiv_cli.progress.pace import Pace
from trahiv_cli.rounds.codecs import EightBitStatistics, read_tensor
from trahiv_cli.state import peer_state as module
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
    buffers = averager.buffers.live.values()
    tensors = [one.tolist() for one in (*averager.main_parameters, *buffers, *held.values())]
    return now.history, averager.local_epoch, tensors, group["lr"]


def test_given_state_is_independent_copy():
    donor = giving_state(History())
    _, flat, infos, _ = donor.copy()
    tensors = views_of(flat, infos)
    before = [tensor.tolist() for tensor in tensors]
    donor.optimizer.step()
    assert [tensor.tolist() for tensor in tensors] == before and flat.is_shared()
    roles = [info.role for info in infos]
    assert roles == [TensorRole.PARAMETER, TensorRole.UNSPECIFIED, *[TensorRole.OPTIMIZER] * 3]


def test_step_waits_for_state_copy(monkeypatch):
    donor, done, copied = giving_state(AHEAD), [], module.copy_into

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


def test_state_adoption_is_atomic(download):
    """`tests/unit/train/test_checkpoint.py` covers the state of every optimizer."""
    donor, joiner = giving_state(AHEAD, fill=2.0), giving_state(History())
    donor.optimizer.param_groups[0]["weight_decay"] = 0.5
    (metadata, tensors), before = state_of(donor), everything(joiner)
    for poison in (float("nan"), -float("inf")):
        with pytest.raises(RoundFailed, match="not finite"):
            download(joiner, (metadata, [torch.tensor([2.0, poison, 2.0]), *tensors[1:]]))
    assert download(joiner, None) is False, "nobody offers one"
    assert everything(joiner) == before and joiner.committed.now.group == frozenset()
    assert "donor" not in metadata, "equal states are given in the same bytes"
    [held] = joiner.optimizer.state.values()
    had = dict(held)
    assert download(joiner, (metadata | {"donor": "QmB", "epoch": 4}, tensors)) is True
    assert everything(joiner) == everything(donor) and joiner.committed.now.group == {"QmB"}
    assert everything(joiner)[:2] == (AHEAD, 3) and everything(joiner)[3] == 0.025
    assert joiner.optimizer.param_groups[0]["weight_decay"] == 0.5
    [held] = joiner.optimizer.state.values()
    assert all(held[name] is had[name] for name in ("exp_avg", "exp_avg_sq")), "in the memory that it had"


def test_offloading_joiner_adopts_plain_state(download):
    donor, joiner = giving_state(AHEAD, fill=2.0), giving_state(History(), offload=True)
    assert download(joiner, state_of(donor)) is True and everything(joiner) == everything(donor)


BROKEN = {  # small fields: simulation/test_states_of_a_liar.py
    "another model": lambda meta, tensors: state_of(giving_state(AHEAD, width=4)),
    "a stream that broke off": lambda meta, tensors: (meta, tensors[:-1]),
    "one tensor too many": lambda meta, tensors: (meta, [*tensors, torch.zeros(1)]),
    "another optimizer": lambda *_: state_of(giving_state(AHEAD, kind=torch.optim.Adagrad)),
    "statistics of another type": lambda meta, t: (meta, [*t[:2], *(s.double() for s in t[2:])]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_foreign_state_is_refused(download, broken):
    joiner, (metadata, tensors) = giving_state(History()), state_of(giving_state(AHEAD))
    before = everything(joiner)
    given = BROKEN[broken](metadata | {"pace": Pace("overlap").to_wire()}, tensors)
    with pytest.raises(RoundFailed):
        download(joiner, given, set_pace=lambda _: pytest.fail("its pace was taken over"))
    assert everything(joiner) == before


def test_state_with_unknown_codec_is_refused(download):
    joiner = giving_state(History())
    metadata, tensors = state_of(giving_state(AHEAD))
    unknown = Pace("overlap", codec="of tomorrow").to_wire()
    with pytest.raises(RoundFailed, match="codec"):
        download(joiner, (metadata | {"pace": unknown}, tensors))


@pytest.mark.parametrize("refusal", ["not believed", "not wanted"])
def test_refused_state_keeps_pace(download, refusal):
    joiner = giving_state(History(), has_local_steps=True)
    before, outer = everything(joiner), joiner.outer
    options = {
        "set_pace": lambda _: pytest.fail("its pace was taken over"),
        "is_believed": lambda *_: refusal != "not believed",
        "is_wanted": lambda: refusal != "not wanted",
    }
    assert download(joiner, state_of(giving_state(AHEAD, fill=2.0)), **options) is False
    assert everything(joiner) == before and joiner.outer is outer and outer.anchor[0].tolist() == [1.0] * 3


def test_state_grown_before_lock_is_whole():
    donor, grown = giving_state(AHEAD), giving_state(AHEAD, has_local_steps=True)

    class Changing(StateLock):
        def __enter__(self):
            super().__enter__()
            donor.outer, donor.agreed, donor.committed = grown.outer, grown.agreed, grown.committed

    donor.lock_state = Changing()
    metadata, tensors = state_of(donor)
    assert len(tensors) == len(state_of(grown)[1]) and metadata["outer_rounds"] == 0


def test_state_with_fewer_samples_is_refused(download):
    ahead, other = giving_state(AHEAD, fill=2.0), giving_state(OTHER)
    before = everything(ahead)
    assert download(ahead, state_of(other)) is False and everything(ahead) == before
    for _ in range(2):  # again, as peers of one history may hold different values
        assert download(other, state_of(ahead)) is True and everything(other) == before


def test_local_steps_joiner_starts_from_agreed_weights(download):
    donor = giving_state(AHEAD, fill=2.0, has_local_steps=True)
    joiner = giving_state(History(), has_local_steps=True)
    donor.outer.step(range(1), [torch.ones(3)])
    metadata, tensors = state_of(donor)
    with pytest.raises(RoundFailed, match="which fragment"):
        download(joiner, (metadata | {"outer_rounds": -1}, tensors))
    assert download(joiner, (metadata, tensors)) is True
    [weight], outer = joiner.main_parameters, joiner.outer
    for held in ([weight], outer.anchor):
        assert torch.equal(held[0], donor.outer.anchor[0])
    assert torch.equal(outer.momentum[0], donor.outer.momentum[0]) and outer.rounds == 1
    assert weight is not outer.anchor[0] and donor.main_parameters[0].tolist() == [2.0] * 3


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
    assert asked == [(AHEAD, common, "QmB")] and len(common) == 32
    tensors[0][1] += 1.0
    download(joiner, (metadata, tensors), is_believed=is_believed)
    joiner.codec = compression.Float16Compression()  # rounded weights can't be confirmed
    download(joiner, (metadata, tensors), is_believed=is_believed)
    assert asked[1][1] != common and asked[2] == (AHEAD, b"", "")


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_schedule_jumps_to_any_step():
    walking, jumping = giving_state(History()), giving_state(History())
    walking, schedule, walked = walking.scheduler, jumping.scheduler, []
    for _ in range(14):
        walked.append((walking.get_last_lr(), walking.last_epoch, walking._step_count))
        walking.optimizer.step()
        walking.step()
    for step in (5, 7, 13, 13, 0, 4, 12, 1):
        jumping.move_schedule(step)
        assert (schedule.get_last_lr(), schedule.last_epoch, schedule._step_count) == walked[step]
    jumping.move_schedule(10**9)
    assert schedule.last_epoch == 10**9


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
    assert num_bytes < 0.27 * first.nbytes and bool((second_again > 0).all())
    assert (second / second_again).sqrt().max() < 4, "of the step that is divided by it"
    if decades == 0:
        before, after = first / (second.sqrt() + 1e-12), first_again / (second_again.sqrt() + 1e-12)
        assert (after - before).norm() < 0.02 * before.norm()
    for tensor in (first[:4000], first.double(), first.to(torch.uint8), torch.tensor(7), first / 0):
        again, _ = through(tensor)
        assert again.dtype == tensor.dtype and torch.equal(again.nan_to_num(), tensor.nan_to_num())
