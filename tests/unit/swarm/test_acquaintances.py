"""Whom a peer has met, written down: what is taken from others, what is kept, and what a torn file does."""

from __future__ import annotations

import json

import pytest
from hivemind.p2p import PeerID

from trahiv_cli.swarm.acquaintances import (
    FORGOTTEN_AFTER_S,
    LATELY_S,
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    MAX_PEERS,
    Acquaintances,
    is_address_of,
)

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
OTHER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


def address(peer=PEER, port=31337):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "peers.json"


def test_what_was_saved_is_read_again(path):
    met = Acquaintances(path)
    met.meet(PEER, [address(), address(port=1)])
    met.note_ports({"/ip4/0.0.0.0/tcp/0": 4001})
    met.save()
    again = Acquaintances(path)
    assert again.addresses == {PEER: (address(), address(port=1))}
    assert again.port("/ip4/0.0.0.0/tcp/0") == 4001
    assert again.port("/ip4/127.0.0.1/tcp/0") is None


def test_who_was_there_last_comes_first(path, clock):
    clock.now = 100.0
    met = Acquaintances(path, clock)
    for peer in (PEER, OTHER):
        clock.now += LATELY_S
        met.meet(peer, [address(peer)])
    assert list(met.addresses) == [OTHER, PEER]
    clock.now += LATELY_S
    met.meet(PEER, [address()])
    assert list(met.addresses) == [PEER, OTHER]


def test_who_was_not_there_for_a_month_is_forgotten(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    met.meet(PEER, [address()])
    clock.now += FORGOTTEN_AFTER_S + 1
    assert met.addresses == {}


@pytest.mark.parametrize(
    "record",
    [None, b"bytes", "text", 7, {}, [], [None], [7], [["list"]], ["not a multiaddr"], [address(OTHER)]]
    + [["/ip4/203.0.113.7/tcp/31337"], [f"/ip4/999.0.113.7/tcp/31337/p2p/{PEER}"]]
    + [[f"/dns4/{'a' * MAX_ADDRESS_CHARS}/tcp/1/p2p/{PEER}"]],
)
def test_what_is_no_list_of_addresses_is_left_out(path, record):
    met = Acquaintances(path)
    met.meet(PEER, record)
    met.save()
    assert met.addresses == {} and not path.exists()


def test_a_peer_can_fill_no_disk(path):
    met = Acquaintances(path)
    met.meet(PEER, [address(port=port) for port in range(1, 1000)])
    assert len(met.addresses[PEER]) == MAX_ADDRESSES


def test_names_that_somebody_makes_up_push_nobody_out_who_is_there(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    names = [str(PeerID(b"\x12\x20" + bytes(31) + bytes([n])).to_base58()) for n in range(4 * MAX_PEERS)]
    honest, made_up = set(names[:MAX_PEERS]), names[MAX_PEERS:]

    def meet(names):
        for name in names:
            met.meet(name, [address(name)])

    for _ in range(3):
        clock.now += LATELY_S / 2
        meet(honest)
        meet(made_up)
    assert met.addresses.keys() == honest
    clock.now += LATELY_S
    meet(made_up[:1])
    assert made_up[0] in met.addresses and len(met.addresses.keys() & honest) == MAX_PEERS - 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 2}', '{"version": 1}', '{"version": 1, "ports": [], "peers": {}}']
    + ['{"version": 1, "ports": {}, "peers": {"Qm": 7}}', '{"version": 1, "ports": {}, "peers": 7}', "\x00"],
)
def test_a_file_that_is_none_is_taken_for_an_empty_one(path, content):
    path.write_text(content)
    met = Acquaintances(path)
    assert met.addresses == {} and met.port("/ip4/0.0.0.0/tcp/0") is None
    met.meet(PEER, [address()])
    met.save()
    assert Acquaintances(path).addresses == {PEER: (address(),)}


@pytest.mark.parametrize("port", [0, -1, 65536, "4001", None, True, 1.5])
def test_a_port_that_is_none_is_not_listened_on(path, port):
    path.write_text(json.dumps({"version": 1, "ports": {"/ip4/0.0.0.0/tcp/0": port}, "peers": {}}))
    assert Acquaintances(path).port("/ip4/0.0.0.0/tcp/0") is None


def test_nothing_new_is_not_written(path):
    met = Acquaintances(path)
    met.meet(PEER, [address()])
    met.save()
    path.unlink()
    met.meet(PEER, [address()])
    met.save()
    assert not path.exists()


def test_a_folder_that_is_gone_is_an_error_of_the_system(tmp_path):
    met = Acquaintances(tmp_path / "gone" / "peers.json")
    met.meet(PEER, [address()])
    with pytest.raises(OSError, match="gone"):
        met.save()


def test_an_address_names_its_peer_last():
    assert is_address_of(PEER, address())
    assert is_address_of(PEER, f"/ip4/203.0.113.7/tcp/1/p2p/{OTHER}/p2p-circuit/p2p/{PEER}")
    assert not is_address_of(OTHER, address())


def test_those_who_were_there_together_were_there_lately(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    assert met.lately == frozenset()
    met.meet(PEER, [address()])
    clock.now += 2 * LATELY_S
    met.meet(OTHER, [address(OTHER)])
    assert met.lately == {OTHER}
    met.meet(PEER, [address()])
    clock.now += 7 * 86400
    assert met.lately == {PEER, OTHER}


def test_when_a_peer_was_seen_last_is_written_down_too(path, clock):
    clock.now = 1e9
    met = Acquaintances(path, clock)
    for peer in (PEER, OTHER):
        met.meet(peer, [address(peer)])
    for _ in range(30):
        clock.now += LATELY_S / 10
        met.meet(PEER, [address()])
        met.save()
    assert Acquaintances(path, clock).lately == {PEER}


def test_a_visit_writes_nothing_down(path):
    met = Acquaintances(path)
    met.meet(PEER, [address()])
    met.note_ports({"/ip4/0.0.0.0/tcp/0": 4001})
    met.save()
    before = path.read_bytes()
    visit = Acquaintances.remembered(path)
    assert visit.addresses == met.addresses
    visit.note_ports({})
    visit.meet(OTHER, [address(OTHER)])
    visit.save()
    assert path.read_bytes() == before
    assert Acquaintances.remembered(None).addresses == {}
