"""How gradients get into the accumulators and out again, how rounds end, and what is given to joiners.

Nothing here has a process or a network.
"""

import asyncio
import math
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from hivemind import compression
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.compression import CompressionInfo
from hivemind.optim.grad_averager import GradientAverager
from hivemind.p2p import P2PDaemonError, P2PHandlerError
from hivemind.proto import averaging_pb2

from tests.kit.averagers import giving_averager, gradient_averager
from tests.kit.identities import id_of, key_of
from tests.kit.states import state_of
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim import averager as averaging
from trahiv_cli.optim import ballot as ballots
from trahiv_cli.optim.allreduce import ExactAllReduce, checked, in_words
from trahiv_cli.optim.assemble import CODECS
from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.averager import ExactAverager, patience_s
from trahiv_cli.optim.ballot import BALLOTS_KEPT, Ballot, Ballots, NotCommitted, Vote
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.rounds import Exchange, Round
from trahiv_cli.optim.soundness import Claim, SoundReducer
from trahiv_cli.swarm.statements import sign

pytestmark = pytest.mark.usefixtures("our_codecs")

PEERS = {name: id_of(name) for name in "ABCD"}
CLAIMS = dict.fromkeys("AB", Claim(weight=1.0, norm=2.0))


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.ones(2))


@pytest.fixture
def averager(parameter):
    return gradient_averager(
        [parameter], _averaged_tensors=(torch.full((2,), 9.0),), _accumulators_used_in_step=False
    )


def train(averager, parameter, batches, lend):
    """Run batches; return the mean gradient of all."""
    run(averager, parameter, batches, lend)
    return mean_of(averager)


def run(averager, parameter, batches, lend):
    """Run batches of (gradient, samples, weight), clearing gradients after each as the Trainer does."""
    for gradient, samples, weight in batches:
        factor = averager.expect_batch(samples, weight, lend=lend)
        (parameter * gradient * factor).sum().backward()
        averager.accumulate_grads_(batch_size=99)  # what was announced counts
        parameter.grad = None


def mean_of(averager):
    averager.set_aside()
    averager.load_aside()
    averager.take_back()
    return averager._averaged_tensors[0].tolist()


def counts(averager):
    return averager.local_samples_accumulated, averager.local_weight


@pytest.mark.parametrize("lend", [False, True])
def test_the_mean_of_all_batches_is_averaged(averager, parameter, lend):
    assert train(averager, parameter, [(1.0, 4, 4), (5.0, 4, 4)], lend) == [3.0, 3.0]
    assert counts(averager) == (8, 8.0)


@pytest.mark.parametrize("lend", [False, True])
def test_batches_count_by_what_is_trained_in_them(averager, parameter, lend):
    assert train(averager, parameter, [(1.0, 4, 30), (5.0, 4, 10)], lend) == pytest.approx([2.0, 2.0])
    assert train(averager, parameter, [(8.0, 2, 20)], lend) == pytest.approx([4.0, 4.0])
    assert counts(averager) == (10, 60.0)


def test_equal_batches_are_left_as_they_are_to_the_bit(averager):
    assert [averager.expect_batch(4, 7.3, lend=False) for _ in range(3)] == [1.0] * 3
    averager.accumulate_grads_(batch_size=1)
    averager.reset_accumulated_grads_()
    assert averager.expect_batch(4, 7.3, lend=False) == 1.0, "after a step, too"


@pytest.mark.parametrize("lend", [False, True])
def test_a_batch_that_trains_nothing_counts_its_samples_alone(averager, parameter, lend):
    assert averager.expect_batch(4, 0.0, lend=lend) == 1.0, "there is nothing to compare it with yet"
    (parameter * 0.0).sum().backward()
    averager.accumulate_grads_(batch_size=99)
    assert (counts(averager), mean_of(averager)) == ((4, 0.0), [0.0, 0.0])
    assert train(averager, parameter, [(2.0, 4, 5.0), (7.0, 4, 0.0)], lend) == [2.0, 2.0]
    assert counts(averager) == (12, 5.0)


@pytest.mark.parametrize("lend", [False, True])
def test_batches_that_are_announced_one_by_one_are_counted_together(averager, parameter, lend):
    for gradient, weight in ((1.0, 30), (5.0, 10)):
        factor = averager.expect_batch(4, weight, lend=lend)
        (parameter * gradient * factor).sum().backward()  # a window of gradient accumulation
    averager.accumulate_grads_(batch_size=99)
    assert mean_of(averager) == pytest.approx([2.0, 2.0])
    assert counts(averager) == (8, 40.0)


def test_a_batch_that_nobody_announced_counts_by_its_samples(averager, parameter):
    for samples, gradient in ((1, 1.0), (3, 5.0)):
        parameter.grad = torch.full((2,), gradient)
        averager.accumulate_grads_(batch_size=samples)
        parameter.grad = None
    assert mean_of(averager) == [4.0, 4.0]
    assert counts(averager) == (4, 4.0)


