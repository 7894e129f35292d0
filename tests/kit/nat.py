"""Routers of homes: what they make of IPv4 packets with TCP and UDP on their way out and in (RFC 4787)."""

import itertools
import socket
import struct
from dataclasses import dataclass, field
from typing import Literal

TCP = 6
UDP = 17
CHECKSUM_AT = {TCP: 16, UDP: 6}  # in the header of each
SYMMETRIC_PORT = 20_000  # the first that a symmetric router takes

Endpoint = tuple[bytes, int]  # an IPv4 address, 4 bytes, and a port


@dataclass
class Nat:
    """One router. It keeps the port of its first host, and takes another one where that is taken.

    Args:
        public: its address outside.
        maps: `cone`: a port outside for each one inside. `symmetric`: another one for each destination.
        filters: lets in whoever was sent to from there: `all`, once anybody was; only that `address`; or only
            that address and `port`.
        blocked: protocols that it lets out nothing of.
        only: the ports that it lets out to; empty: all.
    """

    public: str
    maps: Literal["cone", "symmetric"] = "cone"
    filters: Literal["all", "address", "port"] = "port"
    blocked: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    _forwarded: dict[tuple[int, int], Endpoint] = field(default_factory=dict)
    _outside: dict[tuple[int, Endpoint, Endpoint | None], int] = field(default_factory=dict)
    _inside: dict[tuple[int, int], Endpoint] = field(default_factory=dict)
    _sent_to: dict[tuple[int, int], set[Endpoint]] = field(default_factory=dict)

    def forward(self, protocol, port, to):
        """Let everybody in at a port, as its owner, or UPnP, has it do."""
        self._forwarded[protocol, port] = to

    def restart(self):
        """Forget who was let in; what is forwarded stays."""
        for one in (self._outside, self._inside, self._sent_to):
            one.clear()

    def out(self, packet):
        """Translate a packet that leaves the home; None: it is dropped."""
        protocol, source, target = ends_of(packet)
        if protocol not in CHECKSUM_AT or protocol in self.blocked:
            return None
        if self.only and target[1] not in self.only:
            return None
        key = protocol, source, target if self.maps == "symmetric" else None
        if (port := self._outside.get(key)) is None:
            wanted = source[1] if self.maps == "cone" else SYMMETRIC_PORT
            port = next(one for one in itertools.count(wanted) if (protocol, one) not in self._inside)
            self._outside[key], self._inside[protocol, port] = port, source
        self._sent_to.setdefault((protocol, port), set()).add(target)
        return rewritten(packet, source=(socket.inet_aton(self.public), port))

    def let_in(self, packet):
        """Translate a packet that comes from outside; None: it is dropped."""
        protocol, source, (_, port) = ends_of(packet)
        if inside := self._forwarded.get((protocol, port)):
            return rewritten(packet, target=inside)
        sent_to = self._sent_to.get((protocol, port), set())
        is_known = {
            "all": bool(sent_to),
            "address": source[0] in {address for address, _ in sent_to},
            "port": source in sent_to,
        }[self.filters]
        return rewritten(packet, target=self._inside[protocol, port]) if is_known else None


def ends_of(packet):
    """Read an IPv4 packet's protocol, source and target; of other protocols the ports mean nothing."""
    head = (packet[0] & 15) * 4
    source_port, target_port = struct.unpack_from(">HH", packet, head)
    return packet[9], (packet[12:16], source_port), (packet[16:20], target_port)


def rewritten(packet, *, source=None, target=None):
    """Give a packet of TCP or UDP another source or target, with checksums that fit."""
    head = (packet[0] & 15) * 4
    old_source, old_target = ends_of(packet)[1:]
    new_source = source or old_source
    new_target = target or old_target
    ends = struct.pack(">HH", new_source[1], new_target[1])
    new = bytearray(packet)
    new[12:20] = addresses = new_source[0] + new_target[0]
    new[head : head + 4] = ends
    _adjust(new, 10, packet[12:20], addresses)
    at = head + CHECKSUM_AT[packet[9]]
    if packet[9] == TCP or packet[at : at + 2] != b"\0\0":  # a datagram may have none
        _adjust(new, at, packet[12:20] + packet[head : head + 4], addresses + ends)
    return bytes(new)


def _adjust(packet, at, old, new):
    """Update a checksum for words that have changed (RFC 1624, equation 3)."""
    [checksum] = struct.unpack_from(">H", packet, at)
    total = ~checksum & 0xFFFF
    for [before], [after] in zip(struct.iter_unpack(">H", old), struct.iter_unpack(">H", new), strict=True):
        total += (~before & 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into(">H", packet, at, ~total & 0xFFFF)
