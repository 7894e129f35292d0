"""One of four lies in a round, in one field of one kind of message, in every way there is.

Whatever it says, the three others commit their step, with the same bits and the same history, within one
averaging timeout; and where its lie had a try fail, or what it brought left out, they say who it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from google.protobuf.message import Message as Protobuf
from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import key_of
from tests.kit.lies import lies
from tests.simulation.members import AVERAGING_TIMEOUT_S, SAMPLES, Member
from tests.simulation.messages import changes
from tests.simulation.network import Message, Network, VirtualLoop
from trahiv_cli.optim import blame, group_finder
from trahiv_cli.optim.ballot import Vote
from trahiv_cli.optim.history import History
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.swarm.corrections import streams
from trahiv_cli.swarm.snapshot import unpacked
from trahiv_cli.swarm.statements import content_of, sign

TRIES = 6
HONEST = ("anna", "ben", "cem")


class Swarm:
    """Three honest members and a liar, made once: each lie finds them as new."""

    def __init__(self) -> None:
        self.members = [Member(name, number) for number, name in enumerate((*HONEST, "liar"))]
        *self.honest, self.liar = self.members
        self.after = {leads: self._history(leads=leads) for leads in (True, False)}
        """Histories after which the liar comes first, or last, in the order of leaders."""

    def _history(self, *, leads: bool) -> History:
        place = 0 if leads else -1
        return next(
            history
            for history in (History(step, SAMPLES * step) for step in range(1, 1000))
            if self._order(history)[place] is self.liar
        )

    def _order(self, history: History) -> list[Member]:
        schema = self.liar.averager.schema_hash + history.step.to_bytes(8, "big") + history.digest
        named = SimpleNamespace(schema=schema)
        return sorted(self.members, key=lambda member: group_finder.GroupFinder._order(named, member.id))

    def play(
        self,
        *,
        leads: bool,
        tamper: Callable[[Message], list[bytes]] = lambda message: [message.content],
        claim: bytes | None = None,
    ) -> float:
        """Take one step, and say how many seconds of the swarm's it took.

        Args:
            leads: whether the liar leads the first group, if it is let.
            tamper: see `Network`.
            claim: of the liar, in place of its own.
        """
        network = Network()
        network.tamper = tamper
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(self._play(network, self.after[leads], claim))
            took_s = runner.get_loop().time()
        return took_s

    async def _play(self, network: Network, history: History, claim: bytes | None) -> None:
        for member in self.members:
            await member.enter(network, history)
        lying = asyncio.create_task(self._try_on(self.liar, claim))
        await asyncio.gather(*(self._try_on(member) for member in self.honest))
        lying.cancel()
        await asyncio.wait({lying})

    async def _try_on(self, member: Member, claim: bytes | None = None) -> None:
        """Try until a step is committed, as the optimizer does."""
        before = member.history
        for _ in range(TRIES):
            member.expect([other for other in self.members if other is not member])
            ahead = [other for other in self.honest if other.history.step > before.step]
            if await member.attempt(claim) or (ahead and await member.replay(ahead[0])):
                return
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        for module in (group_finder, blame):
            patch.setattr(module, "time", clock)
        patch.setattr(P2P, "receive_protobuf", staticmethod(streams.receive_protobuf))
        yield Swarm()


def complaints(swarm: Swarm, took_s: float) -> list[str]:
    """What is not as it was promised."""
    found = []
    if behind := [member.name for member in swarm.honest if member.outcome is None]:
        return [f"no step for {behind}: {[member.trouble for member in swarm.honest]}"]
    if len({member.history for member in swarm.honest}) > 1:
        found.append("two histories")
    if len({member.average.numpy().tobytes() for member in swarm.honest}) > 1:
        found.append("two averages")
    if not all(bool(member.average.isfinite().all()) for member in swarm.honest):
        found.append("an average that is not finite")
    if any(member.average.abs().max() > 4.0 for member in swarm.honest):  # the liar's own reaches to it
        found.append("an average that is larger than all that it is of")
    if took_s > AVERAGING_TIMEOUT_S:
        found.append(f"it took {took_s:.0f} s")
    for member in swarm.honest:
        wrong = [other.name for other in swarm.honest if member.has_set_aside(other)]
        if wrong and not member.has_set_aside(swarm.liar):
            found.append(f"{member.name} takes {wrong} for liars")
    liar = swarm.liar.id.to_base58()
    was_left_out = any(liar in set(it.outcome.group) - it.outcome.samples.keys() for it in swarm.honest)
    has_failed = any(member.trouble for member in swarm.honest)
    if (was_left_out or has_failed) and not any(member.names(swarm.liar) for member in swarm.honest):
        found.append(f"nobody says who it was: {[member.trouble for member in swarm.honest]}")
    return found


def judge(swarm: Swarm, cases: Iterator[tuple[str, dict]]) -> None:
    """Play all cases, and list those in which something was not as promised."""
    wrong, played = {}, 0
    for what, case in cases:
        for leads in (True, False):
            played += 1
            if found := complaints(swarm, swarm.play(leads=leads, **case)):
                wrong[f"{what}, {'leading' if leads else 'following'}"] = found
    assert played > 20
    told = "\n".join(f"{what}: {it}" for what, it in wrong.items())
    assert not wrong, f"{len(wrong)} of {played}:\n{told}"


OWN = Claim(SAMPLES, float(SAMPLES), 1.0, bytes(8), 3)


@pytest.mark.parametrize("leads", [True, False])
def test_four_that_do_not_lie_take_their_step_at_once(swarm, leads):
    took_s = swarm.play(leads=leads)
    assert complaints(swarm, took_s) == [] and took_s < 1.0
    assert all(len(member.outcome.samples) == 4 for member in swarm.members)


def test_no_claim_does_harm(swarm):
    tree, other = unpacked(OWN.to_bytes()), unpacked(Claim(3, 2.0, 5.0, b"other", 2).to_bytes())
    judge(
        swarm,
        ((what, {"claim": MSGPackSerializer.dumps(changed)}) for what, changed in lies(tree, other)),
    )


def resigned(swarm: Swarm, change: Callable[[list], object]) -> Callable[[Message], list[bytes]]:
    """Have the liar's votes say something else, signed by it."""

    def lie(group_id: bytes, statement: bytes) -> bytes:
        ballot = swarm.liar.averager._ballots[group_id]
        content = MSGPackSerializer.dumps(change(unpacked(content_of(statement))))
        return sign(key_of("liar"), ballot._about, content)

    def tamper(message: Message) -> list[bytes]:
        if message.sender != swarm.liar.id or message.call != "rpc_vote":
            return [message.content]
        if not message.is_answer:
            request = averaging_pb2.JoinRequest.FromString(message.content)
            request.gather = lie(request.schema_hash, request.gather)
            return [request.SerializeToString()]
        answer = averaging_pb2.MessageFromLeader.FromString(message.content)
        for place, peer in enumerate(answer.ordered_peer_ids):
            if peer == swarm.liar.id.to_bytes():
                answer.gathered[place] = lie(answer.group_id, answer.gathered[place])
        return [answer.SerializeToString()]

    return tamper


