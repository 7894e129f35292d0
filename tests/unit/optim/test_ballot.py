"""How a group decides whether its round happened: what follows from votes, and how members hear of them."""

import asyncio
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import id_of, key_of
from trahiv_cli.optim import ballot as ballots
from trahiv_cli.optim.ballot import (
    BALLOTS_KEPT,
    LONGEST_REASON,
    TWO_VOTES,
    Ballot,
    Ballots,
    NotCommitted,
    Vote,
    decide,
    digest_of,
    proof_of,
)
from trahiv_cli.swarm.statements import sign

GROUP = "abcdefg"
HELD, OTHER = Vote(b"held" * 8), Vote(b"other".ljust(32))
FAILED = Vote(reason="peer b sent nothing for too long")
PEERS = {name: id_of(name) for name in "ABCD"}


@pytest.mark.parametrize(
    ("votes", "quorum", "committed", "words"),
    [
        ([HELD, HELD, HELD], 2, True, []),
        ([HELD, HELD, None], 2, True, ["peer c did not vote"]),
        ([HELD, HELD, OTHER], 2, True, ["peer c did not average: it holds other values"]),
        ([HELD, OTHER, OTHER], 2, False, ["1 of 3", "2 must", "peer b", "peer c"]),
        ([HELD, OTHER, None], 2, False, ["1 of 3", "peer b did not average", "peer c did not vote"]),
        ([HELD, None], 2, False, ["1 of 2", "2 must", "peer b did not vote"]),
        ([HELD, HELD, OTHER, OTHER], 2, False, ["2 of 4", "3 must"]),
        ([HELD, HELD, HELD, OTHER], 4, False, ["3 of 4", "4 must"]),
        ([HELD, HELD, HELD], 4, False, ["3 of 3", "4 must"]),
        ([FAILED, HELD, HELD], 2, False, [FAILED.reason]),
        ([Vote(), Vote(), Vote()], 2, False, []),
    ],
)
def test_a_member_commits_with_most_of_its_group(votes, quorum, committed, words):
    group = GROUP[: len(votes)]
    known = {peer: vote for peer, vote in zip(group, votes, strict=True) if vote}
    decision = decide("a", group, known | dict.fromkeys("xyz", HELD), quorum)  # strangers do not count
    assert decision.is_committed is committed and all(word in decision.reason for word in words)
    assert words or not committed or not decision.reason


@pytest.mark.parametrize("size", range(2, 8))
def test_two_averages_are_never_both_committed(size):
    group = GROUP[:size]
    for held in itertools.product([b"x", b"y", b""], repeat=size):
        votes = {peer: Vote(digest) for peer, digest in zip(group, held, strict=True)}
        committed = {votes[peer].digest for peer in group if decide(peer, group, votes, 2).is_committed}
        assert len(committed) <= 1 and b"" not in committed


@pytest.mark.parametrize("size", range(2, 6))
def test_a_member_that_missed_votes_commits_no_more_than_one_that_heard_all(size):
    group = GROUP[:size]
    for held in itertools.product([b"x", b"y"], repeat=size):
        votes = {peer: Vote(digest) for peer, digest in zip(group, held, strict=True)}
        would = decide("a", group, votes, 2).is_committed
        for heard in itertools.product([False, True], repeat=size - 1):
            known = {"a": votes["a"]} | {
                peer: votes[peer] for peer, was_heard in zip(group[1:], heard, strict=True) if was_heard
            }
            assert decide("a", group, known, 2).is_committed <= would


@pytest.mark.parametrize("vote", [HELD, Vote(bytes(32), "why", {"QmA": "not finite"}, "QmB", True)])
def test_a_vote_arrives_as_it_was_sent_but_for_long_reasons(vote):
    assert Vote.parse(vote.to_bytes()) == vote
    long = Vote.parse(MSGPackSerializer.dumps([b"", "x" * 9999, {"QmA": "x" * 9999}, "", False]))
    assert len(long.reason) == len(long.notes["QmA"]) == LONGEST_REASON
    assert len(Vote.parse(Vote(b"", "x" * 9999).to_bytes()).reason) == LONGEST_REASON


def test_a_round_that_was_not_committed_says_what_for_a_member_had_voted_in_any_process():
    error = pickle.loads(pickle.dumps(NotCommitted("too few", b"proof", 12)))
    assert (str(error), error.proof, error.samples) == ("too few", b"proof", 12)


