"""Where a peer can be reached and where it may listen; no daemon is started here."""

import asyncio
import concurrent.futures
import socket
from types import SimpleNamespace

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.errors import SetupError, SwarmError, Unreachable
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm import node
from trahiv_cli.swarm.node import (
    Address,
    Node,
    _reach,
    _why_not_started,
    recipe_key,
    require_free_ports,
    require_peer_address,
    runs_key,
)
from trahiv_cli.swarm.records import own_place, owner_of

KEY = RSAPrivateKey()
PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def bare_node(dht):
    """A node without its constructor, which starts the daemon."""
    bare = object.__new__(Node)
    bare.dht, bare.book = dht, None
    return bare


def dht_of(*, client_mode=False, visible=()):
    """A DHT whose process runs here, of a node that p2pd says is `visible` there."""

    async def get_visible_maddrs(latest):
        return visible

    node = SimpleNamespace(
        protocol=SimpleNamespace(client_mode=client_mode), get_visible_maddrs=get_visible_maddrs
    )

    def run_coroutine(coroutine, *, return_future):
        future = concurrent.futures.Future()
        future.set_result(asyncio.run(coroutine(dht, node)))
        return future

    return (dht := SimpleNamespace(run_coroutine=run_coroutine))


# -- keys -----------------------------------------------------------------------------------------


def test_runs_do_not_share_a_key():
    assert recipe_key("a") != recipe_key("b")
    assert runs_key() not in (recipe_key("a"), recipe_key("trahiv"), recipe_key(""))


# -- addresses of others --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/31337/quic-v1/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/31337/p2p/{PEER}",
        f"/dns4/example.org/tcp/31337/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_an_address_that_names_a_peer_is_taken(address):
    require_peer_address(address)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:31337", "/ip4/203.0.113.7/tcp", "/ip4/203.0.113.7/tcp/99999", "/ip4/300.0.0.1/tcp/1"]
    + ["/ip4/203.0.113.7/tcp/31337/p2p/", "/ip4/203.0.113.7/tcp/31337/p2p/Qm...", f"ip4/1.2.3.4/{PEER}"],
)
def test_what_is_no_multiaddr_is_said(address):
    with pytest.raises(Unreachable) as refused:
        require_peer_address(address)
    assert refused.value.message == f"{address!r} is not a multiaddr."
    assert "/p2p/Qm" in refused.value.hint and refused.value.exit_code == 4


def test_an_address_without_a_peer_is_said():
    with pytest.raises(Unreachable, match="lacks `/p2p/<peer id>`") as refused:
        require_peer_address("/ip4/203.0.113.7/tcp/31337")
    assert "trahiv init" in refused.value.hint


# -- ports of our own -----------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "udp"])
def taken(request):
    """A port of 127.0.0.1 that is in use in the way libp2p uses it, and its multiaddr."""
    kind = socket.SOCK_STREAM if request.param == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            other.listen(1)
        port = other.getsockname()[1]
        yield f"/ip4/127.0.0.1/{request.param}/{port}" + "/quic-v1" * (request.param == "udp")


def test_a_port_in_use_is_refused_although_it_could_be_shared(taken):
    with pytest.raises(SetupError, match=r"port \d+ is already in use") as refused:
        require_free_ports([taken])
    assert taken in refused.value.message and "--host-maddr" in refused.value.hint


def test_a_port_in_use_on_one_address_is_refused_on_all(taken):
    with pytest.raises(SetupError, match="already in use"):
        require_free_ports([taken.replace("127.0.0.1", "0.0.0.0")])


def test_every_address_is_looked_at(taken):
    with pytest.raises(SetupError, match="already in use"):
        require_free_ports(["/ip4/127.0.0.1/tcp/0", taken])


def test_a_free_port_is_still_free_afterwards():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    for _ in range(2):
        require_free_ports([f"/ip4/127.0.0.1/tcp/{port}", f"/ip4/127.0.0.1/udp/{port}/quic-v1"])


@pytest.mark.parametrize("address", [*DhtSection().host_maddrs, "/ip6/::/tcp/0", "/unix/tmp/a.sock"])
def test_an_address_without_a_port_of_its_own_is_left_to_the_system(address):
    require_free_ports([address])


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(SetupError, match=r"Can't listen on /ip4/203\.0\.113\.7/tcp/31337: Cannot assign"):
        require_free_ports(["/ip4/203.0.113.7/tcp/31337"])


@pytest.mark.parametrize("address", ["", "31337", "0.0.0.0:31337", "/ip4/0.0.0.0/tcp/x", "/tcp/99999"])
def test_what_is_no_multiaddr_to_listen_on_is_said(address):
    with pytest.raises(SetupError, match="is not a multiaddr to listen on") as refused:
        require_free_ports([address])
    assert "/ip4/0.0.0.0/tcp/31337" in refused.value.hint and repr(address) in refused.value.message