def test_no_vote_does_harm(swarm):
    tree = unpacked(Vote(b"x" * 32, "late", {"Qm": "why"}, "Qm").to_bytes())
    judge(
        swarm,
        (
            (what, {"tamper": resigned(swarm, lambda _, changed=changed: changed)})
            for what, changed in lies(tree, unpacked(Vote(b"y" * 32).to_bytes()))
        ),
    )


TYPES = {
    ("rpc_join_group", False): averaging_pb2.JoinRequest,
    ("rpc_join_group", True): averaging_pb2.MessageFromLeader,
    ("rpc_vote", False): averaging_pb2.JoinRequest,
    ("rpc_vote", True): averaging_pb2.MessageFromLeader,
    ("rpc_aggregate_part", False): averaging_pb2.AveragingData,
    ("rpc_aggregate_part", True): averaging_pb2.AveragingData,
}
"""What peers say to each other in a round."""


def recorded(swarm: Swarm, call: str, is_answer: bool) -> tuple[list[Protobuf], list[Protobuf]]:
    """Messages of a kind of a round without lies: the liar's, and the others', of another round."""
    own, others = [], []
    for leads in (True, False):

        def note(message: Message) -> list[bytes]:
            if (message.call, message.is_answer) == (call, is_answer):
                read = TYPES[call, is_answer].FromString(message.content)
                (own if message.sender == swarm.liar.id else others).append(read)
            return [message.content]

        swarm.play(leads=leads, tamper=note)
    return own, others


