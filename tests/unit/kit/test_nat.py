"""How a home router translates packets: else tests of peers behind one would prove nothing."""

import itertools
import socket
import struct

import pytest

from tests.kit.nat import CHECKSUM_AT, TCP, UDP, Nat, ends_of

ICMP, PUBLIC = 1, "5.5.5.1"
HOST, OTHER = ("192.168.1.20", 4001), ("192.168.1.21", 4001)
SITE, PORT_NEXT_DOOR, STRANGER = ("5.5.5.7", 443), ("5.5.5.7", 444), ("5.5.5.8", 443)


def summed(content):
    """The checksum of RFC 1071, word by word: 0 for data with a correct checksum in it."""
    total = sum(struct.unpack(f">{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def covered(packet):
    """The data under a TCP or UDP checksum: a pseudo header, and all behind the IPv4 header."""
    body = packet[(packet[0] & 15) * 4 :]
    return packet[12:20] + struct.pack(">HH", packet[9], len(body)) + body + b"\0" * (len(body) % 2)


def packet(source, target, protocol=TCP, options=b"", payload=b"payload"):
    """An IPv4 packet with correct checksums."""
    body = struct.pack(">HH", source[1], target[1]) + bytes(16 if protocol == TCP else 4) + payload
    num_bytes = 20 + len(options) + len(body)
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    head = struct.pack(">BBHIBBH", 0x45 + len(options) // 4, 0, num_bytes, 0, 64, protocol, 0)
    made = bytearray(head + addresses + options + body)
    struct.pack_into(">H", made, 10, summed(made[: -len(body)]))
    if protocol in CHECKSUM_AT:
        struct.pack_into(">H", made, 20 + len(options) + CHECKSUM_AT[protocol], summed(covered(made)))
    return bytes(made)


def ends(packet):
    """Where a packet comes from and goes to; None: it was dropped."""
    return packet and [(socket.inet_ntoa(address), port) for address, port in ends_of(packet)[1:]]


def sent(nat, source=HOST, target=SITE, protocol=TCP):
    """The source with which a packet leaves the home."""
    outside, there = ends(nat.out(packet(source, target, protocol))) or (None, target)
    assert there == target
    return outside


def got(nat, source, port=4001, protocol=TCP):
    """Which host gets a packet from outside."""
    found = ends(nat.let_in(packet(source, (PUBLIC, port), protocol)))
    return found and found[1]


def test_cone_router_keeps_port_per_host():
    nat = Nat(PUBLIC)
    assert [sent(nat, target=target) for target in (SITE, STRANGER, SITE)] == [(PUBLIC, 4001)] * 3
    assert sent(nat, OTHER) == (PUBLIC, 4002), "the first host has it already"
    assert sent(nat, OTHER, protocol=UDP) == (PUBLIC, 4001), "the other protocol's ports are others"
    assert got(nat, SITE) == HOST
    assert got(nat, SITE, 4002) == OTHER
    assert got(nat, SITE, 4001, UDP) == OTHER


@pytest.mark.parametrize(
    ("filters", "let_in"),
    [("all", [SITE, PORT_NEXT_DOOR, STRANGER]), ("address", [SITE, PORT_NEXT_DOOR]), ("port", [SITE])],
)
def test_filter_admits_contacted_hosts(filters, let_in):
    nat = Nat(PUBLIC, filters=filters)

    def admitted(*place):
        return [one for one in (SITE, PORT_NEXT_DOOR, STRANGER) if got(nat, one, *place) == HOST]

    assert admitted() == []
    sent(nat)
    assert admitted() == let_in
    assert admitted(4002) == admitted(4001, UDP) == []
    nat.restart()
    assert admitted() == []


def test_forwarded_port_admits_strangers_after_restart():
    nat = Nat(PUBLIC)
    nat.forward(TCP, 4001, (socket.inet_aton(HOST[0]), 31337))
    for _ in range(2):
        assert got(nat, STRANGER) == (HOST[0], 31337)
        assert got(nat, STRANGER, 4001, UDP) is None
        nat.restart()


@pytest.mark.parametrize(
    ("how", "let_out"),
    [
        ({}, [(TCP, 443), (TCP, 444), (UDP, 443), (UDP, 444)]),
        ({"blocked": (TCP,), "only": (80, 444)}, [(UDP, 444)]),
    ],
)
def test_blocked_packets_stay_inside(how, let_out):
    nat = Nat(PUBLIC, **how)
    tried = itertools.product((TCP, UDP, ICMP), (443, 444))
    assert [one for one in tried if sent(nat, target=(SITE[0], one[1]), protocol=one[0])] == let_out


@pytest.mark.parametrize("protocol", [TCP, UDP])
@pytest.mark.parametrize("options", [b"", b"\x94\x04\0\0"])
@pytest.mark.parametrize("payload", [b"odd", b"even", b"\xff" * 1400])
def test_translated_packets_keep_valid_checksums(protocol, options, payload):
    outside = "255.254.253.252"
    nat = Nat(outside)
    nat.forward(protocol, 1, (socket.inet_aton("1.2.3.4"), 0xFFFE))
    before = packet(HOST, SITE, protocol, options, payload)
    there = nat.out(before)
    back = nat.let_in(packet(STRANGER, (outside, 1), protocol, options, payload))
    for one in (before, there, back):
        assert summed(one[: 20 + len(options)]) == summed(covered(one)) == 0
        assert len(one) == len(before)
        assert one[20 : 20 + len(options)] == options
        assert one.endswith(payload)
    assert ends(there)[0] == (outside, 4001)
    assert ends(back)[1] == ("1.2.3.4", 0xFFFE)


def test_datagram_without_checksum_keeps_none():
    bare = bytearray(packet(HOST, SITE, UDP))
    bare[26:28] = b"\0\0"
    there = Nat(PUBLIC).out(bytes(bare))
    assert there[26:28] == b"\0\0"
    assert summed(there[:20]) == 0
