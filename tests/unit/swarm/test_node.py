"""What a node says of itself and reads of others, and why it did not start; no process is started here."""

import asyncio
import concurrent.futures
import socket
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
from trahiv_cli.swarm.addresses import Address
from trahiv_cli.swarm.node import Node, recipe_key, runs_key
from trahiv_cli.swarm.records import own_place, owner_of

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
ADDRESSES = tuple(f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{PEER}" for port in (1, 2))
LISTEN = "/ip4/127.0.0.1/tcp/0"
SILENT = concurrent.futures.Future()


def done(value):
    future = concurrent.futures.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class Dht:
    """A DHT whose process runs here.

    Args:
        found: what is stored under every key.
        visible: where p2pd says that it can be reached.
        client_mode: whether it only dials out.
    """

    def __init__(self, found=None, visible=(), *, client_mode=False):
        async def get_visible_maddrs(latest):
            return visible

        self.answer = found if isinstance(found, concurrent.futures.Future) else done(found)
        table = SimpleNamespace(peer_id_to_uid={})
        protocol = SimpleNamespace(client_mode=client_mode, routing_table=table)
        self.node = SimpleNamespace(protocol=protocol, get_visible_maddrs=get_visible_maddrs, peer_id=None)

    def run_coroutine(self, coroutine, return_future):
        return done(asyncio.run(coroutine(self, self.node)))

    def get(self, key, latest, return_future):
        return self.answer

    def store(self, key, value, **options):
        return self.answer

    def shutdown(self): ...


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return tmp_path_factory.mktemp("node") / "identity.key"


@pytest.fixture
def start(monkeypatch, identity):
    """`start(dht, initial_peers)` starts a node with a stand-in for its DHT, or with what that raises."""
    monkeypatch.setattr(node, "Turns", lambda chores: SimpleNamespace(start=lambda: None))

    def start(dht, initial_peers=(), **options):
        def make(host_maddrs, **_):
            found = tries.pop()
            if isinstance(found, Exception):
                raise found
            found.host_maddrs = host_maddrs
            return found

        tries = [Dht(), dht]
        monkeypatch.setattr(node, "CorrectedDHT", make)
        return Node(DhtSection(host_maddrs=[LISTEN]), identity, tuple(initial_peers), **options)

    return start


def test_runs_do_not_share_a_key():
    assert recipe_key("a") != recipe_key("b")
    assert runs_key() not in (recipe_key("a"), recipe_key("trahiv"), recipe_key(""))


def test_addresses_are_listed_from_far_to_near_and_tcp_first(start):
    near, home, far = "/ip4/127.0.0.1", "/ip4/192.168.1.7", "/ip4/8.8.8.8"
    ends = [f"/udp/1/quic-v1/p2p/{PEER}", f"/tcp/1/p2p/{PEER}"]
    visible = [Multiaddr(place + end) for end in ends for place in (near, home, far)]
    listed = start(Dht(visible=[*visible, visible[0]])).addresses()
    expected = [place + end for place in (far, home, near) for end in reversed(ends)]
    assert [address.maddr for address in listed] == expected
    assert listed[0] == Address(f"{far}/tcp/1/p2p/{PEER}") and listed[0].reach == "internet"


def test_a_peer_that_only_dials_out_has_no_address(start):
    assert start(Dht(client_mode=True, visible=[Multiaddr("/ip4/8.8.8.8/tcp/1")])).addresses() == ()


def test_the_port_of_this_node_is_written_down_and_taken_again_if_it_is_free(start):
    met, again = Acquaintances(None), Dht()
    with socket.create_server(("127.0.0.1", 0)) as other:
        here = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        start(Dht(visible=[Multiaddr(f"{here}/p2p/{PEER}")]), met=met)
        start(while_taken := Dht(visible=[Multiaddr(f"{here}/p2p/{PEER}")]), met=met)
    start(again, met=met)
    assert while_taken.host_maddrs == [LISTEN] and again.host_maddrs == [here]


# -- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [None, ValueWithExpiration(b"a plain value", 9.0)])
def test_a_key_without_a_dictionary_holds_no_records(start, found):
    assert start(Dht(found)).fetch("key") == {}


def test_records_are_read_by_their_owners(start):
    own, malformed = own_place(RSAPrivateKey()), own_place(RSAPrivateKey())
    held = dict.fromkeys([own, own + b"/1", b"[owner:nobody]", "QmA"], ValueWithExpiration(b"1", 9.0))
    reader = start(Dht(ValueWithExpiration(held | {malformed: b"malformed"}, 9.0)))
    assert reader.fetch("key") == {owner_of(own): b"1"}


@pytest.mark.parametrize("stored", [True, False])
def test_a_publication_says_whether_anybody_took_it(start, stored):
    assert start(Dht(stored)).publish("key", b"1", ttl_s=5) is stored


@pytest.mark.parametrize(
    ("answer", "said"),
    [(SILENT, "did not answer"), (done(ConnectionRefusedError(111, "refused")), "p2pd does not answer")],
)
def test_a_dht_that_is_silent_or_has_lost_p2pd_is_an_error_and_no_hang(monkeypatch, start, answer, said):
    monkeypatch.setattr(node, "RECORD_TIMEOUT_S", 0.0)
    one = start(Dht(answer))
    for ask in (lambda: one.fetch("key"), lambda: one.publish("key", b"1", ttl_s=5)):
        with pytest.raises(SwarmError, match=said):
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


@pytest.mark.parametrize("error", [NotAdmitted("no member"), P2PDaemonError("failed")])
def test_a_node_starts_without_peers_of_before_that_fail_it(start, error):
    met = Acquaintances(None)
    met.meet(PEER, list(ADDRESSES))
    assert start(error, met=met).fetch("key") == {}