def test_upstream_still_divides_by_the_number_of_batches(averager, parameter):
    averager.warn = False
    for samples, gradient in ((1, 1.0), (3, 5.0)):
        parameter.grad = torch.full((2,), gradient)
        GradientAverager.accumulate_grads_(averager, batch_size=samples)
    GradientAverager.load_accumulators_into_averager_(averager)
    assert averager._averaged_tensors[0].tolist() == [8.0, 8.0]


def test_an_announcement_that_was_taken_back_counts_nothing(averager, parameter):
    averager.expect_batch(4, 30.0, lend=False)
    averager.expect_batch(4, 30.0, lend=False)
    averager.forget_announced()  # their gradients were thrown away
    assert train(averager, parameter, [(2.0, 4, 30.0)], lend=False) == [2.0, 2.0]
    assert counts(averager) == (4, 30.0)


def test_no_batch_at_all_is_a_gradient_of_zero(averager):
    assert mean_of(averager) == [0.0, 0.0]


def test_a_backward_pass_adds_to_lent_accumulators_without_a_gradient_of_its_own(averager, parameter):
    averager.expect_batch(4, 4, lend=True)
    (parameter * 2.0).sum().backward()
    assert parameter.grad is averager._local_accumulators[0]
    assert parameter.grad.tolist() == [2.0, 2.0]


def test_clearing_gradients_after_a_batch_does_not_clear_what_was_accumulated(averager, parameter):
    averager.expect_batch(4, 4, lend=True)
    (parameter * 2.0).sum().backward()
    averager.accumulate_grads_(batch_size=4)
    assert parameter.grad is None
    torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=False)
    assert averager._local_accumulators[0].tolist() == [2.0, 2.0]


def test_an_accumulator_on_another_device_is_not_lent(averager, parameter):
    averager._local_accumulators = (torch.zeros(2, device="meta"),)
    averager.expect_batch(4, 4, lend=True)
    assert parameter.grad is None


def test_a_parameter_that_a_batch_did_not_use_adds_nothing(averager):
    averager.accumulate_grads_(batch_size=4)
    assert averager._local_accumulators[0].tolist() == [0.0, 0.0]


# -- a round beside training ----------------------------------------------------------------------


def test_what_comes_during_a_round_is_not_in_it(averager, parameter):
    train(averager, parameter, [(1.0, 4, 4), (5.0, 4, 4)], lend=True)
    averager.set_aside()
    run(averager, parameter, [(100.0, 4, 4)], lend=True)
    averager.load_aside()
    assert averager._averaged_tensors[0].tolist() == [3.0, 3.0]
    assert (averager.samples_aside, averager.weight_aside, counts(averager)) == (8, 8.0, (4, 4.0))


def test_after_a_round_that_failed_nothing_is_lost(averager, parameter):
    train(averager, parameter, [(1.0, 4, 4), (5.0, 4, 4)], lend=True)
    averager.set_aside()
    run(averager, parameter, [(6.0, 4, 4)], lend=True)
    averager.take_back()
    assert (averager.samples_aside, counts(averager), mean_of(averager)) == (0, (12, 12.0), [4.0, 4.0])


def test_after_a_committed_round_what_came_meanwhile_is_there(averager, parameter):
    train(averager, parameter, [(1.0, 4, 4), (5.0, 4, 4)], lend=True)
    averager.set_aside()
    run(averager, parameter, [(6.0, 4, 4)], lend=True)
    with averager.use_averaged_gradients():
        pass
    averager.use_up()
    assert (averager.samples_aside, counts(averager), mean_of(averager)) == (0, (4, 4.0), [6.0, 6.0])


def test_rounds_take_no_more_memory_than_two_gradients(averager, parameter):
    for _ in range(5):
        train(averager, parameter, [(1.0, 4, 4)], lend=True)
        averager.set_aside()
        averager.expect_batch(4, 4, lend=True)
        averager.accumulate_grads_(batch_size=99)
        held = {tensor.data_ptr() for tensor in (*averager._aside, *averager._local_accumulators)}
        averager.use_up()
        assert len(held) == 2 and {averager._local_accumulators[0].data_ptr()} <= held


def test_a_round_that_training_waits_for_takes_no_second_gradient(averager, parameter):
    train(averager, parameter, [(1.0, 4, 4)], lend=True)
    (accumulator,) = averager._local_accumulators
    averager.set_aside()
    averager.use_up()
    assert averager._local_accumulators == (accumulator,) and averager._spare == ()
    assert accumulator.tolist() == [0.0, 0.0]


# -- what is stepped with -------------------------------------------------------------------------


def test_averages_are_the_gradients_in_the_accumulators_memory(averager, parameter):
    (accumulator,) = averager._local_accumulators
    averager.set_aside()
    with averager.use_averaged_gradients():
        assert parameter.grad is accumulator
        assert parameter.grad.tolist() == [9.0, 9.0]
        parameter.grad.mul_(0.5)  # as clipping does
        assert averager._averaged_tensors[0].tolist() == [9.0, 9.0]
    assert parameter.grad is None


