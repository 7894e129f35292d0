"""Home links on one machine: hosts in network namespaces, joined by a router that is a process of its own.

    with Wan(hosts=2, rate_mbit=20, delay_ms=25) as wan:
        peer = wan.spawn(0, function, ("arguments",))    # runs in the first host's namespace
        wan.set_rate(5)                                  # at any time
        print(wan.sent_bytes())

Each host has one network device, a TUN whose other end the router holds. A packet waits for the sender's
uplink, is under way for the delay, and waits for the receiver's downlink. Each line is a drop-tail
queue in front of a fixed rate, like that of a home router. IPv4 only; the MTU is 1500. Needs root.

Namespaces have no names: they end with the processes that use them. When the pipe to the benchmark closes,
even because that was killed, the router ends every process in its namespaces, and itself.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import math
import multiprocessing as mp
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

from tests.kit.nat import TCP, Nat

MTU = 1500
QUEUE_S = 0.1
MIN_QUEUE_BYTES = 64 * 1024
"""What a home router holds back before it drops packets; more on fast lines, at least this on slow ones."""

TICK_S = 0.001
"""Packets are moved at most so often, many at once: waking for each costs more than moving it."""

TUN_PACKETS = 4000
"""What a TUN holds while the router is not on a core: 0.4 s at 100 Mbit/s."""

CONTROLS = Path("/proc/sys/net/ipv4/tcp_congestion_control")

READS_AT_ONCE = 256
"""Packets taken from one host before the next has its turn."""

START_LIMIT_S = 20.0
END_LIMIT_S = 10.0
CLONE_NEWNET = 0x40000000  # linux/sched.h
SYN = 0x02  # of TCP's flags (RFC 9293)
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000  # linux/if_tun.h
IS_POSSIBLE = os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None
"""Whether this machine can simulate a network, as far as is known before it is tried."""

NEEDS = "a simulated network needs root, a TUN device, and iproute2"
PROCESSES = mp.get_context("forkserver")
"""Clean processes, whatever threads the benchmark has."""


def address_of(host):
    """Return a host's IPv4 address."""
    return f"10.77.0.{host + 1}"


def public_address_of(host):
    """Return the address of a host of a network with homes, or of its router: a public one."""
    return f"5.5.5.{host + 1}"


def home_address_of(host):
    """Return the address of a host in its home; all homes have the same network."""
    return f"192.168.1.{host + 20}"


def routers_of(hosts):
    """Make `homes` of what the routers before each host are like, from inside to outside."""
    return {
        host: [
            Nat(f"100.64.{host}.9" if router < len(kinds) - 1 else public_address_of(host), **how)
            for router, how in enumerate(kinds)
        ]
        for host, kinds in enumerate(hosts)
        if kinds
    }


class Line:
    """One direction of a host's link: a drop-tail queue, and behind it a line of a fixed rate.

    Times are seconds on any one clock, and must not go back.

    Args:
        rate_mbit: in 10^6 bits per second.
    """

    def __init__(self, rate_mbit):
        self._free_at = -math.inf
        self.set_rate(rate_mbit)

    def set_rate(self, rate_mbit):
        """Change the rate for all packets that come from now on."""
        self._s_per_byte = 8e-6 / rate_mbit
        self._limit_bytes = max(MIN_QUEUE_BYTES, int(QUEUE_S * rate_mbit * 1e6 / 8))

    def take(self, at, num_bytes):
        """Queue a packet, and say when its last byte is on the line; None: the queue is full, it is lost."""
        begins_at = max(at, self._free_at)
        if round((begins_at - at) / self._s_per_byte) + num_bytes > self._limit_bytes:
            return None
        self._free_at = begins_at + num_bytes * self._s_per_byte
        return self._free_at


