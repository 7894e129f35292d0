"""One of four lies in a round, in one field of one kind of message, in every way there is.

Whatever it says, the three others commit their step, with the same bits and the same history, within one
averaging timeout; and where its lie had a try fail, or what it brought left out, they say who it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
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

Edit = Callable[[bytes], list[bytes]]
"""What comes of a message: itself, nothing, something else, or more than one."""


class Swarm:
    """Three honest members and a liar, made once: each lie finds them as new."""

    def __init__(self) -> None:
        names = ("anna", "ben", "cem", "liar")
        self.members = [Member(name, number) for number, name in enumerate(names)]
        *self.honest, self.liar = self.members
        self.after = {leads: self._history(leads) for leads in (True, False)}
        """Histories after which the liar comes first, or last, in the order of leaders."""

    def _history(self, leads: bool) -> History:
        def comes_first_or_last(history: History) -> bool:
            schema = self.liar.averager.schema_hash + history.step.to_bytes(8, "big") + history.digest
            named = SimpleNamespace(schema=schema)
            order = sorted(self.members, key=lambda one: group_finder.GroupFinder._order(named, one.id))
            return order[0 if leads else -1] is self.liar

        return next(filter(comes_first_or_last, (History(step, SAMPLES * step) for step in range(1, 1000))))

    def play(
        self,
        leads: bool,
        tamper: Callable[[Message], list[bytes]] = lambda message: [message.content],
        claim: bytes | None = None,
    ) -> float:
        """Take one step, and say how many seconds of the swarm's it took.

        The liar leads the first group if it `leads` and is let; `claim` is in place of its own.
        """
        network = Network()
        network.tamper = tamper
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(self.play_on(network, self.after[leads], claim))
            return runner.get_loop().time()

    async def play_on(self, network: Network, history: History, claim: bytes | None = None) -> None:
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

    def complaints(self, took_s: float) -> list[str]:
        """What is not as it was promised."""
        troubles = [member.trouble for member in self.honest]
        if behind := [member.name for member in self.honest if member.outcome is None]:
            return [f"no step for {behind}: {troubles}"]
        averages = [member.average for member in self.honest]
        liar = self.liar.id.to_base58()
        outcomes = [member.outcome for member in self.honest]
        was_left_out = any(liar in set(one.group) - one.samples.keys() for one in outcomes)
        is_named = any(member.names(self.liar) for member in self.honest)
        found = {
            "two histories": len({member.history for member in self.honest}) > 1,
            "two averages": len({average.numpy().tobytes() for average in averages}) > 1,
            "an average that is not finite": not all(bool(one.isfinite().all()) for one in averages),
            # The liar's own reaches to that.
            "an average larger than all that it is of": any(one.abs().max() > 4.0 for one in averages),
            f"it took {took_s:.0f} s": took_s > AVERAGING_TIMEOUT_S,
            f"nobody says who it was: {troubles}": (was_left_out or any(troubles)) and not is_named,
        }
        for member in self.honest:
            wrong = [other.name for other in self.honest if member.has_set_aside(other)]
            found[f"{member.name} takes {wrong} for liars"] = wrong and not member.has_set_aside(self.liar)
        return [what for what, is_so in found.items() if is_so]


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        for module in (group_finder, blame):
            patch.setattr(module, "time", clock)
        patch.setattr(P2P, "receive_protobuf", staticmethod(streams.receive_protobuf))
        yield Swarm()


def judge(swarm: Swarm, cases: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Play all cases, and list those in which something was not as promised."""
    wrong, played = {}, 0
    for what, case in cases:
        for leads in (True, False):
            played += 1
            if found := swarm.complaints(swarm.play(leads, **case)):
                wrong[f"{what}, {'leading' if leads else 'following'}"] = found
    told = "\n".join(f"{what}: {it}" for what, it in wrong.items())
    assert played > 20 and not wrong, f"{len(wrong)} of {played}:\n{told}"


def altered(swarm: Swarm, call: str, is_answer: bool, edit: Edit) -> Callable[[Message], list[bytes]]:
    """Have the liar's messages of a kind changed."""

    def tamper(message: Message) -> list[bytes]:
        is_meant = (message.sender, message.call, message.is_answer) == (swarm.liar.id, call, is_answer)
        return edit(message.content) if is_meant else [message.content]

    return tamper


def edited(kind: Any, change: Callable[[Any], None]) -> Edit:
    def edit(content: bytes) -> list[bytes]:
        message = kind.FromString(content)
        change(message)
        return [message.SerializeToString()]

    return edit


