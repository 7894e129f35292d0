"""What a node says of itself and reads of others, and why it did not start; no process is started here."""

import asyncio
import concurrent.futures
import os
from types import SimpleNamespace

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.errors import NotAdmitted, SetupError, SwarmError, Unreachable
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm import node
from trahiv_cli.swarm.acquaintances import Acquaintances
from trahiv_cli.swarm.node import Node, do_chores, visiting
from trahiv_cli.swarm.records import own_place, owner_of

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
ADDRESSES = tuple(f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{PEER}" for port in (1, 2))
LISTEN = "/ip4/127.0.0.1/tcp/0"


def done(value):
    future = concurrent.futures.Future()
    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
    return future


class Dht:
    """A DHT whose process runs here, or has ended when it `is_over`; p2pd says that it is `visible` there."""

    is_over, pid, loops, place = False, os.getpid(), (), b""

    def __init__(self, found=None, visible=(), *, client_mode=False):
        async def answer(latest=True):
            return visible

        self.answer = found if isinstance(found, concurrent.futures.Future) else done(found)
        table, p2p = SimpleNamespace(peer_id_to_uid={}), SimpleNamespace(list_peers=answer)
        protocol = SimpleNamespace(client_mode=client_mode, routing_table=table, p2p=p2p)
        self.node = SimpleNamespace(protocol=protocol, get_visible_maddrs=answer, peer_id=None)

    def run_coroutine(self, coroutine, return_future):
        return done(asyncio.run(coroutine(self, self.node)))

    def get(self, key, latest, return_future):
        return self.answer

    def store(self, key, value, **options):
        return self.answer

    def shutdown(self):
        self.is_over = True

    def join(self, timeout=None): ...

    def is_alive(self):
        return not self.is_over


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return tmp_path_factory.mktemp("node") / "identity.key"


@pytest.fixture
def start(monkeypatch, identity):
    """`start(dht, initial_peers)` starts a node with a stand-in for its DHT, or with what that raises."""
    monkeypatch.setattr(node, "do_chores", lambda *_: None)

    def start(dht, initial_peers=(), **options):
        def make(**_):
            if isinstance(found := next(tries), Exception):
                raise found
            return found

        tries = iter([dht, Dht()])
        monkeypatch.setattr(node, "CorrectedDHT", make)
        return Node(DhtSection(host_maddrs=[LISTEN]), identity, tuple(initial_peers), **options)

    return start


def test_addresses_are_listed_from_far_to_near_and_tcp_first(start):
    near, home, far = "/ip4/127.0.0.1", "/ip4/192.168.1.7", "/ip4/8.8.8.8"
    ends = [f"/udp/1/quic-v1/p2p/{PEER}", f"/tcp/1/p2p/{PEER}"]
    visible = [Multiaddr(place + end) for end in ends for place in (near, home, far)]
    expected = [place + end for place in (far, home, near) for end in reversed(ends)]
    assert start(Dht(visible=[*visible, visible[0]])).own_addresses() == expected
    assert start(Dht(client_mode=True, visible=visible)).own_addresses() == [], "it only dials out"


def test_a_visit_ends_with_the_visitor(monkeypatch, start):
    dht = Dht()
    monkeypatch.setattr(node, "CorrectedDHT", lambda **_: dht)
    with visiting((), None, Acquaintances(None)) as visitor:
        assert visitor.is_alive() and visitor.pulse().result() is None and visitor.pids()[0] == dht.pid
        visitor.require_membership()
    assert dht.is_over and not visitor.is_alive()


# -- records --------------------------------------------------------------------------------------


def test_records_are_read_by_their_owners_and_a_publication_says_whether_anybody_took_it(start):
    own, malformed = own_place(RSAPrivateKey()), own_place(RSAPrivateKey())
    held = dict.fromkeys([own, own + b"/1", b"[owner:nobody]", "QmA"], ValueWithExpiration(b"1", 9.0))
    reader = start(Dht(ValueWithExpiration(held | {malformed: b"malformed"}, 9.0)))
    assert reader.fetch("key") == {owner_of(own): b"1"}
    for found in (None, ValueWithExpiration(b"a plain value", 9.0)):
        assert start(Dht(found)).fetch("key") == {}
    for stored in (True, False):
        assert start(Dht(stored)).publish("key", b"1", ttl_s=5) is stored


@pytest.mark.parametrize("answer", [concurrent.futures.Future(), done(ConnectionRefusedError("refused"))])
def test_a_dht_that_is_silent_or_has_lost_p2pd_is_an_error_and_no_hang(monkeypatch, start, answer):
    monkeypatch.setattr(node, "RECORD_TIMEOUT_S", 0.0)
    one = start(Dht(answer))
    for ask in (lambda: one.fetch("key"), lambda: one.publish("key", b"1", ttl_s=5)):
        with pytest.raises(SwarmError, match="does not answer"):
            ask()


# -- why a node did not start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "initial_peers", "kind", "said"),
    [
        (P2PDaemonError("Identity a.key is already taken by another peer"), (), SetupError, ["in the swarm"]),
        (P2PDaemonError("Daemon failed to start in 60.0 seconds"), (), SetupError, ["60.0 seconds"]),
        (P2PDaemonError("failed"), ADDRESSES, Unreachable, [f"{one}: no answer" for one in ADDRESSES]),
        (NotAdmitted("no member"), ADDRESSES, NotAdmitted, ["no member"]),
    ],
    ids=["its identity is in use", "p2pd", "nobody answered", "no member"],
)
def test_why_a_node_did_not_start_is_said(start, error, initial_peers, kind, said):
    with pytest.raises(kind) as refused:
        start(error, initial_peers)
    assert all(part in refused.value.message for part in said)


def test_the_only_address_that_leads_into_a_swarm_is_left_to_p2pd_which_waits_longer(monkeypatch, start):
    monkeypatch.setattr(node, "answering_of", lambda addresses: [])
    assert start(Dht(), ADDRESSES[:1]).is_alive()
    with pytest.raises(Unreachable):
        start(Dht(), ADDRESSES)


@pytest.mark.parametrize("error", [NotAdmitted("no member"), P2PDaemonError("failed")])
def test_a_node_starts_without_peers_of_before_that_fail_it(start, error):
    met = Acquaintances(None)
    met.meet(PEER, list(ADDRESSES))
    assert start(error, met=met).fetch("key") == {}


@pytest.mark.parametrize("error", [SwarmError("The DHT did not answer."), OSError("the disk is full")])
def test_a_chore_that_fails_is_told_once_and_keeps_no_other_from_being_done(caplog, error):
    done_times = []

    def fail():
        raise error

    do_chores([fail, lambda: done_times.append(1)], SimpleNamespace(wait=lambda _: len(done_times) == 3))
    assert caplog.text.count(str(error)) == 1
