"""One of four members lies in a round: every kind of lie, in one field of one kind of message at a time.

Whatever the lie, the other three commit their step with identical values and history within one averaging
timeout. Where the lie made an attempt fail, or its contribution was left out, they name the liar.

Each member is a service without its process. Its data are the numbers that it averages; training is not
simulated.
"""

import asyncio
import gc
import hashlib
import threading
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.averager import compute_schema_hash
from hivemind.compression import NoCompression
from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from tests.kit.identities import id_of, key_of
from tests.kit.lies import lies, message_edits, tree_of
from tests.simulation.network import Network, VirtualLoop, altered, edited, run_virtually
from trahiv_cli.clock import swarm_time
from trahiv_cli.members.records import content_of, sign
from trahiv_cli.net import streams
from trahiv_cli.progress.history import History
from trahiv_cli.progress.pace import RoundRules
from trahiv_cli.rounds import matchmaking as group_finder
from trahiv_cli.rounds.averages import Averages
from trahiv_cli.rounds.claims import Claim, Exchange
from trahiv_cli.rounds.round_service import RoundOptions, RoundService
from trahiv_cli.rounds.vote import Call, Vote, digest_of_statement
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.wire import unpacked

AVERAGING_TIMEOUT_S = 60.0
CHUNK_S = 10.0

VALUES = 32  # that are averaged
PART_BYTES = 16
OPTIONS = RoundOptions(
    compression=NoCompression(),
    min_matchmaking_time=5.0,
    request_timeout=2.5,
    sender_timeout=CHUNK_S,
    reducer_timeout=2 * CHUNK_S,
    allreduce_timeout=AVERAGING_TIMEOUT_S,
    part_size_bytes=PART_BYTES,
)
"""The defaults of a swarm, but for the parts."""

SAMPLES = 8  # a member's contribution to a round
TRIES = 6


class Member:
    """A peer of a swarm, from one committed round to the next."""

    def __init__(self, name, number):
        self.name = name
        self.number = number
        self.id = id_of(name)
        self.averages = Averages([torch.Size([VALUES])], threading.Lock())
        [self.tensor] = self.averages.tensors
        self.contribution = torch.linspace(-1.0, 1.0, VALUES) * (1 + number)

    async def enter(self, network, history):
        """Start afresh at a history, with no peer blamed."""
        self.history = history
        self.outcome = None  # of its last attempt; None if it was not committed
        self.trouble = []  # why attempts failed
        self.is_changed = False  # whether a failed attempt changed its tensors
        activity = JoinerActivity()
        activity.note()
        self.service = RoundService("run", False, self.averages, (), RoundRules(), OPTIONS, activity)
        p2p = network.p2p_of(self.id)
        dht = SimpleNamespace(signing_key=key_of(self.name), tensors_lock=self.averages.lock)
        await self.service.start(dht, p2p, None)
        await self.service.add_p2p_handlers(p2p, namespace="run")

    @property
    def exchange(self):
        return Exchange(range(1), after=self.history.digest, most_samples=8 * 4 * SAMPLES)

    def expect(self, others):
        """Expect the others, which hold the same state, and require a majority of all."""
        self.quorum = (len(others) + 1) // 2 + 1
        suffix = self.history.step.to_bytes(8, "big") + self.history.digest
        self.service.finder.expect([other.id for other in others], [], self.quorum, suffix)

    def claim(self, content):
        """Have it claim `content` in place of what it would."""
        finder = self.service.finder
        look_for_group = finder.look_for_group
        finder.look_for_group = lambda _, deadline: look_for_group(content, deadline)

    async def attempt(self):
        """Attempt one round; `outcome` is None unless it is committed."""
        self.tensor.copy_(self.contribution)
        own = Claim(SAMPLES, float(SAMPLES), 0.0, bytes(8), self.quorum)
        deadline = swarm_time() + AVERAGING_TIMEOUT_S
        has_group = asyncio.get_running_loop().create_future()
        try:
            self.commit(await self.service.average(own, self.exchange, deadline, has_group))
        except Exception as error:  # noqa: BLE001 - as in the optimizer, the attempt has failed
            self.fail(error)
            self.is_changed |= not self.tensor.equal(self.contribution)

    async def replay(self, donor):
        """Replay the round that others committed meanwhile; `outcome` is None if the donor gave none."""
        try:
            self.commit(await self.service._replayed(donor.id, self.exchange, CHUNK_S))
        except (*streams.UNREACHABLE, StopAsyncIteration, ValueError) as error:
            self.fail(error)

    def fail(self, error):
        self.outcome = None
        self.trouble.append(str(error) or repr(error))

    def commit(self, outcome):
        self.outcome = outcome
        if outcome is not None:
            self.history = self.history.extend(samples=sum(outcome.samples.values()), proof=outcome.proof)
            self.average = self.tensor.clone()

    def names(self, other):
        """Return whether this member has named or set aside `other`."""
        outcome = self.outcome
        told = [*self.trouble, outcome.reason if outcome else "", *(outcome.left_out if outcome else ())]
        return self.has_set_aside(other) or any(other.id.to_base58() in words for words in told)

    def has_set_aside(self, other):
        return other.id in self.service.finder.blame.excluded_until