# -- a vote among members -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _late_votes_are_waited_for_a_moment(monkeypatch):
    monkeypatch.setattr(ballots, "VOTE_GRACE_S", 0.1)


def group_of(names, group_id=b"group"):
    """A group in which each member has said something."""
    return GroupInfo(group_id, tuple(PEERS[name] for name in names), tuple(name.encode() for name in names))


def statement_of(name, vote, names="ABC"):
    """A member's vote, signed for the round of a group; this peer's own, as its ballot would send it."""
    said = []

    async def ask(peer, statement):
        said.append(statement)
        return {}

    async def hold():
        one = Ballot(group_of(names), 0.0)
        await one.hold(PEERS[name], key_of(name), vote, 2, ask)
        await asyncio.sleep(0)

    asyncio.run(hold())
    return said[0]


def ballot_of(names, limit_s=0.6, clients=()):
    return Ballot(group_of(names), limit_s, [PEERS[client] for client in clients])


async def hold(members, name, vote, quorum=2, cut=()):
    """Have a member vote; those that are not there, or in `cut` with it, can't be reached."""

    async def ask(peer, statement):
        other = next(other for other in PEERS if PEERS[other] == peer)
        if other not in members or {name, other} in map(set, cut):
            raise ConnectionError
        return await members[other].answer(PEERS[name], statement)

    return await members[name].hold(PEERS[name], key_of(name), vote, quorum, ask)


@pytest.mark.parametrize(
    ("votes", "quorum", "cut", "committed", "unheard"),
    [
        ({"A": HELD, "B": HELD, "C": HELD}, 2, (), "ABC", ""),
        ({"A": HELD, "B": HELD, "C": OTHER}, 2, (), "AB", ""),
        ({"A": HELD, "B": HELD}, 2, (), "AB", "C"),  # C died before its vote
        ({"A": HELD, "B": HELD}, 3, (), "", "C"),
        ({"A": HELD}, 2, (), "", "BC"),
        ({"A": HELD, "B": HELD, "C": HELD}, 3, ["AB"], "ABC", ""),  # C tells them of each other's votes
        ({"A": HELD, "B": HELD, "C": Vote(reason="its disk is full")}, 2, (), "AB", ""),
        ({"A": HELD, "B": Vote(reason="its disk is full")}, 2, (), "", "C"),
    ],
)
def test_members_come_to_one_decision_whoever_reaches_whom(votes, quorum, cut, committed, unheard):
    async def scene():
        members = {name: ballot_of("ABC") for name in votes}
        held = await asyncio.gather(*(hold(members, name, votes[name], quorum, cut) for name in votes))
        return members, dict(zip(votes, held, strict=True))

    members, decisions = asyncio.run(scene())
    assert {name for name in votes if decisions[name].is_committed} == set(committed)
    for name, ballot in members.items():
        assert ballot.unheard == {PEERS[other] for other in unheard}
        told = decisions[name].reason
        assert all(f"{PEERS[other]} did not" in told for other in "ABC" if other in unheard)
    if "C" in votes and not votes["C"].digest:
        assert f"{PEERS['C']} did not average: its disk is full" in decisions["A"].reason


@pytest.mark.parametrize("is_known_to_be_one", [True, False])
def test_a_member_that_asks_and_can_t_be_asked_is_waited_for(is_known_to_be_one, monkeypatch):
    """As a client is: it serves nobody, and tells its vote by asking."""

    async def scene():
        server = ballot_of("AB", 5.0, "B" if is_known_to_be_one else "")
        client = ballot_of("AB", 5.0)
        waiting = asyncio.create_task(hold({"A": server}, "A", HELD))
        await asyncio.sleep(0.01)  # the client has its average a moment later
        return await asyncio.gather(waiting, hold({"A": server, "B": client}, "B", HELD))

    monkeypatch.setattr(ballots, "VOTE_GRACE_S", 5.0)
    assert all(decision.is_committed for decision in asyncio.run(scene()))


