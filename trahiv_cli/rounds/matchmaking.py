"""Matchmaking: peers that are ready for a round form a group. They agree on its leader without messages.

1. Each peer knows from the progress reports which other peers are at its step, and orders these peers by a
   digest of the step and their ids. The first one leads, and the others ask it to let them in.
2. A leader that is not ready yet holds these requests, so the group is complete as soon as its last member
   arrives, with one message each way. hivemind's matchmaking polls the DHT instead, for the whole
   `matchmaking_time`.
3. Where views differ, a peer that follows a leader redirects other peers' requests to that leader.
4. Each member signs its claim: a leader chooses the members of its group, but not their claims.
5. No peer waits for one that does not answer. A peer that makes rounds fail is kept out of groups (`Blame`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.averaging.group_info import GroupInfo
from hivemind.dht import DHTID
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto.averaging_pb2 import (
    ACCEPTED,
    BAD_SCHEMA_HASH,
    BEGIN_ALLREDUCE,
    GROUP_DISBANDED,
    JoinRequest,
    MessageFromLeader,
)
from hivemind.utils import get_logger
from hivemind.utils.asyncio import cancel_and_wait
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.clock import swarm_time
from trahiv_cli.members.records import peer_from, sign, verified
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.rounds.claims import Claim
from trahiv_cli.rounds.vote import Vote, wait_at_most

logger = get_logger(__name__)

SUSPECT_S = 20.0  # how long rounds do not wait for a peer that did not answer, broke a round, or did not come


@dataclass(frozen=True, eq=False)
class Follower:
    """A peer that waits for this one to form a group."""

    statement: bytes  # its signed claim
    quorum: int  # the smallest group that it would commit with


@dataclass
class Search:
    """One search for a group."""

    schema: bytes  # equal for all members
    statement: bytes  # this peer's claim, signed anew for this search
    group: asyncio.Future[GroupInfo]
    followers: dict[PeerID, Follower] = field(default_factory=dict)
    refused: set[PeerID] = field(default_factory=set)  # peers that could not lead in this search
    asked: PeerID | None = None  # the leader that this peer waits for
    _asked_at: float = 0.0

    def ask(self, leader: PeerID | None) -> None:
        """Note the leader that this peer waits for from now on; None: it waits no more."""
        self.asked = leader
        self._asked_at = time.monotonic()

    @property
    def waited_s(self) -> float:
        """The seconds for which this peer has waited for the leader."""
        return time.monotonic() - self._asked_at if self.asked else 0.0


class Blame:
    """Suspects and excludes peers for a while; `order`, the same for all peers, breaks ties."""

    def __init__(self, order: Callable[[PeerID], bytes]) -> None:
        self._order = order
        self._suspected_until: dict[PeerID, float] = {}
        self._times_suspected: Counter[PeerID] = Counter()  # since the peer last came to a group
        self._named_at: dict[PeerID, float] = {}
        self.excluded_until: dict[PeerID, float] = {}  # of every peer that ever was; by the monotonic clock
        # Groups in a row that an expected peer may miss before it is suspect: more once it has come to one. A
        # peer whose batches take too long divides them after a few.
        self._may_miss: defaultdict[PeerID, int] = defaultdict(lambda: 2)
        self._points: defaultdict[PeerID, float] = defaultdict(float)
        self._times_excluded: defaultdict[PeerID, float] = defaultdict(float)

    def suspect(self, peer: PeerID, why: str) -> None:
        """Do not wait for this peer for a while, and let it lead only if no other peer is left.

        Log why, but for each peer at most once in ten minutes: a slow peer is suspected again and again.
        """
        now = time.monotonic()
        if now >= self._named_at.get(peer, -math.inf) + 600.0:
            logger.warning(f"Rounds do not wait for peer {peer}: {why}.")
            self._named_at[peer] = now
        self._suspected_until[peer] = now + SUSPECT_S
        self._times_suspected[peer] += 1

    def note_call(self, peer: PeerID) -> None:
        """Stop suspecting a peer: it can be reached again.

        That counts once until it comes to a group: a peer that only calls would delay every round.
        """
        if self._times_suspected[peer] <= 1:
            self._suspected_until.pop(peer, None)

    def note_group(self, members: Collection[PeerID], expected: Iterable[PeerID]) -> None:
        """Trust the members of a group; suspect expected peers that keep a leader waiting and do not come."""
        for peer in members:
            self._suspected_until.pop(peer, None)
            self._times_suspected[peer] = 0
            self._may_miss[peer] = 6
        for peer in expected:
            if peer not in members and not self.is_suspect(peer):
                self._may_miss[peer] -= 1
                if self._may_miss[peer] <= 0:
                    self.suspect(peer, "it did not come to a group")

    def is_suspect(self, peer: PeerID) -> bool:
        """Whether rounds should not wait for a peer."""
        return self._suspected_until.get(peer, 0.0) > time.monotonic() or self.is_excluded(peer)

    def exclude(self, peer: PeerID, why: str) -> None:
        """Keep a peer out of groups for a while, twice as long each time, and do not follow it; log `why`."""
        for_s = min(1280.0, SUSPECT_S * 2 ** self._times_excluded[peer])
        self.excluded_until[peer] = time.monotonic() + for_s
        self._times_excluded[peer] += 1
        logger.warning(f"Peer {peer} is let into no group for {for_s:.0f} s: {why}.")

    def is_excluded(self, peer: PeerID) -> bool:
        """Whether a peer is kept out of groups."""
        return self.excluded_until.get(peer, 0.0) > time.monotonic()

    def note_votes(self, members: Sequence[PeerID], votes: Mapping[PeerID, Vote], is_committed: bool) -> None:
        """Update the blame points from one round's votes; exclude a member if it has too many.

        In a failed round the most blamed member gets a point, and every other member that blames or is blamed
        gets 3/4: the fault may be its own, or a link's. A member that more than half of the group call late
        has 2 points at once. At 2 points the member with the most points (of equals, the later in order) is
        excluded, unless no more than half of the group would be left. A committed round takes 1/4 from each
        member. All members receive the same votes, so they reach the same verdict.
        """
        if is_committed:
            for peer in members:
                self._points[peer] = max(0.0, self._points[peer] - 0.25)
                self._times_excluded[peer] = max(0.0, self._times_excluded[peer] - 0.25)
            return
        names = {peer.to_base58(): peer for peer in votes}
        blames = {peer: names[vote.blames] for peer, vote in votes.items() if vote.blames in names}
        blamed = set(blames.values())
        # If a member broke off because of another, the members that waited for it blame it: that is no proof.
        direct = {peer: whom for peer, whom in blames.items() if votes[peer].is_sure or whom not in blames}
        blames = direct or blames
        accusers = Counter(blames.values())
        most = max(accusers.values(), default=0)
        for peer in accusers.keys() | blames.keys():
            self._points[peer] += 1.0 if accusers[peer] == most else 0.75
        late = Counter(whom for peer, whom in blames.items() if votes[peer].is_late)
        for peer, count in late.items():
            if 2 * count > len(members):
                self._points[peer] = max(2.0, self._points[peer])
        worst = max(members, key=lambda peer: (self._points[peer], self._order(peer)))
        left = [peer for peer in members if peer != worst and not self.is_excluded(peer)]
        if self._points[worst] < 2.0 or len(left) < max(2, len(members) // 2 + 1):
            return
        self.exclude(worst, "rounds with it fail")
        # It may be innocent: a liar blames others for its own faults. Other blamed members may be next.
        for peer in self._points.keys() - (blamed - {worst}):
            del self._points[peer]


@dataclass(eq=False)
class GroupFinder:
    """Finds a group for each round, in the DHT's process.

    `RoundService` creates one, with its `stub` and this peer's id and key. A leader waits `patience_s`
    seconds for missing members, and must answer within `request_timeout` seconds. Others can't call a client,
    so it never leads.
    """

    stub: Callable[[PeerID], Any]
    peer_id: PeerID
    key: RSAPrivateKey
    prefix: str
    tensors_schema: bytes
    is_client: bool
    patience_s: float
    request_timeout: float

    def __post_init__(self) -> None:
        self.schema = self.tensors_schema
        self._expected: tuple[PeerID, ...] = ()
        self._clients: frozenset[PeerID] = frozenset()
        self._quorum = 2
        self._search: Search | None = None
        self.blame = Blame(self._order)
        self._turn = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    def expect(
        self, peers: Sequence[PeerID], clients: Sequence[PeerID], quorum: int, schema_suffix: bytes
    ) -> None:
        """Set the other peers at this peer's step, and which of them are clients and so can't lead.

        A group has at least `quorum` members, this one included (1: this peer alone). All of them share
        `schema_suffix`, in addition to their tensors' shapes.
        """
        self._expected = tuple(peers)
        self._clients = frozenset(clients)
        self._quorum = quorum
        self.schema = self.tensors_schema + schema_suffix
        self._wake()

    def claim_of(self, peer: PeerID, statement: bytes, schema: bytes | None = None) -> Claim:
        """Return a peer's claim for a schema (None: this peer's); `ValueError` if it did not sign it."""
        return Claim.parse(verified(statement, peer, self._about(schema or self.schema)))

    def _about(self, schema: bytes) -> bytes:
        return b"trahiv: a claim in %s for %s" % (self.prefix.encode(), schema)

    # -- looking for a group -------------------------------------------------------------------------

    async def look_for_group(self, claim: bytes, deadline: float) -> GroupInfo | None:
        """Find a group; None if there was none by the deadline, or this peer's schema has changed.

        `deadline` is in the swarm's time. `claim` is this peer's `Claim` in bytes.
        """
        schema = self.schema
        statement = sign(self.key, self._about(schema), claim)
        if self._quorum == 1:
            return GroupInfo(DHTID.generate().to_bytes(), (self.peer_id,), (statement,))
        async with self._one_at_a_time:
            left_s = deadline - swarm_time()
            self._search = search = Search(schema, statement, asyncio.get_running_loop().create_future())
            self._wake()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    return await self._search_until_found(search)
            except TimeoutError:
                if search.asked and search.waited_s >= self.patience_s:
                    self._suspect_leader(search.asked)  # or the next search would wait for it again
                return None
            finally:
                self._search = None
                search.group.cancel()  # waiting followers get GROUP_DISBANDED
                self._wake()

    async def _search_until_found(self, search: Search) -> GroupInfo | None:
        found: GroupInfo | PeerID | None = None
        while search.schema == self.schema:
            leader = self._choose_leader(search, found)
            found = None
            if leader is None:
                search.refused.clear()
            elif leader == self.peer_id:
                found = await self._lead(search)
            else:
                found = await self._follow(search, leader)
            if isinstance(found, GroupInfo):
                self.blame.note_group(found.peer_ids, self._expected)
                return found
            if not search.followers and found is None:
                await asyncio.sleep(0.1)
        return None  # this peer's schema has changed

    def _choose_leader(self, search: Search, suggested: PeerID | None) -> PeerID | None:
        """Return the first peer in order that may lead; None if all have failed in this search.

        Suspects come last. If they were left out, two peers that suspect each other would each lead alone.
        The last answer may have `suggested` a leader, perhaps this peer itself.
        """
        own = self.peer_id
        if search.followers:
            return own
        if suggested is not None:
            return suggested
        barred = search.refused | self._clients | {own if self.is_client else None}
        there = {own, *(peer for peer in self._expected if not self.blame.is_excluded(peer))} - barred
        return min(there, key=lambda peer: (self.blame.is_suspect(peer), self._order(peer)), default=None)

    def _order(self, peer: PeerID) -> bytes:
        return hashlib.sha256(self.schema + peer.to_bytes()).digest()

    def _wake(self) -> None:
        """Wake all waiting tasks, so that they check again."""
        self._turn.set()
        self._turn = asyncio.Event()

    # -- leading -------------------------------------------------------------------------------------

    async def _lead(self, search: Search) -> GroupInfo | None:
        """Wait for the others and form the group; None if another peer should lead."""
        give_up = time.monotonic() + self.patience_s
        # A leader without a follower soon asks the next peer in order: if it came late, it may not know that
        # the others have another leader.
        lonely_until = time.monotonic() + min(0.5, self.patience_s)
        while search.schema == self.schema:
            unseen = set(self._expected) - search.followers.keys()
            is_missing = not all(map(self.blame.is_suspect, unseen))
            is_over = time.monotonic() >= give_up
            # Drop followers whose quorum is larger than the group would be, the largest quorum first.
            willing = sorted(search.followers.items(), key=lambda item: item[1].quorum)
            while willing and willing[-1][1].quorum > 1 + len(willing):
                willing.pop()
            members = dict(willing)
            # Do not wait for a follower whose quorum exceeds the known peers: its view may be newer.
            there = 1 + max(len(self._expected), len(search.followers))
            num_possible = sum(follower.quorum <= there for follower in search.followers.values())
            is_whole = len(members) == num_possible and not is_missing
            if 1 + len(members) >= max(2, self._quorum) and (is_whole or is_over):
                peers = (self.peer_id, *members)
                gathered = (search.statement, *(member.statement for member in members.values()))
                group = GroupInfo(DHTID.generate().to_bytes(), peers, gathered)
                search.group.set_result(group)
                self._wake()
                return group
            is_lonely = not search.followers and time.monotonic() >= lonely_until
            if is_over or is_lonely:  # too few came: the others may have another leader, and so should these
                search.refused.add(self.peer_id)
                search.followers.clear()
                self._wake()
                return None
            until = give_up if search.followers else min(give_up, lonely_until)
            await wait_at_most(self._turn, until - time.monotonic())
        return None

    async def admit(self, request: JoinRequest, peer: PeerID) -> AsyncIterator[MessageFromLeader]:
        """Let a peer into the group that this one leads, or refuse it, perhaps with another peer to ask.

        Yields ACCEPTED at once, because the peer may wait here. Then yields BEGIN_ALLREDUCE with the group,
        or GROUP_DISBANDED, perhaps with the peer to ask, or BAD_SCHEMA_HASH.
        """
        self.blame.note_call(peer)
        yield MessageFromLeader(code=ACCEPTED)
        closes = time.monotonic() + 600.0  # callers give up sooner
        while (search := self._search) is None or search.group.done() or search.schema != self.schema:
            if time.monotonic() >= closes:
                yield MessageFromLeader(code=GROUP_DISBANDED)
                return
            await wait_at_most(self._turn, closes - time.monotonic())
        follower = self._let_in(search, peer, request)
        if not isinstance(follower, Follower):
            yield follower
            return
        search.followers[peer] = follower
        self._wake()
        try:
            while not search.group.done() and search.followers.get(peer) is follower:
                await wait_at_most(self._turn, 600.0)
            is_formed = search.group.done() and not search.group.cancelled()
            if is_formed and peer in (group := search.group.result()).peer_ids:
                yield MessageFromLeader(
                    code=BEGIN_ALLREDUCE,
                    group_id=group.group_id,
                    ordered_peer_ids=[member.to_bytes() for member in group.peer_ids],
                    gathered=group.gathered,
                )
            else:
                yield MessageFromLeader(code=GROUP_DISBANDED)
        finally:
            if not search.group.done() and search.followers.get(peer) is follower:
                del search.followers[peer]
                self._wake()

    def _let_in(self, search: Search, peer: PeerID, request: JoinRequest) -> Follower | MessageFromLeader:
        """Return the peer as a follower, or a message that refuses it and may suggest another leader."""
        if self.blame.is_excluded(peer):
            return MessageFromLeader(code=GROUP_DISBANDED)
        if request.schema_hash != search.schema:
            return MessageFromLeader(code=BAD_SCHEMA_HASH)
        try:
            claim = self.claim_of(peer, request.gather, search.schema)
        except ValueError as error:
            self.blame.exclude(peer, f"it brings an unusable claim ({error})")
            return MessageFromLeader(code=GROUP_DISBANDED)
        elsewhere = search.asked
        if elsewhere == peer:  # both ask each other: the first in order leads
            elsewhere = peer if self._order(peer) < self._order(self.peer_id) else None
        if elsewhere is None:
            return Follower(request.gather, claim.quorum)
        return MessageFromLeader(code=GROUP_DISBANDED, suggested_leader=elsewhere.to_bytes())

    # -- following -----------------------------------------------------------------------------------

    async def _follow(self, search: Search, leader: PeerID) -> GroupInfo | PeerID | None:
        """Ask `leader` and wait for its group, or for the leader that it suggests.

        None if it does not lead this peer, or if another peer follows this one.
        """
        search.ask(leader)
        is_known = leader in self._expected
        answer = asyncio.ensure_future(self._ask(search, leader))
        answer.add_done_callback(lambda _: self._wake())
        try:
            while not answer.done() and not search.followers and search.schema == self.schema:
                if is_known and leader not in self._expected:
                    break  # it has left
                await wait_at_most(self._turn, 600.0)
        finally:
            await cancel_and_wait(answer)
        search.ask(None)
        return None if answer.cancelled() else answer.result()

    async def _ask(self, search: Search, leader: PeerID) -> GroupInfo | PeerID | None:
        request = JoinRequest(
            schema_hash=search.schema,
            client_mode=self.is_client,
            gather=search.statement,
            group_key=f"{self.prefix}.0b",  # hivemind's form of the key; no peer reads it
        )
        try:
            async with asyncio.timeout(self.request_timeout):
                answers = await self.stub(leader).rpc_join_group(request)
                first = await anext(answers)
            if first.code != ACCEPTED:
                raise P2PHandlerError(f"{leader} answered with code {first.code}")
            async with asyncio.timeout(2 * self.patience_s + self.request_timeout):
                answer = await anext(answers)
            if answer.code == BEGIN_ALLREDUCE:
                return self._accepted(search, leader, answer)
            if answer.suggested_leader:
                suggested = peer_from(answer.suggested_leader)
                # Peers that come in turn would else send each other back to a leader that forms no group.
                return None if suggested in search.refused else suggested
        except (*UNREACHABLE, StopAsyncIteration) as error:
            logger.debug(f"{leader} does not lead: {error!r}")
            self._suspect_leader(leader)
        except ValueError as error:
            self.blame.exclude(leader, f"it led a group that can't be ({error})")
        search.refused.add(leader)
        return None

    def _suspect_leader(self, leader: PeerID) -> None:
        self.blame.suspect(leader, "it did not lead a group")

    def _accepted(self, search: Search, leader: PeerID, answer: MessageFromLeader) -> GroupInfo:
        """Read the group that a leader formed, or raise `ValueError`.

        It raises for a malformed id, a peer that is listed twice, a missing leader, a missing or altered
        claim of this peer, and a claim that its peer did not sign.
        """
        members = tuple(map(peer_from, answer.ordered_peer_ids))
        said = dict(zip(members, answer.gathered, strict=True))
        if len(said) < len(members):
            raise ValueError("a peer is in it twice")
        if leader not in said:
            raise ValueError("its leader is not in it")
        if said.get(self.peer_id) != search.statement:
            raise ValueError("this peer is in it with another claim, or is not")
        for member, statement in said.items():
            self.claim_of(member, statement, search.schema)
        return GroupInfo(answer.group_id, members, tuple(said.values()))
