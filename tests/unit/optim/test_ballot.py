"""How a group decides whether its round happened."""

import itertools

import pytest
import torch
from hivemind.utils import MSGPackSerializer

from trahiv_cli.optim.ballot import LONGEST_REASON, Vote, decide, digest_of

GROUP = "abcdefg"
HELD = Vote(b"held" * 8)
OTHER = Vote(b"other".ljust(32))
FAILED = Vote(reason="peer b sent nothing for too long")


@pytest.mark.parametrize(
    ("votes", "quorum", "committed", "words"),
    [
        ([HELD, HELD, HELD], 2, True, []),
        ([HELD, HELD, None], 2, True, ["peer c did not vote"]),
        ([HELD, HELD, OTHER], 2, True, ["peer c did not average: it holds other values"]),
        ([HELD, HELD, FAILED], 2, True, ["peer c did not average: peer b sent nothing for too long"]),
        ([HELD, OTHER, OTHER], 2, False, ["1 of 3", "2 must", "peer b", "peer c"]),
        ([HELD, OTHER, None], 2, False, ["1 of 3", "peer b did not average", "peer c did not vote"]),
        ([HELD, None], 2, False, ["1 of 2", "2 must", "peer b did not vote"]),
        ([HELD, HELD, OTHER, OTHER], 2, False, ["2 of 4", "3 must"]),
        ([HELD, HELD, HELD, OTHER], 2, True, ["peer d"]),
        ([HELD, HELD, HELD, OTHER], 4, False, ["3 of 4", "4 must"]),
        ([HELD, HELD, HELD], 4, False, ["3 of 3", "4 must"]),
        ([FAILED, HELD, HELD], 2, False, [FAILED.reason]),
        ([Vote(), Vote(), Vote()], 2, False, []),
    ],
)
def test_a_member_commits_with_most_of_its_group(votes, quorum, committed, words):
    group = GROUP[: len(votes)]
    known = {peer: vote for peer, vote in zip(group, votes, strict=True) if vote}
    decision = decide("a", group, known, quorum)
    assert decision.is_committed is committed
    assert all(word in decision.reason for word in words)
    if committed and not words:
        assert not decision.reason and not decision.dissenters


def test_votes_of_strangers_do_not_count():
    votes = dict.fromkeys("axyz", HELD) | {"b": OTHER, "c": OTHER}
    assert not decide("a", "abc", votes, 2).is_committed


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


# -- on the wire ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vote", [Vote(), HELD, FAILED, Vote(bytes(32), notes={"QmA": "its parts are not finite"})]
)
def test_a_vote_arrives_as_it_was_sent(vote):
    assert Vote.parse(vote.to_bytes()) == vote


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"held",
        {},
        [],
        [b"held"],
        ["held", "", {}],
        [b"held", b"", {}],
        [b"held", "", []],
        [b"held", "", {1: "why"}],
        [b"held", "", {"QmA": 1}],
        [b"held", "", {}, 1],
        [b"held" * 9, "", {}, "", False],
        [b"held" * 8, "", {}, "Q" * 101, False],
        [b"held" * 8, "", {}, "", 1],
    ],
)
def test_what_is_not_a_vote_is_refused(data):
    with pytest.raises(ValueError, match="not a vote|not MessagePack"):
        Vote.parse(MSGPackSerializer.dumps(data))


def test_long_reasons_are_cut():
    long = "x" * 10 * LONGEST_REASON
    for vote in (
        Vote.parse(MSGPackSerializer.dumps([b"", long, {"QmA": long}, "", False])),
        Vote.parse(Vote(b"", long).to_bytes()),
    ):
        assert len(vote.reason) == LONGEST_REASON
        assert all(len(why) == LONGEST_REASON for why in vote.notes.values())


# -- digests --------------------------------------------------------------------------------------


def test_equal_tensors_have_equal_digests():
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(1.0), torch.ones(0)]
    assert digest_of(tensors) == digest_of([tensor.clone() for tensor in tensors])
    assert digest_of([tensors[0].T]) == digest_of([tensors[0].T.contiguous()])


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 3.0, 4.0 + 2**-21]),
        torch.tensor([1.0, 2.0, 4.0, 3.0]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0, 3.0]),
    ],
    ids=["last bit", "order", "shape", "dtype", "length"],
)
def test_a_digest_tells_tensors_apart(other):
    assert digest_of([torch.tensor([1.0, 2.0, 3.0, 4.0])]) != digest_of([other])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_dtype_has_a_digest(dtype):
    assert len(digest_of([torch.ones(3, dtype=dtype)])) == 32
