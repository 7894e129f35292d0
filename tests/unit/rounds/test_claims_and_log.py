"""Members' claims before a round, how long they wait for each other, and rounds kept for others."""

import asyncio
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionInfo, NoCompression, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.proto.averaging_pb2 import JoinRequest

from tests.kit.identities import id_of, key_of
from tests.kit.states import averages_of
from trahiv_cli.members.records import sign
from trahiv_cli.progress.ledger import USELESS_AT_MOST, Spans
from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.recipe.schema import SwarmSection
from trahiv_cli.rounds import replay_log as rounds
from trahiv_cli.rounds.claims import Claim, Measured, Round, judge, outliers, state_to_adopt
from trahiv_cli.rounds.codecs import CODECS
from trahiv_cli.rounds.replay_log import Header, Log, decoded
from trahiv_cli.rounds.round_service import RoundOptions, RoundService, patience_s
from trahiv_cli.rounds.vote import Call, Vote

INF = math.inf
NAN = math.nan
MIB = 2**20
QUICK = Measured(10.0, 1.5, MIB, MIB)
ENDLESS = Measured(10.0, 3e6, MIB, MIB)
SMALL = Measured(10.0, 0.1, 2**15, 2**15)
TRIPS = Measured(10.0, 0.01, 22, 22)
MANY = [*[Measured(10.0, 10.5, 125_000_000)] * 15, Measured(10.0, 10.5, 6_250_000)]  # of 100 and of 5 Mbit/s


@pytest.mark.parametrize(
    ("norms", "limit", "found"),
    [
        ([1.0, 1.0, 10.0], 10, {}),
        ([1.0, 1.0, 10.1], 10, {"p2": "the norm of its gradient is 10.1, the group's median 1"}),
        # Of two, the smaller norm is the reference:
        ([1.0, 100.0], 10, {"p1": "is 100, the group's median 1"}),
        ([1.0, 2.0, 1e6, 1e6], 10, {"p2": "median 2", "p3": "median 2"}),
        ([1.0, 1e6, 1e6], 10, {}),  # the median is large: the small norm has no influence
        ([0.0, 0.0, 1.0, 100.0], 10, {"p3": "median 1"}),  # zero norms are ignored
        ([0.0, 0.0], 10, {}),
        ([1.0, INF, -INF], 10, {"p1": "not finite", "p2": "not finite"}),
        ([1.0, NAN, 1e9], 0, {"p1": "its gradient is not finite"}),  # no limit: any finite norm is accepted
        ([NAN, NAN], 10, {"p0": "not finite", "p1": "not finite"}),
    ],
)
def test_outlier_norms_are_left_out(norms, limit, found):
    left_out = outliers({f"p{number}": Claim(norm=norm) for number, norm in enumerate(norms)}, limit)
    assert left_out.keys() == found.keys()
    assert all(words in left_out[peer] for peer, words in found.items())


def drawn(states, peers="ABCDE"):
    """Return the state to adopt by each of 200 lots."""
    held = {peer: state.encode() for peer, state in zip(peers, states, strict=False)}
    return [state_to_adopt(held, bytes([lot])).decode() for lot in range(200)]


@pytest.mark.parametrize("states", ["xxy", "xxxyz", "xxx", "xxyz"])
def test_state_of_most_members_is_adopted(states):
    assert set(drawn(states)) == {"x"}


def test_lot_breaks_ties_of_states():
    by_lot = drawn("xyz")
    assert by_lot == drawn("zyx", peers="CBA")
    assert all(40 < by_lot.count(state) < 100 for state in "xyz")


def test_claimed_samples_are_capped():
    assert Claim(80, 640.0, 1.0).counted(most_samples=20) == Claim(20, 160.0, 1.0)
    assert Claim(20, 640.0, 1.0).counted(most_samples=20) == Claim(20, 640.0, 1.0)
    claim = Claim(2**40, trained=Spans.of([(0, 8), (10, 2**40)]))
    assert claim.counted(most_samples=20).trained == Spans.of([(0, 8), (10, 2 + 20 + USELESS_AT_MOST)])


@pytest.mark.parametrize(
    ("claimed", "agreed"),
    [((None, None), None), ((0.5, None), 0.5), ((2.0, 1.0), 1.0), ((3.0, 1.0, 2.0), 2.0)],
)
def test_members_agree_on_median_score(claimed, agreed):
    said = [Claim.parse(Claim(samples=1, norm=1.0, score=score).to_bytes()) for score in claimed]
    assert [claim.score for claim in said] == list(claimed)
    _, outcome = judge(map(id_of, "abc"[: len(said)]), said, most_samples=9, norm_limit=10.0)
    assert outcome.score == agreed