def test_a_member_that_votes_for_two_averages_makes_no_second_history():
    """It returned one average to A and another to B: with its two votes each would be most of the group."""

    async def scene():
        members = {name: ballot_of("ABC") for name in "AB"}
        for name, vote in (("A", HELD), ("B", OTHER)):
            members[name].cast(PEERS["C"], lies[vote.digest])
        held = await asyncio.gather(hold(members, "A", HELD), hold(members, "B", OTHER))
        return members, [decision.is_committed for decision in held]

    lies = {vote.digest: statement_of("C", vote) for vote in (HELD, OTHER)}
    members, committed = asyncio.run(scene())
    assert committed == [False, False]
    assert all(ballot.votes[PEERS["C"]] is TWO_VOTES for ballot in members.values())


def test_a_vote_counts_only_as_its_member_signed_it_for_this_round():
    ballot, whole = ballot_of("ABC"), statement_of("B", HELD)
    for peer, statement in [
        (PEERS["B"], HELD.to_bytes()),  # not signed
        (PEERS["B"], statement_of("C", HELD)),  # another one's
        (PEERS["B"], statement_of("B", HELD, "BCA")),  # of another round
        (PEERS["D"], statement_of("D", HELD, "ABCD")),  # of no member
        (PEERS["B"], sign(key_of("B"), b"", bytes(9999))),  # longer than a vote is
    ]:
        with pytest.raises(ValueError):
            ballot.cast(peer, statement)
    assert not ballot.votes
    ballot.cast(PEERS["B"], whole)
    ballot.cast(PEERS["B"], statement_of("B", HELD))  # signed twice, and the same
    assert ballot.votes == {PEERS["B"]: HELD}


def test_a_vote_that_its_member_may_have_given_up_counts_no_more_nor_does_one_that_was_undone(monkeypatch):
    """A is late: B and C have waited for its vote, undone the round, and may have committed another one."""
    now = [0.0]
    monkeypatch.setattr(ballots, "time", SimpleNamespace(monotonic=lambda: now[0]))
    held, failed = statement_of("B", HELD), statement_of("C", Vote(reason="its disk is full"))

    async def scene(waited_s):
        ballot = ballot_of("ABC", 5.0)
        ballot.cast(PEERS["B"], held)
        ballot.cast(PEERS["C"], failed)
        now[0] += waited_s
        decision = await hold({"A": ballot}, "A", HELD)
        return decision, await ballot.answer(PEERS["B"], held)

    decision, told = asyncio.run(scene(2.0))
    assert decision.is_committed and set(told) == {PEERS[name] for name in "ABC"}
    decision, told = asyncio.run(scene(5.0))
    assert not decision.is_committed and f"{PEERS['B']} did not vote" in decision.reason
    assert "its disk is full" in decision.reason and set(told) == {PEERS["C"]}


# -- the ballots of a peer ------------------------------------------------------------------------


def test_who_asks_early_waits_for_its_round_with_one_question_at_a_time():
    async def scene():
        known = Ballots()
        early = asyncio.create_task(known.find(b"group", PEERS["C"], 5.0))
        await asyncio.sleep(0)
        others = [known.find(b"%d" % number, PEERS["C"], 5.0) for number in range(100)]
        assert await asyncio.gather(*others) == [None] * 100, "answered at once"
        assert await known.find(b"never", PEERS["B"], 0.01) is None
        opened = known.open(group_of("AB"), 5.0)
        assert await early is opened is known[b"group"]
        for number in range(BALLOTS_KEPT):
            known.open(group_of("AB", b"%d" % number), 5.0)
        with pytest.raises(KeyError):
            known[b"group"]

    asyncio.run(scene())


# -- digests --------------------------------------------------------------------------------------


def test_a_digest_is_of_values_shapes_dtypes_and_order_and_of_nothing_else():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    others = [
        values + 2**-21,
        values.flip(0),
        values.view(2, 2),
        values.double(),
        values[:3],
        values.bfloat16(),
    ]
    assert len({digest_of([one]) for one in (values, *others)}) == 7
    assert digest_of(others) == digest_of([one.clone() for one in others])
    assert digest_of([others[2].T]) == digest_of([others[2].T.contiguous()])


def test_a_vote_is_on_the_average_what_members_said_and_the_agreement():
    average, said = [torch.ones(2)], [b"a said", b"b said"]
    others = [proof_of([torch.zeros(2)], said, b"schema"), proof_of(average, said, b"other")]
    others += [proof_of(average, [b"a said", b"c said"], b"schema"), proof_of(average, said, b"schema")]
    assert len(set(others)) == 4 and others[-1] == proof_of(average, said, b"schema")