# -- addresses of our own -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("/ip4/127.0.0.1/tcp/1", "this machine"),
        ("/ip6/::1/tcp/1", "this machine"),
        ("/ip4/192.168.1.7/tcp/1", "local network"),
        ("/ip4/10.0.0.7/udp/1/quic-v1", "local network"),
        ("/ip4/172.17.0.2/tcp/1", "local network"),
        ("/ip4/169.254.1.1/tcp/1", "local network"),
        ("/ip4/100.64.0.9/tcp/1", "local network"),
        ("/ip6/fe80::1/tcp/1", "local network"),
        ("/ip6/fd00::1/tcp/1", "local network"),
        ("/ip4/8.8.8.8/tcp/1", "internet"),
        ("/ip6/2606:4700::1111/tcp/1", "internet"),
        ("/dns4/example.org/tcp/1", "internet"),
    ],
)
def test_an_address_says_who_can_dial_it(address, reach):
    assert _reach(Multiaddr(address)) == reach


def test_addresses_are_listed_from_far_to_near_and_tcp_first():
    near, home, far = "/ip4/127.0.0.1", "/ip4/192.168.1.7", "/ip4/8.8.8.8"
    ends = [f"/udp/1/quic-v1/p2p/{PEER}", f"/tcp/1/p2p/{PEER}"]
    visible = [Multiaddr(place + end) for end in ends for place in (near, home, far)]
    listed = bare_node(dht_of(visible=[*visible, visible[0]])).addresses()
    assert [address.maddr for address in listed] == [
        place + end for place in (far, home, near) for end in reversed(ends)
    ]
    assert listed[0] == Address(f"{far}/tcp/1/p2p/{PEER}", "internet")


def test_a_peer_that_only_dials_out_has_no_address():
    assert bare_node(dht_of(client_mode=True)).addresses() == ()


# -- records --------------------------------------------------------------------------------------


def answering(value):
    future = concurrent.futures.Future()
    future.set_result(value)
    return SimpleNamespace(
        get=lambda key, latest, return_future: future, store=lambda key, value, **_: future
    )


@pytest.mark.parametrize("found", [None, ValueWithExpiration(b"a plain value", 9.0)])
def test_a_key_without_a_dictionary_holds_no_records(found):
    assert bare_node(answering(found)).fetch("key") == {}


def test_records_are_read_by_their_owners():
    own, malformed = own_place(KEY), own_place(RSAPrivateKey())
    held = dict.fromkeys([own, own + b"/1", b"[owner:nobody]", "QmA"], ValueWithExpiration(b"1", 9.0))
    found = bare_node(answering(ValueWithExpiration(held | {malformed: b"malformed"}, 9.0))).fetch("key")
    assert found == {owner_of(own): b"1"}


@pytest.mark.parametrize("stored", [True, False])
def test_a_publication_says_whether_anybody_took_it(stored):
    publisher = bare_node(answering(stored))
    publisher._signing_key, publisher._certificate = KEY, b""
    assert publisher.publish("key", b"1", ttl_s=5) is stored


def test_a_dht_that_is_silent_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(node, "RECORD_TIMEOUT_S", 0.0)
    dht = SimpleNamespace(get=lambda key, latest, return_future: concurrent.futures.Future())
    with pytest.raises(SwarmError, match="did not answer"):
        bare_node(dht).fetch("key")


# -- why a node did not start ---------------------------------------------------------------------


def test_an_identity_that_is_in_use_is_said():
    error = P2PDaemonError("Identity /run/identity.key is already taken by another peer")
    assert "already in the swarm" in _why_not_started(error, ()).message


def test_a_peer_that_has_stopped_is_told_from_a_stranger_on_its_port():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"
        stopped = _why_not_started(P2PDaemonError("failed"), (address,))
        stranger.listen(1)
        other = _why_not_started(P2PDaemonError("failed"), (address,))
    assert isinstance(stopped, Unreachable) and "nothing listens on port" in stopped.message
    assert f"not the peer {PEER}" in other.message


def test_every_address_that_was_tried_is_explained():
    addresses = tuple(f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{PEER}" for port in (1, 2))
    message = _why_not_started(P2PDaemonError("failed"), addresses).message
    assert all(f"{address}: no answer" in message for address in addresses)


def test_a_daemon_that_does_not_start_says_its_reason():
    error = _why_not_started(P2PDaemonError("Daemon failed to start in 60.0 seconds"), ())
    assert isinstance(error, SetupError) and "60.0 seconds" in error.message


def test_a_daemon_that_has_ended_is_said():
    refused = concurrent.futures.Future()
    refused.set_exception(ConnectionRefusedError(111, "Connection refused"))
    for ask in (
        lambda: bare_node(SimpleNamespace(get=lambda *_, **__: refused)).fetch("key"),
        lambda: bare_node(SimpleNamespace(run_coroutine=lambda *_, **__: refused)).addresses(),
    ):
        with pytest.raises(SwarmError, match="p2pd does not answer"):
            ask()