class Router:
    """Moves packets between the TUNs of its hosts. Lives in a process of its own."""

    def __init__(
        self,
        hosts,
        rate_mbit,
        delay_ms,
        loss,
        congestion,
        homes,
    ):
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.namespaces = []
        self._tuns = []
        self._homes = homes
        try:
            for host in range(hosts):
                self._make_host(host, congestion)
        finally:
            _enter(self._home)
        self._up, self._down = ([Line(rate_mbit) for _ in range(hosts)] for _ in range(2))
        self._sent_bytes = 0
        self._delay_s = delay_ms / 1e3
        self._due = []
        """A heap: when which packet has left which host's uplink (False) or downlink (True), by number."""
        self._host_of = {socket.inet_aton(self._outside(host)): host for host in range(hosts)}
        self._cut = set()
        """Senders and receivers between which nothing gets through."""
        self._opened = None
        """TCP connections that were opened after the others were forgotten; None: all get through."""
        self._loss = loss
        self._random = random.Random(0)
        self._numbers = itertools.count()

    def _make_host(self, host, congestion):
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise PermissionError("can't make a network namespace: run this as root")
        self.namespaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"wan0", IFF_TUN | IFF_NO_PI))
        self._tuns.append(tun)
        address = home_address_of(host) if host in self._homes else self._outside(host)
        commands = (
            "link set lo up\n"
            f"addr add {address}/24 dev wan0\n"
            f"link set wan0 mtu {MTU} txqueuelen {TUN_PACKETS} up\n"
            "route add default dev wan0\n"
        )
        subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
        if congestion:
            CONTROLS.write_text(congestion)

    def _outside(self, host):
        """Return the address at which the others know a host."""
        if routers := self._homes.get(host):
            return routers[-1].public
        return public_address_of(host) if self._homes else address_of(host)

    def run(self, pipe):
        """Move packets, and do what comes through the pipe, until that is closed."""
        poller = select.epoll()
        host_of = {tun: host for host, tun in enumerate(self._tuns)}
        for file in (*self._tuns, pipe.fileno()):
            poller.register(file, select.EPOLLIN)
        next_at = math.inf
        while True:
            wait_s = -1 if next_at == math.inf else max(0.0, next_at - time.monotonic())
            ready = poller.poll(wait_s)
            now = time.monotonic()
            for file, _ in ready:
                if file in host_of:
                    self._read(host_of[file], now)
                elif not self._obey(pipe):
                    return
            next_at = self._move(now)
            if next_at < math.inf:
                time.sleep(TICK_S)

    def _read(self, host, now):
        take = self._up[host].take
        tun = self._tuns[host]
        host_of = self._host_of
        read = os.read
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS_AT_ONCE):
                packet = read(tun, MTU)
                for router in self._homes.get(host, ()):
                    packet = packet and packet[0] >> 4 == 4 and router.out(packet) or b""
                if packet[16:20] not in host_of:  # multicast, IPv6
                    continue
                if self._opened is not None and not self._is_known(packet, self._opened):
                    continue
                left_at = take(now, len(packet))
                if left_at is not None:
                    event = left_at + self._delay_s, next(self._numbers), False, host, packet
                    heapq.heappush(self._due, event)

    @staticmethod
    def _is_known(packet, opened):
        """Say whether a packet is of an opened connection, or opens one, or is not TCP."""
        if packet[9] != TCP:
            return True
        start = 4 * (packet[0] & 15)
        ports = packet[start : start + 2], packet[start + 2 : start + 4]
        connection = frozenset((packet[12:16] + ports[0], packet[16:20] + ports[1]))
        if packet[start + 13] & SYN:
            opened.add(connection)
        return connection in opened

    def _move(self, now):
        """Bring every packet as far as it has come by `now`; return when to look again."""
        due = self._due
        while due and due[0][0] <= now:
            at, _, has_left, host, packet = heapq.heappop(due)
            if has_left:
                os.write(self._tuns[host], packet)
                continue
            self._sent_bytes += len(packet)
            to = self._host_of[packet[16:20]]
            for router in reversed(self._homes.get(to, ())):
                packet = packet and router.let_in(packet) or b""
            if not packet:
                continue
            if (host, to) in self._cut or (self._loss and self._random.random() < self._loss):
                continue
            left_at = self._down[to].take(at, len(packet))
            if left_at is not None:
                heapq.heappush(due, (left_at, next(self._numbers), True, to, packet))
        return due[0][0] if due else math.inf

    def _obey(self, pipe):
        """Do one thing that the benchmark asks; say whether it is still there."""
        try:
            what, *arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return False
        pipe.send(getattr(self, what)(*arguments))
        return True

    def set_rate(self, rate_mbit):
        for line in (*self._up, *self._down):
            line.set_rate(rate_mbit)

    def set_cut(self, one, other, is_cut):
        (self._cut.update if is_cut else self._cut.difference_update)({(one, other), (other, one)})

    def forward(self, host, port):
        to = home_address_of(host)
        for router in self._homes[host]:
            router.forward(TCP, port, (socket.inet_aton(to), port))
            to = router.public

    def forget_connections(self):
        self._opened = set()

    def sent_bytes(self):
        return self._sent_bytes

    def end_processes(self):
        """End all that runs in the namespaces.

        First all but torch's, which frees shared memory when its last user has gone, and then leaves.
        """
        deadline = time.monotonic() + END_LIMIT_S / 2
        while found := _processes_in({os.fstat(namespace).st_ino for namespace in self.namespaces}):
            for pid, name in found.items():
                if not name.startswith("torch_shm") or time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _enter(namespace):
    """Move the calling thread, and what it starts, to a network namespace, given as an open file."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "can't enter a network namespace")


def _run_inside(namespace, function, arguments):
    file = os.open(namespace, os.O_RDONLY)
    _enter(file)
    os.close(file)
    function(*arguments)


def _processes_in(namespaces):
    """Find the processes of network namespaces, given by inode: ids and names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (folder / "ns/net").stat().st_ino in namespaces:
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def route(pipe, *arguments):
    """Be the router, in a process of its own: made of `arguments`, and told through a pipe what to do."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the pipe says when it is over, after the benchmark
        signal.signal(number, signal.SIG_IGN)
    try:
        router = Router(*arguments)
    except (OSError, subprocess.CalledProcessError) as error:
        pipe.send(f"{error}")
        return
    pipe.send(list(router.namespaces))
    try:
        router.run(pipe)
    finally:
        router.end_processes()


class Wan:
    """Hosts with home links, for as long as the `with` block lasts. They are numbered from 0.

    Args:
        hosts: at most 250.
        rate_mbit: of each host's uplink and of its downlink, in 10^6 bits per second.
        delay_ms: one way, for each pair; a round trip takes twice that.
        loss: share of packets that get lost at random.
        homes: the routers before a host that is at home, by its number, from inside to outside.
        congestion: TCP's congestion control in the namespaces, one of
            /proc/sys/net/ipv4/tcp_allowed_congestion_control; default the machine's own. Most homes have
            `cubic`, which takes each lost packet for a full queue; `bbr` does not.

    Raises:
        SystemExit: not root, no TUN device, or no `ip` command; nothing is left.
    """

    def __init__(
        self,
        hosts,
        rate_mbit,
        delay_ms=25.0,
        loss=0.0,
        congestion="",
        homes=None,
    ):
        if os.geteuid() != 0:
            raise SystemExit("can't make network namespaces: run this as root")
        self._pipe, its = mp.Pipe()
        arguments = (its, hosts, rate_mbit, delay_ms, loss, congestion, homes or {})
        self._process = PROCESSES.Process(target=route, args=arguments)
        self._process.start()
        its.close()
        answer = self._pipe.recv() if self._pipe.poll(START_LIMIT_S) else "the router did not start"
        if isinstance(answer, str):
            self.close()
            raise SystemExit(f"can't make the simulated network: {answer}")
        self._namespaces = answer

    def namespace(self, host):
        """Return the path of a host's namespace: `nsenter --net=PATH COMMAND` runs a command there."""
        return f"/proc/{self._process.pid}/fd/{self._namespaces[host]}"

    def spawn(self, host, function, arguments=()):
        """Start a process on a host that calls a module's function; return the `multiprocessing.Process`."""
        process = PROCESSES.Process(target=_run_inside, args=(self.namespace(host), function, arguments))
        process.start()
        return process

    def set_rate(self, rate_mbit):
        """Change the rate of all lines from now on; what waits in their queues leaves at the old one."""
        self._ask("set_rate", rate_mbit)

    def set_cut(self, one, other, is_cut):
        """Let nothing through between a pair, without a word to either; or let it through again."""
        self._ask("set_cut", one, other, is_cut)

    def forward(self, host, port):
        """Have the routers of a home let everybody in at a TCP port, as their owner would."""
        self._ask("forward", host, port)

    def forget_connections(self):
        """Drop all packets of the present TCP connections, without a word; new ones get through."""
        self._ask("forget_connections")

    def sent_bytes(self):
        """Return what all uplinks have carried, IP headers included, also what was lost behind them."""
        return int(self._ask("sent_bytes"))

    def close(self):
        """End all processes in the namespaces, and the router. Safe to call twice."""
        self._pipe.close()
        self._process.join(2 * END_LIMIT_S)
        self._process.kill()  # nothing, if it has ended by itself, as it must
        self._process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _ask(self, *question):
        self._pipe.send(question)
        return self._pipe.recv()
