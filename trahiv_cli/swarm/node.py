"""A peer's node in the network: it starts the DHT, knows its addresses, and stores and fetches small records.

1. The node listens on the ports of its last run if they are free, so that join lines stay valid.
2. It enters the DHT through the addresses of the join line and of known peers, as far as these answer.
3. While it runs, one thread does chores: it calls missing peers (`Reconnector`), and in a closed swarm
   publishes this peer's certificate and passes on the owner's policy (`member_list`). Another thread finds
   out how other peers reach this one (`reachability`).

Every key that we put into the DHT comes from `keys` or from `member_list`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
from hivemind.dht import DHTNode
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from trahiv_cli.errors import NotAdmitted, SetupError, TrahivError, Unreachable
from trahiv_cli.members.door import Door, not_admitted
from trahiv_cli.members.identity import ensure_identity, id_bytes, read_signing_key
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.members.records import own_subkey
from trahiv_cli.net import addresses
from trahiv_cli.net.borrowed.multiaddr import Multiaddr
from trahiv_cli.reach.reachability import Reach, ReachFinder, ReachRules, visible_maddrs
from trahiv_cli.reach.upnp import Router
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm import corrections
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.corrections.nodes import node_id_of
from trahiv_cli.swarm.corrections.processes import effort_of
from trahiv_cli.swarm.dht import Dht
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.member_list import MemberList
from trahiv_cli.swarm.reconnector import Reconnector, known_peers

logger = logging.getLogger(__name__)

REACH_KNOWN_S = 10.0  # by then it should be known how others reach this peer
GRACE_S = 3.0  # for the DHT's process to end by itself


class Node(Dht, contextlib.AbstractContextManager["Node"]):
    """A running DHT peer. A training peer has one (`run.folder.start_node`) until it ends.

    Close it last: the services of an optimizer work in its process.

    Args:
        settings: keywords of `hivemind.DHT`.
        identity: key file, created if missing.
        initial_peers: multiaddrs with `/p2p/`; without them and without `met`, it starts a swarm of one.
        met: peers that this one knows from earlier runs; None: it knows none, and no file is written.
        must_reach: whether one of `initial_peers` or `met` must answer, if there are `initial_peers`.
        credentials: credentials in a closed swarm; None: the swarm is open.
        is_visitor: whether it only looks; a visitor is not in the member list.
        reach: the user's settings for the link to other peers.

    Raises:
        SetupError: a port is taken, an address to listen on is wrong, the identity can't be used, or p2pd
            does not start.
        NotAdmitted: no peer let this one in, and one refused it because it is not a member.
        Unreachable: no peer answered, and the message has the result for each of `initial_peers`; or one of
            these is not the multiaddr of a peer.
        SwarmError: the DHT's process ended while it started, or did not start within a minute.
        In each case no process is left. For the errors of later calls see `Dht`.
    """

    def __init__(
        self,
        settings: DhtSection,
        identity: Path,
        initial_peers: tuple[str, ...] = (),
        *,
        met: KnownPeers | None = None,
        must_reach: bool = True,
        credentials: Credentials | None = None,
        is_visitor: bool = False,
        reach: ReachRules = ReachRules(),  # noqa: B008
    ) -> None:
        for address in initial_peers:
            addresses.require_peer_address(address)
        self._listening = addresses.read_listening(settings.host_maddrs, settings.announce_maddrs)
        addresses.require_free_ports(self._listening.hosts)
        peer_id = ensure_identity(identity)
        self._id = id_bytes(peer_id)
        signing_key = read_signing_key(identity)
        door = Door(credentials.membership, credentials.book, self._id) if credentials else Door()
        self._met = met or KnownPeers(None)
        self.met_lately = self._met.lately  # ids of the peers that were present in this peer's last run
        corrections.apply()
        start = partial(
            CorrectedDHT,
            identity_path=str(identity),
            host_maddrs=[self._as_before(maddr) for maddr in self._listening.hosts],
            announce_maddrs=self._listening.announced or None,
            start=True,
            door=door,
            signing_key=signing_key,
            place=own_subkey(signing_key, door.certificate),
            node_id=node_id_of(self._id),
            **settings.model_dump(
                exclude={"initial_peers", "identity_path", "announce_maddrs", "host_maddrs"}
            ),
        )
        self._entered_by = initial_peers[:1]
        super().__init__(peer_id, self._entered(start, initial_peers, must_reach=must_reach), credentials)
        with contextlib.ExitStack() as undo:
            undo.callback(self.dht.shutdown)
            self._finder = ReachFinder(self.run, reach, Router(), is_visitor=is_visitor)
            undo.callback(self._finder.close)
            self._note_ports(self._listening.hosts)
            reunion = Reconnector(
                self, self.own_addresses, self._met, also=initial_peers, is_visitor=is_visitor
            )
            chores = [reunion.turn]
            if credentials is not None and not is_visitor:
                chores.append(MemberList(self, credentials).turn)
            self._is_over = threading.Event()
            looks = [] if is_visitor and settings.client_mode else [self._finder.turn]
            self._threads = [
                threading.Thread(target=do_chores, args=(some, self._is_over), name=name, daemon=True)
                for name, some in (("chores", chores), ("looks", looks))  # looks take seconds
            ]
            for thread in self._threads:
                thread.start()
            undo.pop_all()

    def _entered(
        self, start: Callable[..., CorrectedDHT], initial_peers: Sequence[str], *, must_reach: bool
    ) -> CorrectedDHT:
        """Start a DHT through the initial peers and known peers that answer.

        If something listens at an initial peer's address but does not answer, try up to three times: p2pd
        waits 5 s, and a ping 3 s, for a peer whose machine or link may be slow at that moment.
        """
        # A few known peers; the others are called later.
        met = [maddr for maddrs in list(self._met.addresses.values())[:8] for maddr in maddrs]
        # p2pd spends minutes on the first address that does not answer, so it gets no such address. A single
        # address needs no knock, because it must answer anyway.
        is_certain = must_reach and not met and len(initial_peers) < 2
        needs_one = must_reach and bool(initial_peers)
        # p2pd waits 5 s for an address of this machine or its network, longer for others.
        may_retry_until = time.monotonic() + 12.0
        for is_last in (False, False, True):
            answering = [*initial_peers] if is_certain else addresses.answering_of([*initial_peers, *met])
            try:
                if needs_one and not answering:
                    raise RuntimeError("nothing listens at any address")
                return start(initial_peers=answering or None)
            except (P2PDaemonError, RuntimeError, ValueError) as error:
                is_taken = "already taken by another peer" in str(error)
                troubles = addresses.knock_at_all(initial_peers if needs_one and not is_taken else ())
                if None in troubles.values() and not is_last and time.monotonic() < may_retry_until:
                    logger.warning(f"No peer has answered in time ({error}); this peer tries again.")
                    continue
                if is_taken or needs_one or not answering:
                    raise _why_not_started(error, troubles, is_taken=is_taken) from error
            except NotAdmitted:
                if initial_peers:
                    raise
                logger.warning("Peers of before don't take this one for a member: it starts without them.")
            break
        return start()

    def _as_before(self, host_maddr: str) -> str:
        """Fill in the port of the last run, if the user left the choice open and the port is free."""
        if (port := self._met.ports.get(host_maddr)) is not None:
            fixed = re.sub(r"/(tcp|udp)/0(?=/|$)", rf"/\1/{port}", host_maddr)
            with contextlib.suppress(SetupError):
                addresses.require_free_ports([fixed])
                return fixed
        return host_maddr

    def _note_ports(self, host_maddrs: Sequence[str]) -> None:
        """Note the ports on which this node listens, for its next start."""

        def transport(maddr: str) -> tuple[str, ...]:  # without the peer id
            return tuple(one.name for one in Multiaddr(maddr).protocols() if one.name != "p2p")

        near = [own for own in self.own_addresses() if addresses.reach_of(own) != "internet"]
        here = {transport(maddr): named.port for maddr in near if (named := addresses.socket_of(maddr))}
        self._met.note_ports({maddr: here.get(transport(maddr)) for maddr in host_maddrs})

    def notes(self) -> list[str]:
        """Return sentences about addresses that the user gave and that are not used as written."""
        hosts, _, said = self._listening
        notes = [*said]
        with contextlib.suppress(psutil.Error):  # the sockets in use are unknown
            used = {
                (one.type, one.laddr.ip)
                for pid in self.pids()
                for one in psutil.Process(pid).net_connections("inet")
                if one.laddr
            }
            for text in hosts if hosts != DhtSection().host_maddrs else ():  # the default may lack IPv6
                named = addresses.socket_of(text)
                if named and named.host != "localhost" and (named.kind, named.host) not in used:
                    notes.append(f"p2pd does not listen on {text}: does this machine have such addresses?")
        return notes

    def require_membership(self) -> None:
        """Raise NotAdmitted if the policy of the swarm's owner excludes this peer."""
        if self.credentials is None:
            return
        if objection := self.credentials.book.policy.objection(self._id, self.credentials.membership.grant):
            raise not_admitted(objection)

    def own_addresses(self) -> list[str]:
        """Return the multiaddrs of this peer: the furthest reach first, TCP before QUIC."""
        maddrs = {str(maddr) for maddr in self.run(visible_maddrs)}
        if self._listening.is_everywhere:
            maddrs |= addresses.of_all_interfaces(maddrs)
        maddrs |= {f"{place}/p2p/{self.peer_id}" for place in self._finder.addresses()}
        nearness = get_args(addresses.Reach).index
        return sorted(
            maddrs, key=lambda maddr: (nearness(addresses.reach_of(maddr)), "/tcp/" not in maddr, maddr)
        )

    @property
    def reach(self) -> Reach:
        """The reachability of this peer, as last found out."""
        return self._finder.reach

    def known_reach(self, within_s: float) -> Reach:
        """Wait until `reach` is found out, for at most `within_s` seconds, and return it."""
        self._finder.is_known.wait(within_s)
        return self.reach

    def only_dials(self, within_s: float = REACH_KNOWN_S) -> bool:
        """Return whether this peer averages only with peers that it can dial; see `known_reach`."""
        return bool(self.dht.client_mode) or self.known_reach(within_s).only_dials

    def entrances(self) -> list[str]:
        """Return multiaddrs by which others can join: of up to two members if they can't dial this peer."""
        there = self.run(known_peers) if self.reach.kind not in ("direct", "alone") else []
        known = self._met.addresses
        others = [known[peer][0] for peer in there if peer in known]
        return others[:2] or [*self._entered_by, *self.own_addresses()]

    def pulse(self) -> Any:
        """Run `show_life` in the DHT's process; return its future."""
        return self.dht.run_coroutine(show_life, return_future=True)

    def close(self) -> None:
        """End the DHT process and its daemon. Safe to call twice."""
        try:
            self._is_over.set()
            if effort_of(self.pids()[:1])[1]:  # it is stopped, and would not receive a shutdown
                self.dht.kill()
            for thread in self._threads:
                thread.join(GRACE_S)
            self._finder.close()
            self.dht.shutdown()
            self.dht.join(GRACE_S)
        finally:
            if self.dht.is_alive():
                self.dht.kill()
                self.dht.join()

    def __exit__(self, *_: object) -> None:
        self.close()


