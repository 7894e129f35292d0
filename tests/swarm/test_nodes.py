"""Two nodes meet by an address of any transport, and read what the other stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.node import Node

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "listen", ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"], ids=["tcp", "quic"]
)
def test_a_node_reads_what_the_other_published(tmp_path: Path, listen: str) -> None:
    settings = DhtSection(host_maddrs=[listen], nat_port_map=False, auto_nat=False)
    with Node(settings, tmp_path / "first.key") as first:
        [address] = first.addresses()
        assert address.reach == "this machine"
        assert address.maddr.endswith(f"/p2p/{first.peer_id}")
        assert first.publish("key", "subkey", b"value", ttl_s=60)
        with Node(settings, tmp_path / "second.key", (address.maddr,)) as second:
            assert second.fetch("key") == {"subkey": b"value"}
            assert second.fetch("another") == {}


def test_a_node_keeps_its_id_when_it_comes_back(tmp_path: Path) -> None:
    settings = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)
    with Node(settings, tmp_path / "identity.key") as node:
        first = node.peer_id
    with Node(settings, tmp_path / "identity.key") as node:
        assert node.peer_id == first