@pytest.mark.parametrize("lend", [False, True])
def test_the_next_batches_start_from_nothing_after_a_step(averager, parameter, lend):
    assert train(averager, parameter, [(1.0, 4, 4), (5.0, 4, 4)], lend) == [3.0, 3.0]
    averager.set_aside()
    with averager.use_averaged_gradients():
        assert parameter.grad.tolist() == [3.0, 3.0]
    averager.use_up()
    averager.expect_batch(4, 4, lend=False)  # of a batch that is not counted any more
    averager.reset_accumulated_grads_()
    assert counts(averager) == (0, 0.0)
    assert train(averager, parameter, [(2.0, 4, 2)], lend) == [2.0, 2.0]
    assert counts(averager) == (4, 2.0)


def test_a_step_that_fails_leaves_no_gradient_for_the_next_backward_pass(averager, parameter):
    averager.set_aside()

    def fail():
        with averager.use_averaged_gradients():
            raise MemoryError

    pytest.raises(MemoryError, fail)
    assert parameter.grad is None


def test_averages_come_to_where_the_parameter_is(averager):
    averager.parameters = (torch.nn.Parameter(torch.ones(2, device="meta")),)
    averager.set_aside()
    with averager.use_averaged_gradients():
        assert averager.parameters[0].grad.device.type == "meta"


# -- what an average is sent as -------------------------------------------------------------------


def reducer(codec, average):
    runner = object.__new__(ExactAllReduce)  # its constructor needs a node
    runner.__dict__.update(_compression=codec, _infos=[CompressionInfo.from_tensor(average)], _encoded={})
    return runner


def encoded(codec, average):
    """The message that a group gets of an average, as the peer that reduced it makes it."""
    runner = reducer(codec, average)

    async def twice():
        return await runner._encode(0, average), await runner._encode(0, average)

    first, second = asyncio.run(twice())
    assert first is second, "once for the whole group"
    return first


@pytest.mark.parametrize("name", CODECS)
def test_an_average_is_encoded_by_the_codec_and_comes_back(name):
    average, codec = torch.linspace(-3, 5, 4100), CODECS[name]()
    message = encoded(codec, average)
    assert message.code == averaging_pb2.AVERAGED_PART
    assert message.tensor_part == codec.compress(average, CompressionInfo.from_tensor(average))
    assert torch.equal(checked(message, PEERS["B"]), codec.extract(message.tensor_part))


def test_a_member_that_hangs_up_takes_no_average_from_the_others():
    average = torch.ones(3)
    runner = reducer(CODECS["none"](), average)

    async def one_hangs_up():
        leaving, staying = (asyncio.create_task(runner._encode(0, average)) for _ in range(2))
        await asyncio.sleep(0)  # both wait
        leaving.cancel()
        return await staying

    assert torch.equal(checked(asyncio.run(one_hangs_up()), PEERS["B"]), average)


def test_an_exchange_that_is_cancelled_fails_the_round_and_leaves_nobody_waiting():
    async def cancelled():
        runner = object.__new__(ExactAllReduce)
        part = torch.ones(3)
        runner.__dict__.update(
            peer_id=PEERS["A"],
            ordered_peer_ids=[PEERS["A"]],
            parts_for_local_averaging=[part],
            sender_peer_ids=[PEERS["A"]],
            tensor_part_container=TensorPartContainer([part], [1.0]),
            tensor_part_reducer=SoundReducer([part.shape], ["A", "B"], CLAIMS, {}, robust=False),
            _future=asyncio.Future(),
        )
        exchange = asyncio.create_task(runner._communicate_with_peer(PEERS["A"]))
        waiting = asyncio.create_task(anext(runner.tensor_part_container.iterate_output_tensors()))
        await asyncio.sleep(0)  # the other's part is waited for
        exchange.cancel()
        with pytest.raises(AllreduceException, match="terminated"):
            await waiting
        return str(runner.failure)

    assert asyncio.run(cancelled()) == f"the exchange with peer {PEERS['A']} was broken off"


def test_a_codec_that_chooses_by_tensor_chooses_for_averages_too():
    by_size = compression.SizeAdaptiveCompression(10, CODECS["none"](), CODECS["float16"]())
    small, large = torch.full((5,), 1.0 / 3), torch.full((50,), 1.0 / 3)
    assert torch.equal(checked(encoded(by_size, small), PEERS["B"]), small)
    back = checked(encoded(by_size, large), PEERS["B"])
    assert torch.equal(back, CODECS["float16"]().extract(encoded(by_size, large).tensor_part))
    assert not torch.equal(back, large)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("place", [0, 600, -1])
def test_a_part_that_changed_on_its_way_is_refused_and_its_sender_named(name, place):
    message = encoded(CODECS[name](), torch.linspace(-3, 5, 4100))
    damaged = bytearray(message.tensor_part.buffer)
    damaged[place] ^= 1
    message.tensor_part.buffer = bytes(damaged)
    with pytest.raises(AllreduceException, match=f"{PEERS['B']} was damaged"):
        checked(message, PEERS["B"])


