"""A peer's place in the network: start it, say where it can be reached, store and fetch small records.

Every key that we put into the DHT comes from a function of this module. What the records mean is not
known here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import hivemind
import psutil
from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import ValueWithExpiration
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.errors import NotAdmitted, RecipeError, SetupError, SwarmError, Unreachable
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm import corrections
from trahiv_cli.swarm.acquaintances import Acquaintances
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.door import Door
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.records import own_place, owner_of, read_signing_key
from trahiv_cli.swarm.reunion import Reunion
from trahiv_cli.swarm.roll import Credentials, MemberList
from trahiv_cli.swarm.turns import Turns

logger = logging.getLogger(__name__)

Reach = Literal["internet", "local network", "this machine"]
_NEAREST_LAST: dict[Reach, int] = {"internet": 0, "local network": 1, "this machine": 2}
PROBE_TIMEOUT_S = 3.0
MET_TRIED = 8
"""Peers of before that are tried when a node starts; all others are called on later."""
RECORD_TIMEOUT_S = 10.0
GRACE_S = 3.0
"""How long the DHT process may take to end by itself."""
MAX_RECORD_BYTES = 3200
"""hivemind's processes write into one pipe; a message above PIPE_BUF (4096) may interleave with another. A
place takes 660 of it."""


def runs_key() -> str:
    """Where the peers of a DHT list the runs they train: subkey peer id, value [run_id, step]."""
    return "trahiv_runs"


def recipe_key(run_id: str, number: int = 0) -> str:
    """Where the peers of a run publish its recipe: subkey peer id, value one part of the packed recipe."""
    return f"{run_id}_recipe_{number}" if number else f"{run_id}_recipe"


def addresses_key() -> str:
    """Where the nodes of a DHT publish how they can be reached: subkey peer id, value multiaddrs."""
    return "trahiv_addresses"


def likeness_key(run_id: str) -> str:
    """Where the peers of a run publish what they loaded: subkey peer id, value digests by name."""
    return f"{run_id}_likeness"


@dataclass(frozen=True)
class Address:
    """One way to reach a peer."""

    maddr: str
    """Multiaddr that ends in `/p2p/<peer id>`."""

    reach: Reach
    """Who can dial it: an address of the local network says nothing about the router in front of it."""


def _reach(maddr: Multiaddr) -> Reach:
    for protocol in ("ip4", "ip6"):
        if protocol in maddr:
            address = ipaddress.ip_address(maddr[protocol])
            if address.is_loopback:
                return "this machine"
            return "internet" if address.is_global else "local network"
    return "internet"  # a DNS name


class Node:
    """A running DHT peer. Close it last: the averagers talk through its processes.

    While it runs it keeps in touch with the peers that it has met (`Reunion`), and listens where it listened
    the last time, if that is free and the settings leave it open.

    Args:
        settings: keywords of `hivemind.DHT`.
        identity: key file, made if missing.
        initial_peers: multiaddrs with `/p2p/`; none starts a swarm of one.
        met: peers that this one has met before; default: nobody, and nothing is written down.
        must_reach: whether one of `initial_peers` or `met` must answer, if there are `initial_peers`. If not,
            they are called on for as long as this node runs.
        standing: in a closed swarm; None: the swarm is open.
        is_visitor: whether it only looks; it does not stand in the roll then.

    Raises:
        SetupError: a port is taken, an address to listen on is wrong, the identity can't be used.
        NotAdmitted: those of `initial_peers` that answered don't take this peer for a member.
        Unreachable: nobody answered; the message says what each of `initial_peers` did.
        SwarmError: the DHT's process ended while it started, or did not start within a minute.
        In each case no process is left.
    """

    def __init__(
        self,
        settings: DhtSection,
        identity: Path,
        initial_peers: tuple[str, ...] = (),
        *,
        met: Acquaintances | None = None,
        must_reach: bool = True,
        standing: Credentials | None = None,
        is_visitor: bool = False,
    ) -> None:
        for address in initial_peers:
            require_peer_address(address)
        require_free_ports(settings.host_maddrs)
        for address in settings.announce_maddrs:
            _parsed(address, "to announce")
        self.peer_id = ensure_identity(identity)
        self._signing_key = read_signing_key(identity)
        id_ = PeerID.from_base58(self.peer_id).to_bytes()
        self._certificate = standing.membership.certify(id_) if standing else b""
        self.standing = standing
        """Of this peer in a closed swarm; None: the swarm is open."""
        self.book = standing.book() if standing else None
        """The policy of the swarm's owner."""
        self._is_visitor = is_visitor
        self._met = met or Acquaintances(None)
        self.met_lately = self._met.lately
        """Ids of the peers that were there when this one was there before."""
        self._settings = settings
        corrections.apply()
        self._sockets = corrections.private_sockets()
        with contextlib.ExitStack() as undo:
            undo.callback(corrections.remove_sockets, self._sockets)
            self.dht = self._start(identity, initial_peers, must_reach=must_reach)
            undo.callback(self.dht.shutdown)
            self._note_ports()
            self._turns = self._start_chores(also=_by_peer(initial_peers))
            undo.pop_all()

    def _start_chores(self, also: Mapping[str, Sequence[str]]) -> Turns:
        chores = [Reunion(self, addresses_key(), self._met, also=also).turn]
        if self.standing is not None and self.book is not None and not self._is_visitor:
            chores.append(MemberList(self, self.standing, self.book).turn)
        turns = Turns(chores)
        turns.start()
        return turns

    def _start(self, identity: Path, initial_peers: tuple[str, ...], *, must_reach: bool) -> hivemind.DHT:
        met = [maddr for maddrs in list(self._met.addresses.values())[:MET_TRIED] for maddr in maddrs]
        # Of those that p2pd is told of, the first that does not answer costs minutes, and one must answer.
        is_certain = must_reach and not met and len(initial_peers) < 2
        answering = list(initial_peers) if is_certain else answering_of([*initial_peers, *met])
        needs_one = must_reach and bool(initial_peers)
        if needs_one and not answering:
            raise _unreachable(initial_peers)
        try:
            return self._start_dht(identity, answering)
        except (P2PDaemonError, RuntimeError, ValueError) as error:
            if needs_one or not answering or _is_taken(error):
                raise _why_not_started(error, initial_peers) from error
        except NotAdmitted:
            if initial_peers:
                raise
            logger.warning("Peers of before don't take this one for a member: it starts without them.")
        return self._start_dht(identity, [])

    def _start_dht(self, identity: Path, initial_peers: list[str]) -> hivemind.DHT:
        keywords = self._settings.model_dump(
            exclude={"initial_peers", "identity_path", "announce_maddrs", "use_ipfs", "host_maddrs"}
        )
        return corrections.CorrectedDHT(
            initial_peers=initial_peers or None,
            identity_path=str(identity),
            host_maddrs=[self._as_before(maddr) for maddr in self._settings.host_maddrs],
            announce_maddrs=self._settings.announce_maddrs or None,
            use_ipfs=self._settings.use_ipfs,
            start=True,
            door=self._door(),
            signing_key=self._signing_key,
            place=own_place(self._signing_key, self._certificate),
            cache_nearest=0 if self._is_visitor else 1,  # what it has found it stores nowhere
            **keywords,
        )

    def _door(self) -> Door:
        return Door(self.standing.membership, self.standing.book()) if self.standing else Door()

    def require_membership(self) -> None:
        """Refuse to go on where the swarm's owner has taken this peer out.

        Raises:
            NotAdmitted: he has.
        """
        if self.standing is None or self.book is None:
            return
        id_, grant = PeerID.from_base58(self.peer_id).to_bytes(), self.standing.membership.grant
        if objection := self.book.policy.objection(id_, grant, 0.0):
            raise corrections.not_admitted(objection)

    def _as_before(self, host_maddr: str) -> str:
        """Put in the port of the last time where the choice is open, if it is free."""
        port = self._met.port(host_maddr)
        if port is None or not _leaves_port_open(host_maddr):
            return host_maddr
        fixed = re.sub(r"/(tcp|udp)/0(?=/|$)", rf"/\1/{port}", host_maddr)
        with contextlib.suppress(SetupError):
            require_free_ports([fixed])
            return fixed
        return host_maddr

    def _note_ports(self) -> None:
        """Write down the ports that were chosen for this node."""
        here = [Multiaddr(one.maddr) for one in self.addresses() if one.reach != "internet"]
        ports: dict[str, int] = {}
        for host_maddr in filter(_leaves_port_open, self._settings.host_maddrs):
            kind = _transport(Multiaddr(host_maddr))
            for maddr in here:
                if _transport(maddr) == kind and (place := _host_and_port(maddr)) is not None:
                    ports[host_maddr] = place[1]
        self._met.note_ports(ports)

    def addresses(self) -> tuple[Address, ...]:
        """Where this peer can be reached, those that reach furthest first, TCP before QUIC.

        Raises:
            SwarmError: the DHT did not answer within 10 s, or p2pd has ended.
        """
        found = [Multiaddr(str(maddr)) for maddr in self.run(_visible_maddrs)]
        addresses = {Address(str(maddr), _reach(maddr)) for maddr in found}
        return tuple(
            sorted(addresses, key=lambda a: (_NEAREST_LAST[a.reach], "/tcp/" not in a.maddr, a.maddr))
        )

    def publish(self, key: str, value: Any, ttl_s: float) -> bool:
        """Store a record under `key` for `ttl_s` seconds, signed by this peer.

        Args:
            key: what the record is about.
            value: what MessagePack carries.
            ttl_s: at most an hour.

        Returns:
            Whether a peer of the DHT (this one counts) stored it.

        Raises:
            SwarmError: the DHT did not answer within 10 s, or p2pd has ended.
        """
        place = own_place(self._signing_key, self._certificate)
        future = self.dht.store(
            key, value, expiration_time=swarm_time() + ttl_s, subkey=place, return_future=True
        )
        return bool(self._wait(future))

    def fetch(self, key: str) -> dict[str, Any]:
        """Read the records under `key`; empty if there are none.

        Returns:
            Values by the ids of their owners.

        Raises:
            SwarmError: the DHT did not answer within 10 s, or p2pd has ended.
        """
        found = self._wait(self.dht.get(key, latest=True, return_future=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        records: dict[str, Any] = {}
        for place, entry in found.value.items():
            owner = owner_of(place)
            if isinstance(entry, ValueWithExpiration) and owner is not None and not self.is_out(owner):
                records[owner] = entry.value
        return records

    def is_out(self, peer_id: str) -> bool:
        """Whether the swarm's owner has taken a peer (its id, base58) out."""
        return self.book is not None and self.book.policy.is_out(PeerID.from_base58(peer_id).to_bytes())

    def own_addresses(self) -> list[str]:
        """Return the multiaddrs of `addresses`."""
        return [address.maddr for address in self.addresses()]

    def run(self, coroutine: Callable[[hivemind.DHT, DHTNode], Awaitable[Any]]) -> Any:
        """Run a coroutine in the DHT's process; return what it returned.

        Raises:
            SwarmError: the DHT did not answer within 10 s, or p2pd has ended.
        """
        return self._wait(self.dht.run_coroutine(coroutine, return_future=True))

    # -- what `Vitals` asks ---------------------------------------------------------------------------

    name = "the DHT's process, or its daemon p2pd,"

    def is_alive(self) -> bool:
        """Whether the DHT's process runs."""
        return bool(self.dht.is_alive())

    def pulse(self) -> Any:
        """Ask the DHT's process, and through it p2pd, for a sign of life; return a future of it."""
        return self.dht.run_coroutine(_pulse, return_future=True)

    def pids(self) -> list[int]:
        """Return the ids of the DHT's process and of p2pd."""
        with contextlib.suppress(psutil.Error):
            return [self.dht.pid, *(child.pid for child in psutil.Process(self.dht.pid).children())]
        return []

    def close(self) -> None:
        """End the DHT process and its daemon, and remove their sockets. Safe to call twice."""
        try:
            self._turns.close(GRACE_S)
            self.dht.shutdown()
            self.dht.join(GRACE_S)
        finally:
            if self.dht.is_alive():
                self.dht.kill()
                self.dht.join()
            corrections.remove_sockets(self._sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, future: Any) -> Any:
        try:
            return future.result(timeout=RECORD_TIMEOUT_S)
        except concurrent.futures.TimeoutError as error:
            raise SwarmError(
                f"This peer's DHT process did not answer in {RECORD_TIMEOUT_S:.0f} s; nothing was changed.",
                hint="start again with the same command",
            ) from error
        except OSError as error:  # of p2pd's socket
            raise _p2pd_is_gone(error) from error


def _p2pd_is_gone(error: OSError) -> SwarmError:
    return SwarmError(
        f"This peer's p2pd does not answer ({error}); nothing was changed.",
        hint="start again with the same command",
    )


async def _visible_maddrs(dht: hivemind.DHT, node: DHTNode) -> list[Multiaddr]:
    """Ask p2pd where it can be reached, if it can be; in the DHT's process."""
    del dht
    return [] if node.protocol.client_mode else list(await node.get_visible_maddrs(latest=True))


async def _pulse(dht: hivemind.DHT, node: DHTNode) -> None:
    """Have p2pd answer something; in the DHT's process."""
    del dht
    await node.protocol.p2p.list_peers()


def require_peer_address(address: str) -> None:
    """Refuse an address that can't name a peer.

    Raises:
        Unreachable: it is not a multiaddr, or does not say whose address it is.
    """
    example = "/ip4/203.0.113.7/tcp/31337/p2p/Qm..."
    try:
        maddr = Multiaddr(address)
    except (ValueError, TypeError, LookupError) as error:
        raise Unreachable(
            f"{address!r} is not a multiaddr.", hint=f"paste the line that `trahiv init` printed: {example}"
        ) from error
    if "p2p" not in maddr:
        raise Unreachable(
            f"{address} says where to knock but not whose door it is: it lacks `/p2p/<peer id>`.",
            hint=f"paste the whole address that `trahiv init` printed: {example}",
        )


def answering_of(addresses: Iterable[str]) -> list[str]:
    """Knock at all addresses at once; return those where somebody listens, or where that can't be told."""
    addresses = list(dict.fromkeys(addresses))
    with ThreadPoolExecutor(max_workers=len(addresses) or 1) as pool:
        return [one for one, answers in zip(addresses, pool.map(_answers, addresses), strict=True) if answers]


def _answers(address: str) -> bool:
    place = _host_and_port(Multiaddr(address))
    if place is None or place[2] is not socket.SOCK_STREAM:
        return True
    try:
        socket.create_connection(place[:2], timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for address in addresses:
        found.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return found


def _leaves_port_open(host_maddr: str) -> bool:
    return (place := _host_and_port(Multiaddr(host_maddr))) is not None and place[1] == 0


def _transport(maddr: Multiaddr) -> tuple[str, ...]:
    """Name the protocols of an address, without whose it is."""
    return tuple(protocol.name for protocol in maddr.protocols() if protocol.name != "p2p")


def _host_and_port(maddr: Multiaddr) -> tuple[str, int, socket.SocketKind] | None:
    host = next((maddr[p] for p in ("ip4", "ip6", "dns4", "dns6", "dns") if p in maddr), None)
    if host is None:
        return None
    if "tcp" in maddr:
        return host, int(maddr["tcp"]), socket.SOCK_STREAM
    return (host, int(maddr["udp"]), socket.SOCK_DGRAM) if "udp" in maddr else None


def require_free_ports(host_maddrs: list[str]) -> None:
    """Refuse to listen where another process listens already.

    libp2p listens with SO_REUSEPORT, so a second peer on the same port starts without a word, and the
    kernel deals the connections of both to either.

    Raises:
        SetupError: a port is taken, or an address is not one of this machine.
    """
    for text in host_maddrs:
        place = _host_and_port(_parsed(text, "to listen on"))
        if place is None or place[1] == 0:
            continue
        host, port, kind = place
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:  # connections that are closing don't keep a port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                if kind is socket.SOCK_STREAM:
                    probe.listen(1)
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                raise SetupError(
                    f"Can't listen on {text}: "
                    + (f"port {port} is already in use." if taken else f"{error.strerror}."),
                    hint="choose another port with --host-maddr, or 0 for any free one",
                ) from error


def _parsed(text: str, purpose: str) -> Multiaddr:
    try:
        return Multiaddr(text)
    except (ValueError, TypeError, LookupError) as error:
        raise SetupError(
            f"{text!r} is not a multiaddr {purpose}.", hint="a multiaddr looks like /ip4/0.0.0.0/tcp/31337"
        ) from error


def _what_answers(address: str) -> str:
    """Knock at an address that p2pd could not reach, and say what is wrong there."""
    maddr = Multiaddr(address)
    place = _host_and_port(maddr)
    if place is None or place[2] is not socket.SOCK_STREAM:
        return f"{address}: no answer"
    host, port, _ = place
    try:
        socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return f"{address}: {host} is there, but nothing listens on port {port} (has that peer stopped?)"
    except socket.gaierror:
        return f"{address}: there is no host named {host}"
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
        return f"{address}: {host} can't be reached ({reason}): is the address public, the port forwarded?"
    return f"{address}: something listens there, but not the peer {maddr['p2p']}, or that one hangs"


def _is_taken(error: Exception) -> bool:
    return "already taken by another peer" in str(error)


def _why_not_started(
    error: Exception, initial_peers: tuple[str, ...]
) -> SetupError | Unreachable | RecipeError:
    if _is_taken(error):
        return SetupError(
            "A peer with this identity is already in the swarm.",
            hint="stop it first, or give this one its own with --output-dir DIR or --identity FILE",
        )
    if initial_peers:
        return _unreachable(initial_peers)
    return SetupError(
        f"The network daemon did not start: {error}", hint="try again with another --host-maddr"
    )


def _unreachable(initial_peers: tuple[str, ...]) -> Unreachable:
    knocks = "\n".join("  " + _what_answers(address) for address in initial_peers)
    return Unreachable(
        f"No peer could be reached; nothing was changed.\n{knocks}",
        hint="ask for a fresh `trahiv join` line of any peer that is training",
    )
