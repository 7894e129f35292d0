"""How a group decides whether its round is committed: how votes are counted, and how they spread."""

import asyncio
import itertools
import pickle
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import id_of, key_of
from trahiv_cli.members.records import sign
from trahiv_cli.rounds import vote as ballots
from trahiv_cli.rounds.vote import (
    LONGEST_REASON,
    TWO_VOTES,
    Ballot,
    Call,
    Vote,
    decide,
    digest_of,
    proof_of,
)

GROUP = "abcdefg"
HELD = Vote(b"held" * 8)
OTHER = Vote(b"other".ljust(32))
FULL = Vote(reason="its disk is full")
VOTES = {"H": HELD, "O": OTHER, "F": FULL, "-": Vote()}  # as tables write them; a dot for no vote
PEERS = {name: id_of(name) for name in "ABCD"}


def votes_of(group, letters):
    return {peer: VOTES[letter] for peer, letter in zip(group, letters, strict=False) if letter != "."}


@pytest.mark.parametrize(
    ("letters", "quorum", "committed", "words"),
    [
        ("HHH", 2, True, []),
        ("HH.", 2, True, ["peer c did not vote"]),
        ("HHO", 2, True, ["peer c did not average: it holds other values"]),
        ("HO.", 2, False, ["1 of 3, 2 must", "peer b did not average", "peer c did not vote"]),
        ("H.", 2, False, ["1 of 2, 2 must", "peer b did not vote"]),
        ("HHOO", 2, False, ["2 of 4, 3 must"]),
        ("HHHO", 4, False, ["3 of 4, 4 must"]),
        ("HHH", 4, False, ["3 of 3, 4 must"]),
        ("FHH", 2, False, ["its disk is full"]),
        ("---", 2, False, []),
    ],
)
def test_member_commits_with_majority(letters, quorum, committed, words):
    group = GROUP[: len(letters)]
    known = votes_of(group, letters) | dict.fromkeys("xyz", HELD)  # strangers do not count
    decision = decide("a", group, known, quorum)
    told = decision.reason.replace(" peers hold this average", "")
    assert decision.is_committed is committed
    assert all(word in told for word in words)
    assert words or not committed or not told


@pytest.mark.parametrize("size", range(2, 7))
def test_at_most_one_average_is_committed(size):
    group = GROUP[:size]
    for held in itertools.product([b"x", b"y", b""], repeat=size):
        votes = {peer: Vote(digest) for peer, digest in zip(group, held, strict=True)}
        committed = {votes[peer].digest for peer in group if decide(peer, group, votes, 2).is_committed}
        assert len(committed) <= 1
        assert b"" not in committed
        for heard in itertools.product([False, True], repeat=size - 1):
            known = {"a": votes["a"]} | {peer: votes[peer] for peer in itertools.compress(group[1:], heard)}
            assert not decide("a", group, known, 2).is_committed or held[0] in committed


def test_votes_round_trip_with_truncated_reasons():
    for vote in (HELD, Vote(bytes(32), "why", {"QmA": "not finite"}, "QmB", True, True)):
        assert Vote.parse(vote.to_bytes()) == vote
    long = Vote.parse(MSGPackSerializer.dumps([b"", "x" * 9999, {"QmA": "x" * 9999}, "", False, False]))
    assert len(long.reason) == len(long.notes["QmA"]) == LONGEST_REASON
    assert len(Vote.parse(Vote(b"", "x" * 9999).to_bytes()).reason) == LONGEST_REASON
    # Between processes:
    error = pickle.loads(pickle.dumps(ballots.NotCommitted("too few", b"proof", 12)))
    assert (str(error), error.proof, error.samples) == ("too few", b"proof", 12)


def group_of(names, group_id=b"group"):
    """Return a group in which each member has stated a claim."""
    claims = tuple(claim_of(name) for name in names)
    return GroupInfo(group_id, tuple(PEERS[name] for name in names), claims)


@cache
def claim_of(name):
    return sign(key_of(name), b"a claim", name.encode())


def ballot_of(names, limit_s=0.6, clients=(), grace_s=0.1):
    return Ballot(group_of(names), limit_s, [PEERS[client] for client in clients], grace_s=grace_s)


def statement_of(name, vote, names="ABC"):
    """Return a member's signed vote in the round of a group."""
    return sign(key_of(name), ballot_of(names).about, vote.to_bytes(), has_key=False)


async def hold(members, name, vote, quorum=2, cut=()):
    """Have a member vote; absent members, and those that `cut` separates from it, can't be reached."""

    async def ask(peer, call):
        other = next(other for other in PEERS if PEERS[other] == peer)
        if other not in members or {name, other} in map(set, cut):
            raise ConnectionError
        return await members[other].answer(PEERS[name], Call.parse(call.to_bytes()))

    return await members[name].hold(PEERS[name], key_of(name), vote, quorum, ask)


async def hold_all(members, votes, *options):
    """Have all members vote at once; return their decisions by name."""
    held = (hold(members, name, vote, *options) for name, vote in votes.items())
    return dict(zip(votes, await asyncio.gather(*held), strict=True))


@pytest.mark.parametrize(
    ("letters", "quorum", "cut", "committed", "unheard"),
    [
        ("HHO", 2, (), "AB", ""),
        ("HH", 2, (), "AB", "C"),  # C died before its vote
        ("HH", 3, (), "", "C"),
        ("H", 2, (), "", "BC"),
        ("HHH", 3, ["AB"], "ABC", ""),  # C passes on their votes
        ("HHF", 2, (), "AB", ""),
        ("HF", 2, (), "", "C"),
    ],
)
def test_members_agree_despite_cut_links(letters, quorum, cut, committed, unheard):
    votes = votes_of("ABC", letters)
    members = {name: ballot_of("ABC") for name in votes}
    decisions = asyncio.run(hold_all(members, votes, quorum, cut))
    assert "".join(name for name in votes if decisions[name].is_committed) == committed
    for name, ballot in members.items():
        assert ballot.unheard == {PEERS[other] for other in unheard}
        assert all(f"{PEERS[other]} did not" in decisions[name].reason for other in unheard)
    if votes.get("C") is FULL:
        assert f"{PEERS['C']} did not average: its disk is full" in decisions["A"].reason


