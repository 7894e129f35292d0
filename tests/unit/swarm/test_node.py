"""What a node publishes and reads, and why one does not start; no process is started here.

Also which addresses are accepted, which peers can dial one, where a peer may listen, and failed processes.
"""

import asyncio
import contextlib
import errno
import os
import queue
import re
import socket
import threading
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr
from psutil import Process

from tests.unit.async_tests import peer
from tests.unit.conftest import refused
from trahiv_cli.errors import NotAdmitted, PeerBroken, SetupError, SwarmError, Unreachable
from trahiv_cli.members.records import own_subkey, owner_of
from trahiv_cli.net import addresses
from trahiv_cli.reach.hole_punching import Seen
from trahiv_cli.reach.reachability import Reach
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm import node
from trahiv_cli.swarm import watchdog as alive
from trahiv_cli.swarm.corrections.processes import effort_of
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.node import Node, do_chores
from trahiv_cli.swarm.owner import visiting
from trahiv_cli.swarm.watchdog import Watchdog
from trahiv_cli.telemetry.events import Events

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
ADDRESSES = tuple(f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{PEER}" for port in (1, 2))
LISTEN = "/ip4/127.0.0.1/tcp/0"
LOOK_EVERY_S = 0.5
PULSE_EVERY_S = 1.5
STILL_AFTER_LOOKS = 8
SLOW_AFTER_S = 60.0


def done(value):
    future = Future()
    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
    return future


def dht_of(found=None, visible=(), client_mode=False, knows=()):
    """A DHT whose process is this one until it is shut down; p2pd reports its addresses as `visible`."""
    own = AsyncMock(**{"get_visible_maddrs.return_value": visible, "protocol.client_mode": client_mode})
    own.protocol.p2p = AsyncMock(_child=Process(), **{"list_peers.return_value": ()})
    own.protocol.routing_table.peer_id_to_uid = dict.fromkeys(map(PeerID.from_base58, knows))
    dht = Mock(pid=os.getpid(), loops=(), place=b"", client_mode=client_mode)
    dht.run_coroutine = lambda coroutine, return_future: done(asyncio.run(coroutine(dht, own)))
    dht.get.return_value = dht.store.return_value = found if isinstance(found, Future) else done(found)
    dht.is_alive = lambda: not dht.shutdown.called
    return dht


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return tmp_path_factory.mktemp("node") / "identity.key"


@pytest.fixture
def start(monkeypatch, identity):
    """`start(dht, initial_peers)` starts a node with a stand-in for its DHT.

    If `dht` is an error, the first `times` tries raise it.
    """
    monkeypatch.setattr(node, "do_chores", lambda *_: None)

    def start(dht, initial_peers=(), times=1, **options):
        monkeypatch.setattr(node, "CorrectedDHT", Mock(side_effect=[*[dht] * times, dht_of()]))
        return Node(DhtSection(host_maddrs=[LISTEN]), identity, tuple(initial_peers), **options)

    return start


HOSTS = {
    "internet": "dns4/example.org ip4/8.8.8.8 ip6/2606:4700::1111",
    "local network": "ip4/100.64.0.9 ip4/169.254.1.1 ip4/192.168.1.7 ip6/fe80::1",
    "this machine": "ip4/127.0.0.1 ip6/::1",
}


def test_own_addresses_are_sorted_by_reach(start):
    ends = [f"tcp/1/p2p/{PEER}", f"udp/1/quic-v1/p2p/{PEER}"]
    expected = [(reach, f"/{host}/{end}") for reach in HOSTS for end in ends for host in HOSTS[reach].split()]
    visible = [Multiaddr(maddr) for _, maddr in reversed([*expected, expected[0]])]
    listed = start(dht_of(visible=visible)).own_addresses()
    assert [(addresses.reach_of(maddr), maddr) for maddr in listed] == expected


def test_peer_that_only_dials_has_no_addresses(start):
    assert start(dht_of(client_mode=True, visible=[Multiaddr("/ip4/8.8.8.8/tcp/1")])).own_addresses() == []


TCP, QUIC = f"tcp/1/p2p/{PEER}", f"udp/2/quic-v1/p2p/{PEER}"


@pytest.mark.parametrize(
    "told, found",
    [
        (
            {f"/ip4/127.0.0.1/{TCP}", f"/ip4/192.168.1.7/{TCP}", f"/ip6/::1/{QUIC}"},
            {f"/ip4/192.168.1.7/{TCP}", f"/ip4/100.64.0.1/{TCP}", f"/ip6/fd7a::1/{QUIC}"},
        ),
        ({f"/ip4/192.168.1.7/{TCP}"}, set()),  # it listens on that one alone
    ],
)
def test_addresses_cover_all_interfaces(monkeypatch, told, found):
    hosts = {
        "lo": "127.0.0.1 ::1",
        "eth0": "192.168.1.7 fe80::1%eth0",
        "tailscale0": "100.64.0.1 fd7a::1",
        "down0": "10.9.0.1",
    }
    there = defaultdict(list)
    for name, texts in hosts.items():
        for text in texts.split():
            family = socket.AF_INET6 if ":" in text else socket.AF_INET
            there[name].append(SimpleNamespace(family=family, address=text))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    states = {name: SimpleNamespace(isup=name != "down0") for name in there}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert addresses.of_all_interfaces(told) == found


OTHERS = [peer(number).to_base58() for number in range(3)]


@pytest.fixture
def entrances(start):
    """`entrances(kind, known)` returns those of a peer that knows others, and its own addresses."""

    def entrances(kind, known=OTHERS):
        met = KnownPeers(None)
        for other in OTHERS:
            for port in (1, 2):
                met.meet(other, [f"/ip4/203.0.113.7/tcp/{port + number}/p2p/{other}" for number in (0, 7)])
        inside = f"/ip4/192.168.1.7/tcp/1/p2p/{PEER}"
        one = start(dht_of(visible=[Multiaddr(inside)], knows=known), ADDRESSES[:1], met=met)
        one._finder.reach = Reach(kind, "why", (("5.5.5.1", 9),))
        return one.entrances(), [ADDRESSES[0], f"/ip4/5.5.5.1/tcp/9/p2p/{one.peer_id}", inside]

    return entrances


@pytest.mark.parametrize("kind", ["punched", "relayed", "dials-out"])
@pytest.mark.parametrize("known", [OTHERS, OTHERS[:1]], ids=len)
def test_undialable_peer_names_members_as_entrances(entrances, kind, known):
    named, _ = entrances(kind, known)
    assert len(named) == len(set(named)) == min(2, len(known))
    assert set(named) <= {f"/ip4/203.0.113.7/tcp/2/p2p/{one}" for one in known}


@pytest.mark.parametrize("kind, known", [("direct", OTHERS), ("alone", OTHERS), ("relayed", [])])
def test_other_peers_name_own_addresses_as_entrances(entrances, kind, known):
    named, own = entrances(kind, known)
    assert named == own


@pytest.mark.parametrize(
    "kind, carries, client_mode, only_dials",
    [
        ("dials-out", False, False, True),
        ("dials-out", True, False, False),
        ("relayed", False, False, False),
        ("direct", False, True, True),
    ],
)
def test_unrelayed_peer_only_dials(start, kind, carries, client_mode, only_dials):
    one = start(dht_of(client_mode=client_mode))
    one._finder.reach = Reach(kind, "why", looks=(Seen((), (), carries),))
    one._finder.is_known.set()
    assert one.only_dials() is only_dials


def test_visit_ends_with_visitor(monkeypatch, start):
    dht = dht_of()
    monkeypatch.setattr(node, "CorrectedDHT", lambda **_: dht)
    with visiting((), None, KnownPeers(None)) as visitor:
        assert visitor.is_alive()
        assert visitor.pulse().result() is None
        assert visitor.pids()[0] == dht.pid
        visitor.require_membership()
    assert not visitor.is_alive()


def test_records_are_read_by_owner(start):
    own, malformed = own_subkey(RSAPrivateKey()), own_subkey(RSAPrivateKey())
    held = dict.fromkeys([own, own + b"/1", b"[owner:nobody]", "QmA"], ValueWithExpiration(b"1", 9.0))
    reader = start(dht_of(ValueWithExpiration(held | {malformed: b"malformed"}, 9.0)))
    assert reader.fetch("key") == {owner_of(own): b"1"}
    for found in (None, ValueWithExpiration(b"a plain value", 9.0)):
        assert start(dht_of(found)).fetch("key") == {}


@pytest.mark.parametrize("stored", [True, False])
def test_publication_says_whether_it_is_kept(start, stored):
    assert start(dht_of(stored)).publish("key", b"1", ttl_s=5) is stored


@pytest.mark.parametrize("answer", [Future(), done(ConnectionRefusedError("refused"))])
def test_silent_dht_raises_error(start, answer):
    one = start(dht_of(answer))
    one.answer_s = 0.0
    one.answer_s = 0.0
    for ask in (lambda: one.fetch("key"), lambda: one.publish("key", b"1", ttl_s=5)):
        with pytest.raises(SwarmError, match="does not answer"):
            ask()


@pytest.mark.parametrize(
    "error, initial_peers, kind, said",
    [
        (P2PDaemonError("Identity a.key is already taken by another peer"), (), SetupError, "in the swarm"),
        (P2PDaemonError("Daemon failed to start in 60.0 seconds"), (), SetupError, "60.0 seconds"),
        (P2PDaemonError("failed"), ADDRESSES, Unreachable, "{0}: no answer(.|\n)*{1}: no answer"),
        (NotAdmitted("no member"), ADDRESSES, NotAdmitted, "no member"),
    ],
    ids=["its identity is in use", "p2pd", "nobody answered", "no member"],
)
def test_failed_start_explains_cause(start, error, initial_peers, kind, said):
    with refused(said.format(*ADDRESSES), error=kind):
        start(error, initial_peers, times=3)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_node_tries_three_times_to_enter(start, times):
    slow = RuntimeError("none of the initial_peers responded to a ping")
    with pytest.raises(Unreachable) if times == 3 else contextlib.nullcontext():
        assert start(slow, ADDRESSES, times=times).is_alive()


def test_single_silent_address_is_left_to_p2pd(monkeypatch, start):
    monkeypatch.setattr(addresses, "answering_of", lambda _: [])
    assert start(dht_of(), ADDRESSES[:1]).is_alive()
    with pytest.raises(Unreachable):
        start(dht_of(), ADDRESSES)


@pytest.mark.parametrize("error", [NotAdmitted("no member"), P2PDaemonError("failed")])
def test_node_starts_despite_failing_known_peers(start, error):
    met = KnownPeers(None)
    met.meet(PEER, list(ADDRESSES))
    assert start(error, met=met).fetch("key") == {}


@pytest.mark.parametrize("error", [SwarmError("No answer.", hint="wait"), OSError("the disk is full")])
def test_failing_chore_is_reported_once(caplog, error):
    failing, other = Mock(side_effect=error), Mock()

    def is_over(*_):
        return other.call_count >= 3

    end = Mock(wait=is_over, is_set=is_over)
    do_chores([failing, other], end)
    do_chores([failing], end)  # now the node has ended
    assert caplog.text.count(getattr(error, "message", str(error))) == 1
    assert "hint" not in caplog.text


@pytest.mark.parametrize("host", ["ip4/203.0.113.7", "ip6/2001:db8::1", "dns4/example.org"])
@pytest.mark.parametrize("end", ["tcp/1", "udp/1/quic-v1", f"tcp/1/p2p/{PEER}/p2p-circuit"])
def test_peer_addresses_are_accepted(host, end):
    addresses.require_peer_address(f"/{host}/{end}/p2p/{PEER}")


@pytest.mark.parametrize("address", ["", "0.0.0.0:31337", "/ip4/203.0.113.7/tcp/99999", "/ip4/1.2.3.4/tcp/1"])
def test_other_addresses_are_refused(address):
    with pytest.raises(Unreachable, match="is not the multiaddr of a peer: that ends with `/p2p/<peer id>`"):
        addresses.require_peer_address(address)


@pytest.mark.parametrize(
    "protocol, kind, end", [("tcp", socket.SOCK_STREAM, ""), ("udp", socket.SOCK_DGRAM, "/quic-v1")]
)
def test_port_in_use_is_refused(protocol, kind, end):
    with socket.socket(socket.AF_INET, kind) as other:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # in the way libp2p uses it
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            other.listen(1)
        port = other.getsockname()[1]
        listens = [f"/ip4/{host}/{protocol}/{port}{end}" for host in ("127.0.0.1", "0.0.0.0")]
        for listen in listens:
            with refused(rf"{listen}: port \d+ is already in use", "--host-maddr", SetupError):
                addresses.require_free_ports([LISTEN, listen])
    for _ in range(2):
        addresses.require_free_ports([*listens, *DhtSection().host_maddrs])


ELSEWHERE = "/ip4/203.0.113.7/tcp/31337"


@pytest.mark.parametrize(
    "given, announced, hosts, told, num_notes",
    [
        ("/ip4/0.0.0.0/tcp/0 /ip6/::1/tcp/5", "", "/ip4/0.0.0.0/tcp/0 /ip6/::1/tcp/5", "", 0),
        ("/dns4/localhost/tcp/0/ws", "", "/dns4/localhost/tcp/0/ws", "", 0),
        ("/ip4/0.0.0.0/udp/0/quic", "", "/ip4/0.0.0.0/udp/0/quic-v1", "", 1),
        (ELSEWHERE, "", "/ip4/0.0.0.0/tcp/31337", ELSEWHERE, 1),
        (f"/ip4/0.0.0.0/tcp/31337 {ELSEWHERE}", ELSEWHERE, "/ip4/0.0.0.0/tcp/31337", ELSEWHERE, 1),
        ("/ip6/2001:db8::7/tcp/9/ws", "", "/ip6/::/tcp/9/ws", "/ip6/2001:db8::7/tcp/9/ws", 1),
        ("/dns6/a.example/tcp/9", "", "/ip6/::/tcp/9", "/dns6/a.example/tcp/9", 1),
        ("/dns4/a.example/udp/9/quic", "", "/ip4/0.0.0.0/udp/9/quic-v1", "/dns4/a.example/udp/9/quic-v1", 2),
        ("/ip4/0.0.0.0/tcp/0", ELSEWHERE, "/ip4/0.0.0.0/tcp/0", ELSEWHERE, 0),
    ],
)
def test_external_address_is_announced(given, announced, hosts, told, num_notes):
    found = addresses.read_listening(given.split(), announced.split())
    assert (found.hosts, found.announced, len(found.notes)) == (hosts.split(), told.split(), num_notes)


NO_LISTENING = "not a multiaddr to listen on"
NEED_PORT = "can't be announced: others need the address and the port"


@pytest.mark.parametrize(
    "host, announced, why",
    [
        ("x:80", "", f"'x:80' is {NO_LISTENING}"),
        ("/ip4/0.0.0.0", "", NO_LISTENING),
        ("/ip4/0.0.0.0/udp/9", "", NO_LISTENING),
        ("/ip4/0.0.0.0/udp/9/quic-v1/webtransport", "", NO_LISTENING),
        ("/unix/tmp/a.sock", "", NO_LISTENING),
        (f"{LISTEN}/p2p/{PEER}", "", NO_LISTENING),
        ("/ip4/203.0.113.7/tcp/0", "", f"203.0.113.7/tcp/0 {NEED_PORT}"),
        ("/dns4/a.example/udp/0/quic-v1", "", NEED_PORT),
        (LISTEN, "/ip4/203.0.113.7", "not a multiaddr to announce"),
        (LISTEN, "/ip4/203.0.113.7/tcp/0", NEED_PORT),
        (LISTEN, "/ip4/0.0.0.0/tcp/31337", NEED_PORT),
        (LISTEN, "/ip4/203.0.113.7/udp/9/quic-v1", "does not listen on that transport"),
    ],
)
def test_unusable_addresses_are_refused(host, announced, why):
    with refused(re.escape(why), ".", SetupError):
        addresses.read_listening([host], announced.split())


@pytest.mark.parametrize(
    "number, why",
    [(errno.EACCES, "Permission denied"), (errno.EAFNOSUPPORT, "Address family not supported")],
)
def test_port_error_has_system_reason(monkeypatch, number, why):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(addresses.socket, "socket", refuse)
    with pytest.raises(SetupError, match=f"Can't listen on /ip6/::/tcp/80: {why}"):
        addresses.require_free_ports(["/ip6/::/tcp/80"])


def test_node_notes_unused_listen_address(start):
    [note] = start(dht_of()).notes()
    assert note.startswith(f"p2pd does not listen on {LISTEN}: ")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        assert start(dht_of()).notes() == []


def test_stranger_on_port_is_recognized():
    def said_of(address):
        return addresses.what_answers(address, addresses.knock(address))

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{stranger.getsockname()[1]}/p2p/{PEER}"
        untold = f"/ip4/127.0.0.1/udp/1/quic-v1/p2p/{PEER}"
        assert addresses.answering_of([address, untold]) == [untold]
        assert "nothing listens on port" in said_of(address)
        stranger.listen(2)
        assert addresses.answering_of([address, untold]) == [address, untold]
        assert "something else listens there" in said_of(address)
        assert said_of(untold) == f"{untold}: no answer"
        assert "nowhere.invalid can't be reached" in said_of(f"/dns4/nowhere.invalid/tcp/1/p2p/{PEER}")


class Home:
    """A node with a scripted process, which counts its pulses. The owner has removed the peers in `out`."""

    answers = pending = None
    is_busy = is_stopped = False
    runs = True
    out = ()
    asked = used_s = 0

    def __init__(self, **options):
        vars(self).update(options)

    def is_alive(self):
        return self.runs

    def is_out(self, peer):
        return peer in self.out

    def pids(self):
        return [self]

    def pulse(self):
        self.asked += 1
        if isinstance(self.answers, OSError):
            raise self.answers
        self.pending = Future() if self.answers == "nothing" else done(self.answers)
        return self.pending

    def effort(self):
        self.used_s += 0.3 * self.is_busy
        return self.used_s, self.is_stopped

    def require_membership(self):
        if self.is_out("QmMe"):
            raise NotAdmitted("The owner of this swarm has taken this peer out.")


@pytest.fixture
def watch(monkeypatch, clock):
    """`watch(home)` returns `look(seconds)`, which returns how long it looked, and the failure if any."""
    monkeypatch.setattr(alive, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(alive, "effort_of", lambda pids: pids[0].effort())

    def watch(home):
        watcher = Watchdog(home, Events(), bool)

        def look(seconds):
            began = clock.now
            while clock.now < began + seconds and not watcher.failure:
                clock.now += LOOK_EVERY_S
                watcher.look()
            return clock.now - began, watcher.failure

        return look

    return watch


def test_answering_process_is_asked_regularly(watch):
    home = Home()
    watch(home)(600)
    assert 600 / PULSE_EVERY_S / 2 <= home.asked <= 600 / PULSE_EVERY_S


def test_answering_process_is_well_after_suspend(watch, clock):
    home = Home(answers="nothing")
    look = watch(home)
    look(PULSE_EVERY_S + LOOK_EVERY_S * (STILL_AFTER_LOOKS // 2))
    home.pending.set_result(None)
    clock.now += 7200  # a suspended machine: hours pass between two looks
    home.answers = None
    assert look(60)[1] == ""


def test_ended_process_is_noticed_at_once(watch):
    failure = "This peer's DHT process, or its daemon p2pd, has ended"
    assert watch(Home(runs=False))(10) == (LOOK_EVERY_S, failure)


STILL_S, FAILED_S = 10.0, 2 * PULSE_EVERY_S


@pytest.mark.parametrize(
    "home, least_s, most_s, said",
    [
        (Home(answers="nothing"), 0.0, STILL_S, "stands still"),
        (Home(answers="nothing", is_busy=True), SLOW_AFTER_S, SLOW_AFTER_S + 5, "did not answer"),
        # like p2pd beside the DHT's process: they answer together
        (Home(answers="nothing", is_busy=True, is_stopped=True), 0.0, STILL_S, "stands still"),
        (Home(answers=ConnectionRefusedError("p2pd is gone")), 0.0, FAILED_S, "p2pd is gone"),
        (Home(answers=ValueError("nonsense")), 0.0, FAILED_S, "nonsense"),
    ],
)
def test_busy_process_is_given_time(watch, home, least_s, most_s, said):
    took_s, failure = watch(home)(600)
    assert least_s <= took_s <= most_s
    assert said in failure


def test_missing_process_uses_no_time():
    used_s, is_stopped = effort_of([os.getpid(), 2**22 + 1])
    assert used_s > 0
    assert not is_stopped
    assert effort_of([2**22 + 1]) == (0.0, False)


def test_failed_peer_stops_training_unless_it_leaves():
    told, wants_to_leave = queue.SimpleQueue(), Mock(return_value=False)
    broken = Watchdog(Home(runs=False), Events(told.put), wants_to_leave)
    broken.watch()
    assert told.get(timeout=10)["code"] == "broken"
    with pytest.raises(PeerBroken, match="has ended"):
        broken.require()
    assert broken.must_stop
    assert told.empty()
    wants_to_leave.return_value = True
    broken.require()  # it leaves in good order, whatever failed
    broken.close()


def test_kicked_peers_are_known():
    member, homeless = Watchdog(Home(out={"QmMe", "QmB"}), Events(), bool), Watchdog(None, Events(), bool)
    with pytest.raises(NotAdmitted):
        member.require()
    assert [one.is_out(peer) for one in (member, homeless) for peer in ("QmB", "QmA")] == [True] + [False] * 3


@pytest.mark.parametrize("home", [Home(), Home(runs=False), None], ids=["well", "broken", "homeless"])
def test_closed_watch_must_stop(home):
    watcher = Watchdog(home, Events(), bool)
    watcher.watch()
    assert not watcher.must_stop
    assert [watcher.close(), watcher.close()] == [True, False]
    assert watcher.must_stop
    assert "alive" not in {thread.name for thread in threading.enumerate()}
