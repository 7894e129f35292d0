"""How many bytes a peer has sent and received, as the kernel counts them at the sockets of its daemon.

Counted is what passes through the TCP sockets of `p2pd`, whichever process of the peer it is for, and on
loopback, too: encryption, multiplexing, the DHT's records, and what is sent twice because it was lost. Not
counted are the headers of TCP and IP: 40 to 60 bytes a packet, 3 to 4 % on the internet.

The counters are those that `ss -tin` shows: the kernel tells them to everybody, in every network namespace,
and the last ones of a socket when it goes (NETLINK_SOCK_DIAG, Linux 4.19). Ways that were not taken: pyroute2
asks the same, but takes 6 to 14 ms instead of 1, and half a second to import; p2pd's own metrics
(`-metricsAddr`) count the bytes of relayed connections alone; a duplicate of a socket (`pidfd_getfd`) would
keep open what p2pd has closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import hivemind
import psutil

DAEMON = "p2pd"

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h
NETLINK_SOCK_DIAG = 4
SOL_NETLINK = 270
NETLINK_ADD_MEMBERSHIP = 1
SKNLGRP_INET_TCP_DESTROY, SKNLGRP_INET6_TCP_DESTROY = 1, 3
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST, NLM_F_DUMP = 1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
INET_DIAG_INFO = 2
TCP_ESTABLISHED, TCP_LISTEN = 1, 10
ALL_STATES = 2**32 - 1

_HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence number, port id."""

_REQUEST = struct.Struct("=BBBxI48s")
"""inet_diag_req_v2: family, protocol, extensions, states, inet_diag_sockid."""

_SOCKET = struct.Struct("=BB2x48s16xI")
"""inet_diag_msg: family, state, inet_diag_sockid, inode."""

_ADDRESS = struct.Struct("=2s38xQ")
"""inet_diag_sockid: local port (big-endian), cookie."""

_ATTRIBUTE = struct.Struct("=HH")
"""nlattr: length, type."""

_TCP_INFO = struct.Struct("=128xQ64xQ")
"""tcp_info: bytes received (in order, the end of a connection counts as one), bytes sent (again, too)."""

_BACKLOG_BYTES = 2**20
"""For messages about sockets that went. Many kernels grant 208 KiB (net.core.rmem_max), some 300 messages."""

REMEMBERED = 4096
"""Sockets whose counts are remembered: more than a process has open at once and soon after."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of TCP payload."""

    sent: int
    received: int


class _Socket(NamedTuple):
    family: int
    address: bytes
    """inet_diag_sockid, by which the kernel finds it again."""

    port: int
    cookie: int
    """The kernel's own number of the socket, never used again and still there when the inode has gone."""

    inode: int
    """0 if no process has the socket open."""

    state: int
    attributes: bytes