def test_a_part_without_a_checksum_is_refused():
    message = encoded(CODECS["none"](), torch.ones(3))
    message.peer_id = b""
    with pytest.raises(AllreduceException, match="damaged"):
        checked(message, PEERS["B"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AllreduceException("as it was"), "as it was"),
        (TimeoutError(), "sent nothing for too long"),
        (ConnectionError(), "can't be reached"),
        (P2PHandlerError("gone"), "can't be reached"),
        (P2PDaemonError("gone"), "can't be reached"),
        (ZeroDivisionError("why"), "ZeroDivisionError: why"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_why_a_round_failed_is_said_in_words(error, words):
    said = in_words(error, PEERS["B"])
    assert isinstance(said, AllreduceException) and words in str(said)


# -- before and after the exchange ----------------------------------------------------------------


def with_tensors(*values):
    averager = object.__new__(ExactAverager)
    averager.__dict__.update(
        _parent_pid=-1,
        _closed=True,
        _popen=None,
        _residual={},
        _residual_is_of_steps=False,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=tuple(map(torch.tensor, values)),
        _matchmaking=SimpleNamespace(schema=b"schema"),
    )
    return averager


def test_the_norm_that_is_claimed_is_that_of_all_tensors_together():
    assert with_tensors([3.0, 0.0], [[4.0]])._prepare_contribution(Exchange(range(2))) == 5.0


def test_what_the_last_round_lost_goes_into_the_next_and_into_its_norm():
    averager = with_tensors([3.0, 1.0], [[4.0]])
    averager._residual = {0: torch.tensor([0.0, -1.0]), 1: torch.tensor([[8.0]])}
    assert averager._prepare_contribution(Exchange(range(2))) == pytest.approx(153**0.5)
    assert [tensor.tolist() for tensor in averager._averaged_tensors] == [[3.0, 0.0], [[12.0]]]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite_is_claimed_as_it_is(poison):
    assert not math.isfinite(with_tensors([3.0, poison])._prepare_contribution(Exchange(range(1))))


def test_a_vote_is_on_the_average_the_claims_and_the_agreement():
    def digest(values=(1.0, 2.0), schema=b"schema", samples=8):
        averager = with_tensors([0.0])
        averager._matchmaking.schema = schema
        members = [Claim(8).to_bytes(), Claim(samples).to_bytes()]
        return averager._digest(SimpleNamespace(gathered=members), [torch.tensor(values)])

    assert digest() == digest()
    assert len({digest(), digest(values=(1.0, 2.0000002)), digest(schema=b"other"), digest(samples=9)}) == 4


# -- what came of a round -------------------------------------------------------------------------


def test_the_group_of_a_round_are_those_who_averaged_and_those_who_were_left_out():
    assert Round({"QmA": 4}, 1.0, 0, 0, True, left_out={"QmB": "too large"}).group == ("QmA", "QmB")
    assert Round({}, 1.0, 0, 0, False, "no group was found").group == ()


# -- the vote -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _late_votes_are_waited_for_a_moment(monkeypatch):
    monkeypatch.setattr(averaging, "VOTE_GRACE_S", 0.3)


class Voter(ExactAverager):
    """An averager in the middle of a round, that reaches others without a network."""

    @classmethod
    def get_stub(cls, p2p, peer, namespace):
        """`p2p` is the asking peer's: those that it reaches, and who it is."""

        async def rpc_vote(request, timeout):
            p2p.called.append(peer)
            if peer not in p2p.reached:
                raise ConnectionError
            return await p2p.reached[peer].rpc_vote(request, SimpleNamespace(remote_id=p2p.peer_id))

        return SimpleNamespace(rpc_vote=rpc_vote)


def voter(name, limit_s=0.0):
    averager = object.__new__(Voter)
    averager.suspects, averager.noted, averager.aside = [], [], []
    averager.__dict__.update(
        _parent_pid=-1,
        _closed=True,
        _popen=None,
        _p2p=SimpleNamespace(peer_id=PEERS[name], reached={}, called=[]),
        dht=SimpleNamespace(peer_id=PEERS[name], signing_key=key_of(name)),
        prefix="run",
        _ballots=Ballots(),
        allreduce_kwargs={"sender_timeout": limit_s},
        _matchmaking=SimpleNamespace(
            blame=SimpleNamespace(
                suspect=averager.suspects.append,
                exclude=lambda peer, why: averager.aside.append(peer),
                note_votes=lambda members, votes, is_committed: averager.noted.append((votes, is_committed)),
            )
        ),
    )
    return averager


SAME, OTHER_AVERAGE = b"same" * 8, b"else" * 8


def group_of(names, group_id=b"group"):
    """A group in which each member has said something."""
    return GroupInfo(group_id, tuple(PEERS[name] for name in names), tuple(name.encode() for name in names))


def hold_vote(group, digests, quorum=2, cut=()):
    """Hold a vote in `group` among those that have a digest; pairs in `cut` do not reach each other.

    Returns:
        The decision of each, and the averagers.
    """
    peers = {name: voter(name, limit_s=0.3) for name in digests}
    for name, averager in peers.items():
        averager._p2p.reached = {
            PEERS[other]: peers[other] for other in peers if {name, other} not in [set(pair) for pair in cut]
        }
    info = group_of(group)
    for averager in peers.values():
        averager._ballots.open(info)

    async def hold():
        votes = (peers[name]._hold_vote(info, Vote(digests[name]), quorum) for name in peers)
        return await asyncio.gather(*votes)

    decisions = [decision for decision, _ in asyncio.run(hold())]
    return dict(zip(peers, decisions, strict=True)), peers


def test_peers_that_hold_the_same_commit_and_say_nothing():
    decisions, peers = hold_vote("ABC", dict.fromkeys("ABC", SAME))
    assert all(decision.is_committed and not decision.reason for decision in decisions.values())
    assert not any(averager.suspects for averager in peers.values())


def test_most_commit_and_name_the_one_that_holds_something_else():
    decisions, _ = hold_vote("ABC", {"A": SAME, "B": SAME, "C": OTHER_AVERAGE})
    assert [decisions[name].is_committed for name in "ABC"] == [True, True, False]
    for name in "AB":
        assert decisions[name].dissenters == (PEERS["C"].to_base58(),)
        assert PEERS["C"].to_base58() in decisions[name].reason


def test_a_member_that_died_before_its_vote_does_not_stop_the_others():
    decisions, peers = hold_vote("ABC", dict.fromkeys("AB", SAME))
    assert all(decision.is_committed for decision in decisions.values())
    assert all(averager.suspects == [PEERS["C"]] for averager in peers.values())


def test_nobody_commits_below_the_quorum():
    decisions, _ = hold_vote("ABC", dict.fromkeys("AB", SAME), quorum=3)
    assert not any(decision.is_committed for decision in decisions.values())


def test_a_round_that_was_not_committed_says_what_for_a_member_had_voted_in_any_process():
    error = pickle.loads(pickle.dumps(NotCommitted("too few", b"proof", 12)))
    assert (str(error), error.proof, error.samples) == ("too few", b"proof", 12)


def test_a_member_alone_does_not_commit():
    decisions, _ = hold_vote("AB", {"A": SAME})
    assert not decisions["A"].is_committed and PEERS["B"].to_base58() in decisions["A"].reason


def test_members_that_do_not_reach_each_other_hear_of_their_votes_from_a_third():
    decisions, peers = hold_vote("ABC", dict.fromkeys("ABC", SAME), quorum=3, cut=["AB"])
    assert all(decision.is_committed and not decision.reason for decision in decisions.values())
    for name in "AB":
        assert set(peers[name]._ballots[b"group"].votes) == {PEERS[name] for name in "ABC"}


@pytest.mark.parametrize("is_known_to_be_one", [True, False])
def test_a_member_that_asks_and_can_t_be_asked_is_waited_for(is_known_to_be_one):
    """As a client is: it serves nobody, and tells its vote by asking."""
    server, client = voter("A", limit_s=5.0), voter("B", limit_s=5.0)
    client._p2p.reached = {PEERS["A"]: server}
    info = group_of("AB")

    async def hold():
        for averager in (server, client):
            averager._ballots.open(info, [PEERS["B"]] if is_known_to_be_one else ())
        waiting = asyncio.create_task(server._hold_vote(info, Vote(SAME), 2))
        for _ in range(10):  # the client has its average a moment later
            await asyncio.sleep(0)
        return await asyncio.gather(waiting, client._hold_vote(info, Vote(SAME), 2))

    (ours, _), (theirs, _) = asyncio.run(hold())
    assert ours.is_committed and theirs.is_committed
    assert server._p2p.called == ([] if is_known_to_be_one else [PEERS["B"]])


def test_a_member_that_holds_no_average_says_why_to_all():
    peers = {name: voter(name, limit_s=0.3) for name in "AB"}
    for averager in peers.values():
        averager._p2p.reached = {PEERS[name]: other for name, other in peers.items()}
    info = group_of("AB")

    async def hold():
        for averager in peers.values():
            averager._ballots.open(info)
        votes = Vote(SAME), Vote(reason="its disk is full")
        both = (peers[name]._hold_vote(info, vote, 2) for name, vote in zip("AB", votes, strict=True))
        return [decision for decision, _ in await asyncio.gather(*both)]

    ours, theirs = asyncio.run(hold())
    assert not ours.is_committed and f"{PEERS['B']} did not average: its disk is full" in ours.reason
    assert not theirs.is_committed and theirs.reason == "its disk is full"


def vote_of(name, vote, info):
    """A member's vote, signed."""
    return Ballot(info).cast_own(key_of(name), PEERS[name], vote)


def test_a_member_that_votes_for_two_averages_makes_no_second_history():
    """It returned one average to A and another to B: with its two votes each would be most of the group."""
    info, peers = group_of("ABC"), {name: voter(name, limit_s=5.0) for name in "AB"}
    liar = SimpleNamespace(rpc_vote=lambda *_: asyncio.sleep(0, averaging_pb2.MessageFromLeader()))
    for averager in peers.values():
        averager._p2p.reached = {PEERS[name]: other for name, other in peers.items()} | {PEERS["C"]: liar}
        averager._ballots.open(info)

    async def hold():
        lies = []
        for averager, digest in zip(peers.values(), (SAME, OTHER_AVERAGE), strict=True):
            request = averaging_pb2.JoinRequest(schema_hash=b"group", gather=vote_of("C", Vote(digest), info))
            context = SimpleNamespace(remote_id=PEERS["C"])
            lies.append(asyncio.create_task(averager.rpc_vote(request, context)))
        votes = zip(peers.values(), (SAME, OTHER_AVERAGE), strict=True)
        decisions = await asyncio.gather(*(peer._hold_vote(info, Vote(held), 2) for peer, held in votes))
        await asyncio.gather(*lies)
        return [decision for decision, _ in decisions]

    assert [decision.is_committed for decision in asyncio.run(hold())] == [False, False]
    assert all(averager.aside == [PEERS["C"]] for averager in peers.values())


def test_a_vote_counts_only_as_its_member_signed_it_for_this_round():
    info = group_of("ABC")
    ballot = Ballot(info)
    for peer, statement in [
        (PEERS["B"], Vote(SAME).to_bytes()),  # not signed
        (PEERS["B"], vote_of("C", Vote(SAME), info)),  # another one's
        (PEERS["B"], vote_of("B", Vote(SAME), group_of("BCA"))),  # of another round
        (PEERS["D"], vote_of("D", Vote(SAME), group_of("ABCD"))),  # of no member
        (PEERS["B"], sign(key_of("B"), b"", bytes(9999))),  # longer than a vote is
    ]:
        with pytest.raises(ValueError):
            ballot.cast(peer, statement)
    assert not ballot.votes and not ballot.statements
    ballot.cast(PEERS["B"], vote_of("B", Vote(SAME), info))
    ballot.cast(PEERS["B"], vote_of("B", Vote(SAME), info))  # signed twice, and the same
    assert ballot.votes == {PEERS["B"]: Vote(SAME)}


def test_a_vote_that_its_member_may_have_given_up_counts_no_more(monkeypatch):
    """A was late: B and C had waited for its vote, undone the round, and may have committed another one."""
    averager, info, now = voter("A", limit_s=5.0), group_of("ABC"), [0.0]
    monkeypatch.setattr(ballots, "time", SimpleNamespace(monotonic=lambda: now[0]))
    averager._p2p.reached = {}

    async def hold(waited_s):
        ballot = averager._ballots.open(info)
        ballot.cast(PEERS["B"], vote_of("B", Vote(SAME), info))
        ballot.cast(PEERS["C"], vote_of("C", Vote(reason="its disk is full"), info))
        now[0] += waited_s
        decision, _ = await averager._hold_vote(info, Vote(SAME), 2)
        return decision

    assert asyncio.run(hold(2.0)).is_committed
    late = asyncio.run(hold(5.0))
    assert not late.is_committed and f"{PEERS['B']} did not vote" in late.reason
    assert "its disk is full" in late.reason


def test_who_has_undone_a_round_hands_on_no_votes_for_its_average():
    info = group_of("ABC")
    ballot = Ballot(info)
    ballot.cast(PEERS["B"], vote_of("B", Vote(SAME), info))
    ballot.cast(PEERS["C"], vote_of("C", Vote(reason="its disk is full"), info))
    assert ballot.standing(10.0).keys() == {PEERS["B"], PEERS["C"]}
    ballot.is_undone = True
    assert ballot.standing(10.0).keys() == {PEERS["C"]}


def ask_to_vote(averager, caller, group_id, statement):
    request = averaging_pb2.JoinRequest(schema_hash=group_id, gather=statement)
    return averager.rpc_vote(request, SimpleNamespace(remote_id=PEERS[caller]))


def test_votes_in_rounds_that_are_not_ours_push_none_of_ours_out():
    averager, info = voter("A", limit_s=5.0), group_of("ABC")

    async def scene():
        averager._ballots.open(info)
        early = [ask_to_vote(averager, "C", b"%d" % number, b"") for number in range(100)]
        early = [asyncio.create_task(one) for one in early]
        await asyncio.sleep(0)
        await asyncio.wait(early[1:])  # all but the first are answered at once: one waits for its round
        assert len(averager._ballots) == 1 and not early[0].done()
        early[0].cancel()
        with pytest.raises(ValueError, match="not in this round"):
            await ask_to_vote(averager, "D", b"group", vote_of("D", Vote(SAME), group_of("AD")))

    asyncio.run(scene())


def test_a_vote_that_comes_before_its_round_is_known_is_heard():
    averager, info = voter("A", limit_s=5.0), group_of("AB")

    async def scene():
        vote = asyncio.create_task(ask_to_vote(averager, "B", b"group", vote_of("B", Vote(SAME), info)))
        await asyncio.sleep(0)
        averager._ballots.open(info)
        decision, _ = await averager._hold_vote(info, Vote(SAME), 2)
        return decision, await vote

    decision, answer = asyncio.run(scene())
    assert decision.is_committed and len(answer.gathered) == 2


def test_old_ballots_are_thrown_away():
    ballots = Ballots()
    for number in range(3 * BALLOTS_KEPT):
        ballots.open(group_of("AB", b"%d" % number))
    assert len(ballots) == BALLOTS_KEPT and ballots[b"%d" % (3 * BALLOTS_KEPT - 1)]


# -- the state that is given away -----------------------------------------------------------------

AHEAD = History(3, 30, b"b" * 16)
LONGER = History(4, 40, b"a" * 16)
OTHER = History(5, 25, b"c" * 16)
"""Of the other half of a swarm that was cut in two: more steps, fewer samples."""


def state_averager(history, fill=1.0, name="A"):
    parameter = torch.nn.Parameter(torch.full((3,), fill))
    averager = giving_averager(torch.optim.SGD([parameter], lr=0.1), history, PEERS[name])
    averager._update_scheduler()
    return averager


def everything(averager):
    [parameter] = averager.main_parameters
    rates = [group["lr"] for group in averager.optimizer.param_groups]
    state = averager.history, averager.local_epoch, parameter.tolist(), rates, averager.donor
    assert averager.ledger == Ledger(Spans.of([(0, averager.history.samples)])), "the history's own"
    return state


def test_a_state_comes_with_its_history_and_names_its_donor(download):
    donor, joiner = state_averager(AHEAD, fill=2.0, name="B"), state_averager(History(), fill=1.0)
    metadata, tensors = state_of(donor)
    assert "donor" not in metadata, "equal states are given in the same bytes"
    assert download(joiner, (metadata | {"donor": "QmB"}, tensors)) is True
    assert everything(joiner) == (AHEAD, 3, [2.0] * 3, [0.025], "QmB")


@pytest.mark.parametrize("own", [AHEAD, LONGER, OTHER], ids=["equal", "longer", "fewer samples"])
def test_a_state_of_a_history_as_good_or_better_is_welcome(download, own):
    donor, joiner = state_averager(AHEAD, fill=2.0), state_averager(own, fill=1.0)
    if donor.history.rank < own.rank:
        donor, joiner = joiner, donor
    assert download(joiner, state_of(donor)) is True
    assert joiner.history == donor.history and joiner.local_epoch == donor.local_epoch
    assert joiner.main_parameters[0].tolist() == donor.main_parameters[0].tolist()


def test_a_state_of_fewer_committed_samples_is_not_adopted_though_it_took_more_steps(download):
    assert OTHER.step > AHEAD.step and OTHER.rank < AHEAD.rank
    joiner = state_averager(AHEAD, fill=1.0)
    before = everything(joiner)
    assert download(joiner, state_of(state_averager(OTHER, fill=2.0))) is False
    assert everything(joiner) == before


def test_a_peer_that_goes_back_to_a_better_history_goes_on_with_its_learning_rates(download):
    donor, joiner = state_averager(AHEAD, fill=2.0), state_averager(OTHER, fill=1.0)
    download(joiner, state_of(donor))
    for averager in (donor, joiner):
        averager.local_epoch += 1
        averager._update_scheduler()
    assert everything(joiner)[3] == everything(donor)[3] == pytest.approx([0.02])


@pytest.mark.parametrize(
    "wrong",
    [{"history": None}, {"history": [3, 30]}, {"history": [3, -1, bytes(16)]}, {"history": [3, 30, b"x"]}],
)
def test_a_state_without_a_history_is_refused_and_nothing_changes(download, wrong):
    joiner = state_averager(History(), fill=1.0)
    before = everything(joiner)
    metadata, tensors = state_of(state_averager(AHEAD, fill=2.0))
    with pytest.raises(RoundFailed, match="without a history"):
        download(joiner, (metadata | wrong, tensors))
    assert everything(joiner) == before


def test_a_state_whose_step_is_not_its_history_s_is_not_adopted(download):
    joiner = state_averager(History(), fill=1.0)
    before = everything(joiner)
    metadata, tensors = state_of(state_averager(AHEAD, fill=2.0))
    assert download(joiner, (metadata | {"epoch": 4}, tensors)) is False
    assert everything(joiner) == before


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_taken_from_nobody(download, poison):
    donor, joiner = state_averager(AHEAD, fill=2.0), state_averager(History(), fill=1.0)
    metadata, tensors = state_of(donor)
    before = everything(joiner)
    tensors[0][1] = poison
    with pytest.raises(RoundFailed, match="not finite"):
        download(joiner, (metadata, tensors))
    assert everything(joiner) == before


def test_a_joiner_in_a_mode_with_local_steps_begins_with_the_agreed_weights(download):
    donor, joiner = state_averager(AHEAD, fill=2.0), state_averager(History(), fill=1.0)
    for averager in (donor, joiner):
        averager.outer = OuterState(averager.main_parameters, learning_rate=0.7, momentum=0.9)
        averager.agreed = averager.outer.anchor
    donor.outer.step(range(1), [torch.ones(3)])
    agreed, momentum = donor.outer.anchor[0].clone(), donor.outer.momentum[0].clone()
    given = state_of(donor)
    donor.outer.step(range(1), [torch.ones(3)])  # what was given does not change any more
    assert download(joiner, given) is True
    assert torch.equal(joiner.main_parameters[0], agreed) and torch.equal(joiner.outer.anchor[0], agreed)
    assert torch.equal(joiner.outer.momentum[0], momentum) and joiner.outer.rounds == 1
    assert joiner.main_parameters[0] is not joiner.outer.anchor[0]
    assert donor.main_parameters[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("has_local_steps", [False, True], ids=["shared gradients", "local steps"])
def test_a_joiner_asks_others_for_what_they_say_of_the_state_that_they_give(download, has_local_steps):
    donor, joiner = state_averager(AHEAD, fill=2.0), state_averager(History(), fill=1.0)
    if has_local_steps:
        for averager in (donor, joiner):
            averager.outer = OuterState(averager.main_parameters, learning_rate=0.7, momentum=0.9)
            averager.agreed = averager.outer.anchor
        donor.outer.step(range(1), [torch.ones(3)])
    said, asked = [], []
    donor.note_given = lambda history, common: said.append((history, common))
    joiner.is_believed = lambda *what: asked.append(what) or False
    metadata, tensors = state_of(donor)
    before = everything(joiner)
    assert download(joiner, (metadata | {"donor": "QmB"}, tensors)) is False
    assert everything(joiner) == before, "it was not believed"
    [(history, common, who)] = asked
    assert said == [(history, common)] == [(AHEAD, common)] and len(common) == 32 and who == "QmB"
    tensors[0][1] += 1.0
    download(joiner, (metadata, tensors))
    assert asked[1][1] != common


def test_of_rounded_weights_nobody_is_asked_what_they_are(download):
    donor, joiner = state_averager(AHEAD, fill=2.0), state_averager(History(), fill=1.0)
    joiner.state_compression = compression.Float16Compression()
    asked = []
    joiner.is_believed = lambda *what: asked.append(what) or True
    assert download(joiner, state_of(donor)) is True
    assert asked == [(AHEAD, b"", "")]


def test_an_averager_that_does_not_answer_fails_the_round_and_does_not_hold_it_up(averager, monkeypatch):
    monkeypatch.setattr(averaging, "ANSWER_S", 0.05)
    sent = []
    pipe = SimpleNamespace(send=sent.append)
    averager.__dict__.update(bandwidth=None, mode=AveragingMode.NODE, _outer_pipe=pipe)
    with pytest.raises(RoundFailed, match="did not answer"):
        averager.start_round(Claim(samples=3), 5.0, Exchange(range(1)))
    assert [message[0] for message in sent] == ["_step"]


def test_one_has_the_others_wait_for_half_a_minute_at_most_and_all_together_for_a_minute():
    quick = Claim(measured=Measured(10.0, 1.5, 2**20, 2**20, 0.0))
    endless = Claim(measured=Measured(10.0, 3e6, 2**20, 2**20, 0.0))
    assert patience_s({"A": endless, "B": endless}, 2**20, 2**30) == 60.0
    assert 10.0 < patience_s({"A": quick, "B": quick, "C": quick}, 2**20, 2**30) < 15.0
    assert patience_s({"A": quick, "B": endless, "C": quick}, 2**20, 2**30) == 30.0


def test_a_part_is_waited_for_no_longer_than_all_that_is_sent_takes():
    """Of an adapter of some kilobytes, parts are never as large as they may be."""
    member = Claim(measured=Measured(10.0, 0.1, 2**15, 2**15, 0.0))
    assert 0.0 < patience_s({"A": member, "B": member}, 2**19, 2**15) < 1.0


def test_an_exchange_of_a_few_bytes_does_not_have_members_wait_long_for_more():
    """It took round trips alone: of fragments, one may be a layer's bias and the next one its weights."""
    member = Claim(measured=Measured(10.0, 0.01, 22, 22, 0.0))
    assert patience_s({"A": member, "B": member}, 2**19, 40 * 2**10) == 0.0


def test_a_slow_member_is_waited_for_though_all_others_are_quick():
    part_bytes, rates = 2**19, [*[100] * 15, 5]  # Mbit/s
    claims = {
        str(number): Claim(measured=Measured(10.0, 10.5, round(rate * 1.25e6), 0, 0.0))
        for number, rate in enumerate(rates)
    }
    all_others_s = 15 * part_bytes / (5 * 1.25e5)
    assert all_others_s < patience_s(claims, part_bytes, 2**30) <= 30.0
    assert patience_s({"A": Claim(), "B": Claim()}, 2**20, 2**30) == 0.0