class Swarm:
    """Three honest members and a liar, created once and reset for each lie."""

    def __init__(self):
        self.members = [Member(name, number) for number, name in enumerate(("anna", "ben", "cem", "liar"))]
        *self.honest, self.liar = self.members
        histories = [History(step, SAMPLES * step) for step in range(1, 1000)]
        place_of = {place: one for one in histories if (place := self._place_of_liar(one)) in (0, 3)}
        self.after = {True: place_of[0], False: place_of[3]}
        """Histories after which the liar is first (True) or last (False) in leader order."""

    def _place_of_liar(self, history):
        schema = (
            compute_schema_hash(self.liar.averages.tensors) + history.step.to_bytes(8, "big") + history.digest
        )
        order = [hashlib.sha256(schema + member.id.to_bytes()).digest() for member in self.members]
        return sorted(order).index(order[-1])

    def play(self, leads, tamper=None, claim=None):
        """Take one step, and return the broken promises.

        The liar leads the first group if it `leads` and the others let it; `claim` replaces its own.
        """
        network = Network()
        network.tamper = tamper or network.tamper
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(self.play_on(network, self.after[leads], claim))
            self.took_s = runner.get_loop().time()
        return self.complaints()

    async def play_on(self, network, history, claim=None):
        for member in self.members:
            await member.enter(network, history)
        if claim is not None:
            self.liar.claim(claim)
        lying = asyncio.create_task(self._try_on(self.liar))
        await asyncio.gather(*map(self._try_on, self.honest))
        lying.cancel()
        await asyncio.wait({lying})

    async def _try_on(self, member):
        """Retry until a step is committed, as the optimizer does."""
        before = member.history
        for _ in range(TRIES):
            member.expect([other for other in self.members if other is not member])
            ahead = [other for other in self.honest if other.history.step > before.step]
            await member.attempt()
            if member.outcome is None and ahead:
                await member.replay(ahead[0])
            if member.outcome is not None:
                return
            await asyncio.sleep(0.1)

    def complaints(self):
        """Return the broken promises."""
        troubles = [member.trouble for member in self.honest]
        if behind := [member.name for member in self.honest if member.outcome is None]:
            return [f"no step for {behind}: {troubles}"]
        average = self.honest[0].average
        liar = self.liar.id.to_base58()
        outcomes = [member.outcome for member in self.honest]
        was_left_out = any(liar in set(one.group) - one.samples.keys() for one in outcomes)
        is_named = any(member.names(self.liar) for member in self.honest)
        found = {
            "two histories": len({member.history for member in self.honest}) > 1,
            "two averages": len({member.average.numpy().tobytes() for member in self.honest}) > 1,
            "a failed attempt changed its tensors": any(member.is_changed for member in self.honest),
            # The liar's own values reach 4; a value that is not finite is no smaller.
            "an average larger than all that it is of": not (average.abs() <= 4.0).all(),
            f"it took {self.took_s:.0f} s": self.took_s > AVERAGING_TIMEOUT_S,
            f"nobody says who it was: {troubles}": (was_left_out or any(troubles)) and not is_named,
        }
        for member in self.honest:
            wrong = [other.name for other in self.honest if member.has_set_aside(other)]
            found[f"{member.name} takes {wrong} for liars"] = wrong and not member.has_set_aside(self.liar)
        return [what for what, is_so in found.items() if is_so]


@pytest.fixture(scope="module")
def swarm():
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        patch.setattr(group_finder, "time", clock)
        patch.setattr(P2P, "receive_protobuf", staticmethod(streams.receive_protobuf))
        patch.setattr(torch.Tensor, "share_memory_", lambda tensor: tensor)  # all members share this process
        yield Swarm()
    gc.collect()  # tasks left waiting, which would otherwise complain during another test


def judge(swarm, cases):
    """Play all cases, and fail with a list of those that broke a promise."""
    wrong = {}
    played = 0
    for what, case in cases:
        for leads in (True, False):
            played += 1
            if found := swarm.play(leads, **case):
                wrong[f"{what}, {'leading' if leads else 'following'}"] = found
    told = "\n".join(f"{what}: {it}" for what, it in wrong.items())
    assert played > 20
    assert not wrong, f"{len(wrong)} of {played}:\n{told}"


