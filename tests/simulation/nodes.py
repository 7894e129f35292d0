"""Nodes of the DHT as the product has them, over a network in memory."""

import contextlib
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import hivemind.dht.node
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID

from tests.simulation.board import key_of
from tests.simulation.network import with_the_swarm_s_time
from trahiv_cli import clock
from trahiv_cli.members.records import OwnersOnly, Readable, own_subkey, owner_of
from trahiv_cli.swarm.corrections.nodes import (
    CorrectedNode,
    CorrectedProtocol,
    RememberingValidator,
    node_id_of,
)


class Member:
    """A node, and what it stores and reads."""

    def __init__(self, network, name, **options):
        self.network = network
        self.options = options
        self.key = key_of(name)
        self.place = own_subkey(self.key)
        self.id = PeerID.from_base58(str(owner_of(self.place)))
        self.p2p = network.p2p_of(self.id)
        self.node = None

    async def enter(self, *initial):
        """Enter a swarm through members, or start one."""
        validators = [RSASignatureValidator(self.key), OwnersOnly(), Readable()]
        self.node = await CorrectedNode.create(
            p2p=self.p2p,
            initial_peers=[f"/ip4/127.0.0.1/tcp/1/p2p/{one.id}" for one in initial],
            record_validator=RememberingValidator(validators),
            **{"node_id": node_id_of(self.id.to_bytes())} | self.options,
        )
        self.node.protocol.list_node(is_listed=not self.options.get("client_mode"))
        return self

    async def put(self, key, value, lives_s=20.0):
        """Store a record."""
        ends_at = clock.swarm_time() + lives_s
        return await self.node.store(key, value, ends_at, subkey=self.place)

    async def read(self, key):
        """Return the records under a key by their owners' ids."""
        found = await self.node.get(key)
        entries = found.value.items() if found else ()
        return {PeerID.from_base58(str(owner_of(place))): entry.value for place, entry in entries}


class Traffic:
    """Counts what each peer sends and receives, in calls and bytes: a `Network.tamper`."""

    def __init__(self):
        self.calls = Counter()
        self.sent = Counter()
        self.received = Counter()

    def __call__(self, message):
        self.calls[message.sender] += not message.is_answer
        self.sent[message.sender] += len(message.content)
        self.received[message.receiver] += len(message.content)
        return [message.content]


@contextlib.contextmanager
def virtual_time(loop):
    """Have nodes go by the loop's clock, and by the product's protocol, within the block."""
    began = clock.swarm_time()
    times = SimpleNamespace(clock_gettime=lambda _: loop.now)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(clock, "time", times))
        stack.enter_context(mock.patch.object(clock, "_began", began))
        stack.enter_context(mock.patch.object(hivemind.dht.node, "DHTProtocol", CorrectedProtocol))
        for module in with_the_swarm_s_time():
            stack.enter_context(mock.patch.object(module, "get_dht_time", clock.swarm_time))
        yield
