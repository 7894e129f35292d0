"""Which addresses are taken, who can dial one, and where this peer may listen."""

import socket

import pytest

from trahiv_cli.errors import SetupError, Unreachable
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.addresses import (
    answering_of,
    reach_of,
    require_free_ports,
    require_peer_address,
    what_answers,
)

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.mark.parametrize("address", ["", "0.0.0.0:31337", "/ip4/203.0.113.7/tcp/99999", "/ip4/1.2.3.4/tcp/1"])
def test_an_address_that_names_a_peer_is_taken_and_no_other(address):
    for host in ("ip4/203.0.113.7", "ip6/2001:db8::1", "dns4/example.org"):
        for end in ("tcp/1", "udp/1/quic-v1", f"tcp/1/p2p/{PEER}/p2p-circuit"):
            require_peer_address(f"/{host}/{end}/p2p/{PEER}")
    with pytest.raises(Unreachable, match="is not the multiaddr of a peer: that ends with `/p2p/<peer id>`"):
        require_peer_address(address)


@pytest.mark.parametrize(
    ("reach", "hosts"),
    [
        ("this machine", ["ip4/127.0.0.1", "ip6/::1"]),
        ("local network", ["ip4/192.168.1.7", "ip4/169.254.1.1", "ip4/100.64.0.9", "ip6/fe80::1"]),
        ("internet", ["ip4/8.8.8.8", "ip6/2606:4700::1111", "dns4/example.org"]),
    ],
)
def test_an_address_says_who_can_dial_it(reach, hosts):
    assert {reach_of(f"/{host}/{end}") for host in hosts for end in ("tcp/1", "udp/1/quic-v1")} == {reach}


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_port_in_use_is_refused_although_it_could_be_shared_and_a_free_one_stays_free(protocol):
    kind, end = (socket.SOCK_STREAM, "") if protocol == "tcp" else (socket.SOCK_DGRAM, "/quic-v1")
    with socket.socket(socket.AF_INET, kind) as other:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # in the way libp2p uses it
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            other.listen(1)
        listens = [
            f"/ip4/{host}/{protocol}/{other.getsockname()[1]}{end}" for host in ("127.0.0.1", "0.0.0.0")
        ]
        for listen in listens:
            with pytest.raises(SetupError, match=r"port \d+ is already in use") as refused:
                require_free_ports(["/ip4/127.0.0.1/tcp/0", listen])
            assert listen in refused.value.message and "--host-maddr" in refused.value.hint
    for _ in range(2):
        require_free_ports(listens)
    require_free_ports([*DhtSection().host_maddrs, "/ip6/::/tcp/0", "/unix/tmp/a.sock"])
    with pytest.raises(SetupError, match="'x:80' is not a multiaddr to listen on"):
        require_free_ports(["x:80"])
    with pytest.raises(SetupError, match=r"Can't listen on /ip4/203\.0\.113\.7/tcp/31337: Cannot assign"):
        require_free_ports(["/ip4/203.0.113.7/tcp/31337"])


def test_a_peer_that_has_stopped_is_told_from_a_stranger_on_its_port():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{stranger.getsockname()[1]}/p2p/{PEER}"
        untold = f"/ip4/127.0.0.1/udp/1/quic-v1/p2p/{PEER}"
        assert answering_of([address, untold]) == [untold]
        assert "nothing listens on port" in what_answers(address)
        stranger.listen(2)
        assert answering_of([address, untold]) == [address, untold]
        assert "not this peer" in what_answers(address)
        assert what_answers(untold) == f"{untold}: no answer"
        assert "nowhere.invalid can't be reached" in what_answers(f"/dns4/nowhere.invalid/tcp/1/p2p/{PEER}")