@pytest.mark.parametrize("clients", ["B", ""])
def test_client_vote_is_waited_for(clients):
    async def scene():
        server = ballot_of("AB", 5.0, clients, grace_s=5.0)
        client = ballot_of("AB", 5.0, grace_s=5.0)
        waiting = asyncio.create_task(hold({"A": server}, "A", HELD))
        await asyncio.sleep(0.01)  # the client finishes its average a little later
        return await asyncio.gather(waiting, hold({"A": server, "B": client}, "B", HELD))

    assert all(decision.is_committed for decision in asyncio.run(scene()))


def test_double_vote_commits_nothing():
    """C returned one average to A and another to B: with its two votes, each would have a majority."""

    votes = votes_of("AB", "HO")
    members = {name: ballot_of("ABC") for name in votes}
    for name, vote in votes.items():
        members[name].cast(PEERS["C"], statement_of("C", vote))
    decisions = asyncio.run(hold_all(members, votes))
    assert not any(decision.is_committed for decision in decisions.values())
    assert all(ballot.votes[PEERS["C"]] is TWO_VOTES for ballot in members.values())


def test_improperly_signed_vote_is_refused():
    ballot = ballot_of("ABC")
    for name, statement in [
        ("B", HELD.to_bytes()),  # not signed
        ("B", statement_of("C", HELD)),  # of another member
        ("B", statement_of("B", HELD, "BCA")),  # of another round
        ("D", statement_of("D", HELD, "ABCD")),  # of a non-member
        ("B", sign(key_of("B"), b"", bytes(9999))),  # longer than any vote
    ]:
        with pytest.raises(ValueError):
            ballot.cast(PEERS[name], statement)
    assert not ballot.votes
    for _ in range(2):  # the same vote, signed twice
        ballot.cast(PEERS["B"], statement_of("B", HELD))
    assert ballot.votes == {PEERS["B"]: HELD}


@pytest.mark.parametrize(
    ("waited_s", "is_committed", "answered", "words"),
    [(2.0, True, [True, True, True], ""), (5.0, False, [False, False, True], "did not vote")],
)
def test_expired_vote_is_ignored(monkeypatch, clock, waited_s, is_committed, answered, words):
    """A is late: B and C waited for its vote, undid the round, and may have committed another one."""
    monkeypatch.setattr(ballots, "time", SimpleNamespace(monotonic=clock))

    async def scene():
        ballot = ballot_of("ABC", 5.0)
        held = statement_of("B", HELD)
        ballot.cast(PEERS["B"], held)
        ballot.cast(PEERS["C"], statement_of("C", FULL))
        clock.now += waited_s
        return await hold({"A": ballot}, "A", HELD), await ballot.answer(PEERS["B"], Call(held))

    decision, digests = asyncio.run(scene())
    assert decision.is_committed is is_committed
    assert words in decision.reason
    assert "its disk is full" in decision.reason
    assert [digest != b"" for digest in digests] == answered


def test_votes_are_sent_only_on_request():
    async def scene():
        ballot = ballot_of("ABC")
        for name in "ABC":
            ballot.cast(PEERS[name], statement_of(name, HELD))
        ballot._is_settled.set()
        own = statement_of("A", HELD)
        digests = await ballot.answer(PEERS["A"], Call(own))
        return digests, await ballot.answer(PEERS["A"], Call(own, (digests[1], bytes(8))))

    digests, (found, unknown) = asyncio.run(scene())
    assert sum(map(len, digests)) == 3 * 8
    assert len(found) < 256 + 60
    assert unknown == b""
    heard = ballot_of("ABC")
    heard.cast(PEERS["B"], found)
    assert heard.votes == {PEERS["B"]: HELD}


def test_early_question_waits_for_ballot():
    async def scene():
        known = ballots.Ballots(num_kept=2)
        early = asyncio.create_task(known.find(b"group", PEERS["C"], 5.0))
        await asyncio.sleep(0)
        others = [known.find(b"%d" % number, PEERS["C"], 5.0) for number in range(100)]
        assert await asyncio.gather(*others) == [None] * 100, "answered at once"
        assert await known.find(b"never", PEERS["B"], 0.01) is None
        opened = known.open(group_of("AB"), 5.0)
        assert await early is opened is known[b"group"]
        for number in range(2):
            known.open(group_of("AB", b"%d" % number), 5.0)
        with pytest.raises(KeyError):
            known[b"group"]

    asyncio.run(scene())


def test_digest_covers_values_shapes_and_dtypes():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    square = values.view(2, 2)
    others = [values + 2**-21, values.flip(0), square, values.double(), values[:3], values.bfloat16()]
    assert len({digest_of([one]) for one in (values, *others)}) == 7
    assert digest_of(others) == digest_of([one.clone() for one in others])
    assert digest_of([square.T]) == digest_of([square.T.contiguous()])


def test_proof_covers_average_statements_and_schema():
    values = torch.ones(4)
    said = [b"a said", b"b said"]
    proof = proof_of([values], said, b"schema")
    assert proof == proof_of([values.clone()], said, b"schema")
    assert proof != proof_of([values, values], said, b"schema")
    assert proof != proof_of([values], said, b"other")
    assert proof != proof_of([values], [b"a said", b"c said"], b"schema")