@pytest.mark.parametrize(
    ("members", "part_bytes", "all_bytes", "low", "high"),
    [
        ([Measured()] * 2, MIB, 2**30, 0.0, 0.0),
        ([QUICK] * 3, MIB, 2**30, 10.0, 15.0),
        ([ENDLESS] * 2, MIB, 2**30, 60.0, 60.0),  # all slow: up to a minute
        ([QUICK, ENDLESS, QUICK], MIB, 2**30, 30.0, 30.0),  # only one slow: up to half a minute
        ([SMALL] * 2, 2**19, 2**15, 0.01, 1.0),  # an adapter's parts are smaller than the limit
        ([TRIPS] * 2, 2**19, 40 * 2**10, 0.0, 0.0),  # it says nothing about the link
        (MANY, 2**19, 2**30, 15 * 2**19 / (5 * 1.25e5), 30.0),  # the slow one needs this long for all others
    ],
)
def test_patience_follows_link_speed_within_bounds(members, part_bytes, all_bytes, low, high):
    claims = {str(number): Claim(measured=measured) for number, measured in enumerate(members)}
    assert low <= patience_s(claims, part_bytes, all_bytes) <= high


def test_late_vote_clears_suspicion():
    own = id_of("A")
    late = id_of("B")
    options = RoundOptions(NoCompression(), 1.0, 1.0, 1.0, 2.0, 60.0)
    averages = averages_of([torch.zeros(1)])
    service = RoundService("run", True, averages, (), RoundRules(), options, None)
    claims = tuple(sign(key_of(name), b"a claim", b"") for name in "AB")

    async def receive_late_vote():
        dht = SimpleNamespace(signing_key=key_of("A"), tensors_lock=None)
        await service.start(dht, SimpleNamespace(peer_id=own), None)
        ballot = service.ballots.open(GroupInfo(b"round", (own, late), claims), limit_s=0.0)
        service.finder.blame.suspect(late, "it is late")
        vote = sign(key_of("B"), ballot.about, Vote(b"held" * 8).to_bytes(), has_key=False)
        request = JoinRequest(schema_hash=b"round", gather=Call(vote).to_bytes())
        await service.rpc_vote(request, SimpleNamespace(remote_id=late))

    asyncio.run(receive_late_vote())
    assert not service.finder.blame.is_suspect(late)


def test_group_includes_left_out_members():
    assert Round({"QmA": 4}, 1.0, 0, 0, True, left_out={"QmB": "too large"}).group == ("QmA", "QmB")


def test_default_rules_are_those_of_recipes():
    section = SwarmSection()
    assert RoundRules() == RoundRules(section.solo_after_s, section.norm_limit, section.robust_mean)


TENSORS = [torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), torch.ones(()), torch.zeros(7)]


def encoded(codec):
    """Split tensors into parts as a round does, each from one tensor; return the parts."""
    pieces = [piece for tensor in TENSORS for piece in tensor.reshape(-1).split(500)]
    return [codec.compress(piece, CompressionInfo.from_tensor(piece)) for piece in pieces]


@pytest.mark.parametrize(
    ("size", "is_wanted", "kept"),
    [
        (10, [False, False, False, False], [4]),
        (10, [False, True, True, True], [2, 3, 4]),  # the oldest is dropped when there is no room
        (10, [False, False, True, True], [2, 3, 4]),
        (31, [True, True, True, True], [4]),  # the last is never dropped
    ],
)
def test_log_keeps_rounds_while_wanted(size, is_wanted, kept):
    log = Log(limit_bytes=30)
    for number, is_it in enumerate(is_wanted, start=1):
        header = Header((b"A",), (b"said",), b"proof", num_parts=1, num_bytes=size)
        log.add(b"%d" % number, header, (), is_wanted=is_it)
    assert [number for number in range(1, 5) if log.find(b"%d" % number) is not None] == kept


@pytest.mark.parametrize("name", CODECS)
def test_average_is_decoded_part_by_part(name, monkeypatch):
    codec = CODECS[name]()
    parts = encoded(codec)
    read_tensor = rounds.read_tensor
    decoded_before = []

    def noted(part):
        assert not any(one() is not None for one in decoded_before)
        decoded_before.append(weakref.ref(memory := read_tensor(part).numpy().copy()))
        return torch.from_numpy(memory)

    monkeypatch.setattr(rounds, "read_tensor", noted)
    averages = list(decoded(parts, TENSORS))
    assert [average.shape for average in averages] == [tensor.shape for tensor in TENSORS]
    values = torch.cat([codec.extract(part) for part in parts])
    assert torch.cat([average.view(-1) for average in averages]).equal(values)
    assert len(decoded_before) == len(parts)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts[:-1], "7 values of a tensor are missing"),
        (lambda parts: [], "are missing"),
        (lambda parts: [*parts, parts[-1]], "belongs to no tensor"),
        (lambda parts: [parts[0], *parts], "more than one tensor"),
        (lambda parts: [runtime_pb2.Tensor(buffer=b"?", dtype="float32", size=[3]), *parts], "1 bytes where"),
        (lambda parts: [serialize_torch_tensor(torch.full((500,), torch.nan)), *parts[1:]], "not finite"),
    ],
)
def test_mismatched_parts_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        list(decoded(change(encoded(NoCompression())), TENSORS))