def _why_not_started(
    error: Exception, troubles: Mapping[str, OSError | None], *, is_taken: bool
) -> SetupError | Unreachable:
    """Explain why the network daemon did not start; `troubles` has the result of each knock by address."""
    if is_taken:
        return SetupError(
            "A peer with this identity is already in the swarm; nothing was changed.",
            hint="stop it first, or give this one its own with --output-dir DIR or --identity FILE; "
            "in a copy of another peer's folder, move identity.key away: a new one is made then",
        )
    if troubles:
        return addresses.unreachable(troubles)
    return SetupError(
        f"The network daemon did not start: {error}", hint="try again with another --host-maddr"
    )


async def show_life(dht: CorrectedDHT, node: DHTNode) -> None:
    """Wait until p2pd and the event loops of services answer; in the DHT's process.

    RuntimeError if one of these loops has ended although its service was not shut down.
    """
    await node.protocol.p2p.list_peers()
    for loop in tuple(dht.loops):  # a service may be shut down meanwhile
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        while loop.is_running() and not answer.done():
            await asyncio.wait([answer], timeout=0.1)  # the loop may end without an answer
        if not answer.done() and loop in dht.loops:
            raise RuntimeError("the thread of a service has ended")


def do_chores(chores: Sequence[Callable[[], None]], is_over: threading.Event) -> None:
    """Do chores every two seconds; log an error of a chore once, and try again."""
    troubles = dict.fromkeys(chores, "")
    while True:
        for chore, trouble_before in troubles.items():
            troubles[chore] = ""
            try:
                chore()
            except (TrahivError, concurrent.futures.CancelledError, OSError) as error:
                said = getattr(error, "message", error)
                troubles[chore] = f"A chore of this peer's node was not done: {said}"
                if troubles[chore] != trouble_before and not is_over.is_set():
                    logger.warning(troubles[chore])
        if is_over.wait(2.0):
            return