WHOLE = {
    "missing": lambda content: [],
    "nothing more": lambda content: None,
    "empty": lambda content: [b""],
    "doubled": lambda content: [content, content],
    "cut off": lambda content: [content[: len(content) // 2]],
    "no message": lambda content: [b"\xff" * 40],
}


@pytest.mark.parametrize("leads", [True, False])
def test_honest_members_step_at_once(swarm, leads):
    assert swarm.play(leads) == []
    assert swarm.took_s < 1.0
    assert all(len(member.outcome.samples) == 4 and not member.trouble for member in swarm.members)


def test_false_claims_are_harmless(swarm):
    tree = unpacked(Claim(SAMPLES, float(SAMPLES), 1.0, bytes(8), 3).to_bytes())
    other = unpacked(Claim(3, 2.0, 5.0, b"other", 2).to_bytes())
    judge(swarm, ((what, {"claim": MSGPackSerializer.dumps(lie)}) for what, lie in lies(tree, other)))


def test_false_votes_are_harmless(swarm):
    def resigned(said):
        """Replace the content of the liar's votes, with a valid signature."""

        @cache
        def lie(group_id):
            ballot = swarm.liar.service.ballots[group_id]
            return sign(key_of("liar"), ballot.about, MSGPackSerializer.dumps(said), has_key=False)

        def tamper(message):
            if message.sender != swarm.liar.id or message.call != "rpc_vote":
                return [message.content]
            if not message.is_answer:
                request = averaging_pb2.JoinRequest.FromString(message.content)
                call = Call.parse(request.gather)
                assert content_of(call.vote)
                request.gather = replace(call, vote=lie(request.schema_hash)).to_bytes()
                return [request.SerializeToString()]
            # The liar claims to know its other vote, and gives it on request.
            answer = averaging_pb2.MessageFromLeader.FromString(message.content)
            members = swarm.liar.service.ballots[answer.group_id].members
            for place, (peer, told) in enumerate(zip(members, answer.gathered, strict=False)):
                if peer == swarm.liar.id and len(told) == len(digest_of_statement(b"")):
                    answer.gathered[place] = digest_of_statement(lie(answer.group_id))
                elif not told:
                    answer.gathered[place] = lie(answer.group_id)
            return [answer.SerializeToString()]

        return tamper

    tree = unpacked(Vote(b"x" * 32, "late", {"Qm": "why"}, "Qm").to_bytes())
    others = unpacked(Vote(b"y" * 32).to_bytes())
    judge(swarm, ((what, {"tamper": resigned(lie)}) for what, lie in lies(tree, others)))


@pytest.mark.parametrize("is_answer", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("call", ["rpc_join_group", "rpc_vote", "rpc_aggregate_part"])
def test_altered_messages_are_harmless(swarm, call, is_answer):
    kind = averaging_pb2.MessageFromLeader if is_answer else averaging_pb2.JoinRequest
    if call == "rpc_aggregate_part":
        kind = averaging_pb2.AveragingData
    own = []
    others = []

    def note(message):
        if (message.call, message.is_answer) == (call, is_answer):
            (own if message.sender == swarm.liar.id else others).append(kind.FromString(message.content))
        return [message.content]

    for leads in (True, False):
        swarm.play(leads, note)
    whole = max(own, key=lambda message: message.ByteSize())
    edits = {what: edited(kind, change) for what, change in message_edits(whole, others[-1], own[0])}
    edits |= WHOLE | {"another's": lambda content: [others[0].SerializeToString()]}
    tamper = partial(altered, swarm.liar.id, call, is_answer)
    judge(swarm, ((what, {"tamper": tamper(edit)}) for what, edit in edits.items()))


def test_partially_sent_average_undoes_round(swarm):
    """The liar gives its share of the average to one member only."""
    anna = swarm.honest[0]
    lie = altered(swarm.liar.id, "rpc_aggregate_part", True, lambda content: [b""])
    found = swarm.play(True, lambda it: [it.content] if it.receiver == anna.id else lie(it))
    assert found == []
    assert "2 of 4 peers hold this average" in anna.trouble[0]


def test_false_replay_is_refused(swarm):
    anna, ben, _ = swarm.honest

    async def go_through(edit):
        network = Network()
        before = swarm.after[False]
        await swarm.play_on(network, before)
        truth = anna.average
        network.tamper = altered(swarm.liar.id, "rpc_replay", True, edit)
        anna.history = before
        anna.expect([swarm.liar, *swarm.honest[1:]])
        anna.tensor.zero_()
        await anna.replay(swarm.liar)
        if anna.outcome is None:
            if anna.tensor.any():
                return "what failed has changed the average"
            await anna.replay(ben)
        return "" if anna.average.equal(truth) and anna.history == ben.history else "another step, or none"

    def play(edit):
        return run_virtually(go_through(edit))

    data = averaging_pb2.DownloadData
    said = []
    assert play(lambda content: said.append(data.FromString(content)) or [content]) == ""
    [header] = [message.metadata for message in said if message.metadata]
    parts = [message for message in said if not message.metadata]

    def headed(lie):
        packed = MSGPackSerializer.dumps(lie)
        return edited(data, lambda it: data(**tree_of(it) | {"metadata": packed}) if it.metadata else it)

    cases = {what: headed(lie) for what, lie in lies(unpacked(header))}
    cases |= {what: edited(data, change) for what, change in message_edits(parts[0], parts[-1])}
    cases |= WHOLE
    wrong = {what: found for what, edit in cases.items() if (found := play(edit))}
    assert len(cases) > 100
    assert not wrong, wrong
