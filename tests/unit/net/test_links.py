"""Connections that died silently are found and closed."""

from types import SimpleNamespace
from unittest.mock import AsyncMock

from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.net.links import close_dead, dead_places

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: {}:9581 {} {:02X} {:08X}:00000000 01:000004D2 {:08X}     0        0 1234 2 0 20 4 30 10 -1\n"


def line(remote, state, retransmissions, local="0100007F", waiting=676):
    """Format a connection as the kernel does."""
    return LINE.format(local, remote, state, waiting, retransmissions)


def test_kernel_tables_show_dead_connections(tmp_path):
    assert dead_places(tmp_path) == set()  # a system without such tables
    lines = (
        line("0202580A:813B", 1, 4),
        line("0302580A:813B", 1, 3),
        line("0402580A:813B", 4, 9),  # closed
        line("0502580A:813B", 1, 0, local="090201C0"),  # from an address that this machine has lost
        line("0602580A:813B", 1, 0, local="090201C0", waiting=0),
        line("0702580A:813B", 1, 0, local="0101007F"),  # loopback, of which the machine lists one
    )
    (tmp_path / "tcp").write_text(HEAD + "".join(lines))
    (tmp_path / "tcp6").write_text(HEAD + line("B80D0120000000000000000001000000:01BB", 1, 9))
    assert dead_places(tmp_path) == {("10.88.2.2", 33083), ("10.88.2.5", 33083), ("2001:db8::1", 443)}


async def test_peer_of_dead_connection_is_disconnected(monkeypatch):
    connections = [
        SimpleNamespace(peer_id=peer, addrs=[Multiaddr(f"/ip4/10.0.0.{host}/tcp/2")])
        for peer, host in (("dead", 1), ("dead", 2), ("alive", 3))
    ]
    monkeypatch.setattr("trahiv_cli.net.links.dead_places", lambda: {("10.0.0.2", 2)})
    p2p = AsyncMock()
    assert await close_dead(p2p, connections) == {"dead"}
    p2p._client.disconnect.assert_awaited_once_with("dead")