def altered(
    swarm: Swarm, call: str, is_answer: bool, change: Callable[[bytes], list[bytes]]
) -> Callable[[Message], list[bytes]]:
    """Have the liar's messages of a kind changed."""

    def tamper(message: Message) -> list[bytes]:
        is_meant = (message.sender, message.call, message.is_answer) == (swarm.liar.id, call, is_answer)
        return change(message.content) if is_meant else [message.content]

    return tamper


@pytest.mark.parametrize(("call", "is_answer"), TYPES, ids=lambda value: str(value))
def test_no_field_of_a_message_does_harm(swarm, call, is_answer):
    own, others = recorded(swarm, call, is_answer)
    kind = TYPES[call, is_answer]
    whole = max(own, key=lambda message: message.ByteSize())

    def edited(change: Callable[[Protobuf], None]) -> Callable[[bytes], list[bytes]]:
        def edit(content: bytes) -> list[bytes]:
            message = kind.FromString(content)
            change(message)
            return [message.SerializeToString()]

        return edit

    def cases() -> Iterator[tuple[str, dict]]:
        edits = {
            "missing": lambda content: [],
            "empty": lambda content: [b""],
            "doubled": lambda content: [content, content],
            "cut off": lambda content: [content[: len(content) // 2]],
            "no message": lambda content: [b"\xff" * 40],
            "another's": lambda content: [others[0].SerializeToString()],
        }
        edits |= {what: edited(change) for what, change in changes(whole, others[-1], own[0])}
        for what, edit in edits.items():
            yield what, {"tamper": altered(swarm, call, is_answer, edit)}

    judge(swarm, cases())


def test_no_round_that_a_liar_gives_to_go_through_is_taken_for_another(swarm):
    anna, ben, _ = swarm.honest

    async def go_through(change: Callable[[bytes], list[bytes]]) -> str:
        network, before = Network(), swarm.after[False]
        await swarm._play(network, before, None)
        truth = anna.average
        network.tamper = altered(swarm, "rpc_replay", True, change)
        anna.history = before
        anna.expect([swarm.liar, *swarm.honest[1:]])
        with anna.averager.get_tensors() as [tensor]:
            tensor.zero_()
        if not await anna.replay(swarm.liar):
            with anna.averager.get_tensors() as [tensor]:
                if tensor.any():
                    return "what failed has changed the average"
            if not await anna.replay(ben):
                return "nor did it go through what an honest one gave"
        return "" if anna.average.equal(truth) and anna.history == ben.history else "another step"

    def altered_field(change: Callable[[Protobuf], None]) -> Callable[[bytes], list[bytes]]:
        def edit(content: bytes) -> list[bytes]:
            message = averaging_pb2.DownloadData.FromString(content)
            change(message)
            return [message.SerializeToString()]

        return edit

    def altered_header(what: object) -> Callable[[bytes], list[bytes]]:
        def put(message: Protobuf) -> None:
            if message.metadata:
                message.metadata = MSGPackSerializer.dumps(what)

        return altered_field(put)

    headers: list[bytes] = []
    parts: list[Protobuf] = []

    def record(content: bytes) -> list[bytes]:
        message = averaging_pb2.DownloadData.FromString(content)
        if message.metadata:
            headers.append(message.metadata)
        else:
            parts.append(message)
        return [content]

    def play(change: Callable[[bytes], list[bytes]]) -> str:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(go_through(change))

    assert play(record) == "" and headers and parts
    tree = unpacked(headers[0])
    cases = {what: altered_header(changed) for what, changed in lies(tree)}
    cases |= {what: altered_field(change) for what, change in changes(parts[0], parts[-1])}
    cases |= {"missing": lambda _: [], "doubled": lambda content: [content] * 2, "cut": lambda it: [it[:9]]}
    wrong = {what: found for what, change in cases.items() if (found := play(change))}
    assert len(cases) > 100 and not wrong, wrong