class SocketTraffic:
    """Counts the bytes of a process's TCP sockets from now on.

    Each `read` is a look at the process's sockets. One that the other side closes between two looks is
    counted to its end, and so is one that opens and closes between them, if its local port is one on which
    the process listens, as with all that come in and those that libp2p dials. Nothing counts twice. What is
    lost: the bytes since the last look of a socket that libp2p closes itself, by a reset, which clears the
    counters, or that closes after some 300 others of its network namespace have closed; and sockets that
    open and close between two looks of a process that does not listen (client mode).

    A look takes 0.1 ms and 30 us for each connection of the process; one that finds a new connection takes
    2 to 20 ms, as the kernel then goes through all of the machine's.

    Not for two threads at once.

    Args:
        pid: of a process of this user, in this network namespace. None: nothing is known.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._counted: dict[int, Traffic] = {}
        """The last counts of each socket, by cookie, the latest seen last. `REMEMBERED` are kept of those
        that are not open: the message of an end may come after a look that no longer finds it."""
        self._sent = self._received = 0
        self._open: dict[int, _Socket] = {}
        """The process's TCP sockets at the last look, by inode."""
        self._protocols: dict[int, str] = {}
        """Of all of the process's sockets at the last look, by inode."""
        self._connected: Set[int] = frozenset()
        """Inodes of its UDP sockets that talk to one address alone, as to a router that forwards a port."""
        self._ports: frozenset[int] = frozenset()
        self._closed: socket.socket | None = None
        if pid is not None:
            try:
                os.stat(f"/proc/{pid}")
                self._closed = _listen_for_closed()
                self._look()
            except OSError:
                self.close()
        self._before = Traffic(self._sent, self._received)

    @classmethod
    def of(cls, dht: hivemind.DHT) -> SocketTraffic:
        """Count the bytes of a running DHT's daemon, through which all of a peer's averagers talk, too."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(dht.pid).children():
                if child.name() == DAEMON:
                    return cls(child.pid)
        return cls(None)

    def read(self) -> Traffic | None:
        """Say what was sent and received since construction, or to its end if the process has ended.

        Returns:
            None if it is not known: the kernel has no such counters (macOS, some sandboxes), the daemon was
            not found, or the process has an unconnected UDP socket that it had at the last look, too. Those
            are QUIC's, whose bytes would be missing, and in a daemon's first five seconds those that look for
            a router; what asks the router for a port later is connected.
        """
        if self._closed is None:
            return None
        before = self._protocols
        try:
            self._look()
            if self._may_use_quic(before.keys() & self._protocols.keys()):
                return None
        except OSError:
            return None
        return Traffic(self._sent - self._before.sent, self._received - self._before.received)

    def close(self) -> None:
        """Stop counting. Safe to call twice."""
        if self._closed is not None:
            self._closed.close()
            self._closed = None

    def _look(self) -> None:
        """Bring the counts up to date.

        Raises:
            OSError: the kernel does not tell; the counts may be up to date in part.
        """
        assert self._pid is not None and self._closed is not None
        self._protocols = _protocols(self._pid, self._protocols)
        tcp = {inode for inode, name in self._protocols.items() if name.startswith("TCP")}
        if tcp <= self._open.keys():
            found = _find([one for one in self._open.values() if one.state != TCP_LISTEN])
        else:
            # The kernel goes through tables of megabytes for that: only if there is a new socket.
            found = [
                one for family in FAMILIES for one in _sockets(family, socket.IPPROTO_TCP) if one.inode in tcp
            ]
            self._open.update((one.inode, one) for one in found)
        self._open = {inode: one for inode, one in self._open.items() if inode in tcp}
        for one in found:
            self._count(one)
        if self._open:
            self._ports = frozenset(one.port for one in self._open.values() if one.state == TCP_LISTEN)
        # After the look: the counts of a socket that has gone are final.
        for one in _received_by(self._closed):
            if one.port in self._ports or one.cookie in self._counted:
                self._count(one)
        if (excess := len(self._counted) - REMEMBERED) > 0:
            # A list of sockets that change meanwhile may lack one that is open: its counts are kept.
            lasting = {one.cookie for one in self._open.values()}
            for cookie in list(self._counted)[:excess]:
                if cookie not in lasting:
                    del self._counted[cookie]

    def _may_use_quic(self, lasting: Set[int]) -> bool:
        """Say whether one of these sockets of the process, by inode, is one of UDP that talks to anybody.

        Raises:
            OSError: the kernel does not tell.
        """
        udp = {inode for inode in lasting if self._protocols[inode].startswith("UDP")}
        if not udp <= self._connected:
            listed = [one for family in FAMILIES for one in _sockets(family, socket.IPPROTO_UDP)]
            self._connected = udp & {one.inode for one in listed if one.state == TCP_ESTABLISHED}
        return not udp <= self._connected

    def _count(self, one: _Socket) -> None:
        now, last = _traffic(one.attributes), self._counted.pop(one.cookie, Traffic(0, 0))
        if now is None or now.sent < last.sent or now.received < last.received:  # cleared by a reset
            now = last
        self._sent += now.sent - last.sent
        self._received += now.received - last.received
        self._counted[one.cookie] = now


FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _protocols(pid: int, known: Mapping[int, str]) -> dict[int, str]:
    """Find the protocols of a process's sockets (`TCP`, `UDPv6`, `UNIX`), by inode; none if it has ended.

    Args:
        pid: of the process.
        known: what was found before and need not be asked again.

    Raises:
        OSError: the process belongs to somebody else, or the kernel does not tell.
    """
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inode = int(target[8:-1])
                    found[inode] = known.get(inode) or _protocol(f"/proc/{pid}/fd/{name}")
    return found


def _protocol(path: str) -> str:
    return os.getxattr(path, "system.sockprotoname").rstrip(b"\0").decode()


def _listen_for_closed() -> socket.socket:
    """Have the kernel tell of each TCP socket of this network namespace that goes.

    Raises:
        OSError: it can't.
    """
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, "Only Linux tells how many bytes have passed a socket.")
    listener = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
    try:
        listener.bind((0, 0))
        for group in (SKNLGRP_INET_TCP_DESTROY, SKNLGRP_INET6_TCP_DESTROY):
            listener.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BACKLOG_BYTES)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _received_by(listener: socket.socket) -> Iterator[_Socket]:
    while True:
        try:
            datagram = listener.recv(2**16)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:  # more than the backlog holds: the rest is still there
                raise
            continue
        for _, body in _messages(datagram):
            yield _socket(body)


def _sockets(family: int, protocol: int) -> Iterator[_Socket]:
    """List the sockets of this network namespace.

    Raises:
        OSError: the kernel does not tell.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_request(family, protocol, NLM_F_DUMP))
        while True:
            for kind, body in _messages(kernel.recv(2**16)):
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    [number] = struct.unpack_from("=i", body)
                    raise OSError(-number, os.strerror(-number))
                yield _socket(body)