@pytest.mark.parametrize("leads", [True, False])
def test_four_that_do_not_lie_take_their_step_at_once(swarm, leads):
    took_s = swarm.play(leads)
    assert swarm.complaints(took_s) == [] and took_s < 1.0
    assert all(len(member.outcome.samples) == 4 for member in swarm.members)


def test_no_claim_does_harm(swarm):
    tree = unpacked(Claim(SAMPLES, float(SAMPLES), 1.0, bytes(8), 3).to_bytes())
    other = unpacked(Claim(3, 2.0, 5.0, b"other", 2).to_bytes())
    judge(swarm, ((what, {"claim": MSGPackSerializer.dumps(lie)}) for what, lie in lies(tree, other)))


def test_no_vote_does_harm(swarm):
    def resigned(said: Any) -> Callable[[Message], list[bytes]]:
        """Have the liar's votes say something else, signed by it."""

        def lie(group_id: bytes) -> bytes:
            ballot = swarm.liar.averager._ballots[group_id]
            return sign(key_of("liar"), ballot._about, MSGPackSerializer.dumps(said))

        def tamper(message: Message) -> list[bytes]:
            if message.sender != swarm.liar.id or message.call != "rpc_vote":
                return [message.content]
            if not message.is_answer:
                request = averaging_pb2.JoinRequest.FromString(message.content)
                assert content_of(request.gather)
                request.gather = lie(request.schema_hash)
                return [request.SerializeToString()]
            answer = averaging_pb2.MessageFromLeader.FromString(message.content)
            for place, peer in enumerate(answer.ordered_peer_ids):
                if peer == swarm.liar.id.to_bytes():
                    answer.gathered[place] = lie(answer.group_id)
            return [answer.SerializeToString()]

        return tamper

    tree = unpacked(Vote(b"x" * 32, "late", {"Qm": "why"}, "Qm").to_bytes())
    others = unpacked(Vote(b"y" * 32).to_bytes())
    judge(swarm, ((what, {"tamper": resigned(lie)}) for what, lie in lies(tree, others)))


@pytest.mark.parametrize("is_answer", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("call", ["rpc_join_group", "rpc_vote", "rpc_aggregate_part"])
def test_no_field_of_a_message_does_harm(swarm, call, is_answer):
    kind = averaging_pb2.MessageFromLeader if is_answer else averaging_pb2.JoinRequest
    if call == "rpc_aggregate_part":
        kind = averaging_pb2.AveragingData
    own, others = [], []

    def note(message: Message) -> list[bytes]:
        if (message.call, message.is_answer) == (call, is_answer):
            (own if message.sender == swarm.liar.id else others).append(kind.FromString(message.content))
        return [message.content]

    for leads in (True, False):
        swarm.play(leads, note)
    whole = max(own, key=lambda message: message.ByteSize())
    edits: dict[str, Edit] = {
        "missing": lambda content: [],
        "empty": lambda content: [b""],
        "doubled": lambda content: [content, content],
        "cut off": lambda content: [content[: len(content) // 2]],
        "no message": lambda content: [b"\xff" * 40],
        "another's": lambda content: [others[0].SerializeToString()],
    }
    edits |= {what: edited(kind, change) for what, change in changes(whole, others[-1], own[0])}
    judge(swarm, ((what, {"tamper": altered(swarm, call, is_answer, it)}) for what, it in edits.items()))


def test_no_round_that_a_liar_gives_to_go_through_is_taken_for_another(swarm):
    anna, ben, _ = swarm.honest

    async def go_through(edit: Edit) -> str:
        network, before = Network(), swarm.after[False]
        await swarm.play_on(network, before)
        truth = anna.average
        network.tamper = altered(swarm, "rpc_replay", True, edit)
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

    def play(edit: Edit) -> str:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(go_through(edit))

    data = averaging_pb2.DownloadData
    said: list[Any] = []
    assert play(lambda content: said.append(data.FromString(content)) or [content]) == ""
    [header] = [message.metadata for message in said if message.metadata]
    parts = [message for message in said if not message.metadata]

    def headed(lie: Any) -> Edit:
        def put(message: Any) -> None:
            if message.metadata:
                message.metadata = MSGPackSerializer.dumps(lie)

        return edited(data, put)

    cases: dict[str, Edit] = {what: headed(lie) for what, lie in lies(unpacked(header))}
    cases |= {what: edited(data, change) for what, change in changes(parts[0], parts[-1])}
    cases |= {"missing": lambda _: [], "doubled": lambda content: [content] * 2, "cut": lambda it: [it[:9]]}
    wrong = {what: found for what, edit in cases.items() if (found := play(edit))}
    assert len(cases) > 100 and not wrong, wrong