def _find(known: Sequence[_Socket]) -> list[_Socket]:
    """Look TCP sockets up that were listed before, without those that have gone.

    Raises:
        OSError: the kernel does not tell.
    """
    found = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        for one in known:
            kernel.send(_request(one.family, socket.IPPROTO_TCP, 0, one.address))
            found += [_socket(body) for kind, body in _messages(kernel.recv(2**16)) if kind != NLMSG_ERROR]
    return found


def _request(family: int, protocol: int, flags: int, address: bytes = bytes(48)) -> bytes:
    request = _REQUEST.pack(family, protocol, 1 << (INET_DIAG_INFO - 1), ALL_STATES, address)
    length = _HEADER.size + len(request)
    return _HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | flags, 1, 0) + request


def _messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """Split a datagram of netlink into the types and bodies of its messages."""
    start = 0
    while start < len(datagram):
        length, kind, *_ = _HEADER.unpack_from(datagram, start)
        yield kind, datagram[start + _HEADER.size : start + length]
        start += _padded(length)


def _socket(body: bytes) -> _Socket:
    family, state, address, inode = _SOCKET.unpack_from(body)
    port, cookie = _ADDRESS.unpack(address)
    return _Socket(family, address, int.from_bytes(port, "big"), cookie, inode, state, body[_SOCKET.size :])


def _traffic(attributes: bytes) -> Traffic | None:
    """Read the tcp_info, which sockets that only wait for their end lack.

    Raises:
        OSError: the kernel is older than Linux 4.19 and counts less.
    """
    start = 0
    while start < len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, start)
        if kind == INET_DIAG_INFO:
            if length < _ATTRIBUTE.size + _TCP_INFO.size:
                raise OSError(errno.EOPNOTSUPP, "The kernel does not count the bytes that a socket sends.")
            received, sent = _TCP_INFO.unpack_from(attributes, start + _ATTRIBUTE.size)
            return Traffic(sent, received)
        start += _padded(length)
    return None


def _padded(length: int) -> int:
    """Round up to a multiple of 4, at which the next begins."""
    return -(-length // 4) * 4
