"""Nodes of a swarm behind routers of homes, each in a process and a network of its own."""

import multiprocessing as mp
from functools import cached_property

from hivemind.utils import MPFuture

from tests.kit.nat import UDP
from tests.kit.wan import Wan, routers_of
from trahiv_cli import clock
from trahiv_cli.doctor.network import connections
from trahiv_cli.reach.reachability import ReachRules
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.known_peers import KnownPeers
from trahiv_cli.swarm.node import Node

KINDS = {
    "public": [],
    "all": [{"filters": "all"}],
    "address": [{"filters": "address"}],
    "port": [{}],
    "two": [{}, {}],
    "no UDP": [{"blocked": (UDP,)}],
    "symmetric": [{"maps": "symmetric"}],
}
"""The routers before a host, from inside to outside, by what it is called in a table."""

RATE_MBIT = 20.0
ANSWER_S = 60.0


def network(*kinds, **how):
    """Make hosts behind routers of these kinds; `how` is for `Wan`."""
    return Wan(len(kinds), RATE_MBIT, homes=routers_of([KINDS[kind] for kind in kinds]), **how)


class Home:
    """A node on a host of a network, which is asked by functions of it; it ends with the network at last.

    Args:
        peers: multiaddrs by which it enters a swarm; none: it starts one.
        relay_mbit: that it passes on for others; None: no limit.
        ahead_s: how far its clock is ahead.
    """

    def __init__(
        self,
        wan,
        host,
        folder,
        peers=(),
        relay_mbit=None,
        ahead_s=0.0,
    ):
        self._pipe, its = mp.Pipe()
        how = (folder / f"{host}.key", tuple(peers), ReachRules(relay_mbit=relay_mbit), ahead_s, its)
        self.process = wan.spawn(host, be_node, how)
        its.close()

    @cached_property
    def peer_id(self):
        """Its id; waits until it has started."""
        return str(self._heard())

    def ask(self, question):
        """Return what a module's function says of the node, once it has started."""
        _ = self.peer_id
        self._pipe.send(question)
        return self._heard()

    def leave(self):
        """Have the node end in good order."""
        self._pipe.send(None)

    def _heard(self):
        assert self._pipe.poll(ANSWER_S), "the node says nothing"
        return self._pipe.recv()


def be_node(key, peers, reach, ahead_s, pipe):
    """Be a node that answers questions until it is asked nothing."""
    MPFuture.reset_backend()  # its locks would be those of all nodes: one that is killed may hold them
    clock._ahead.value = ahead_s
    with Node(DhtSection(), key, peers, met=KnownPeers(None), reach=reach) as node:
        pipe.send(node.peer_id)
        while (question := pipe.recv()) is not None:
            pipe.send(question(node))


def ways_of(node):
    """Return with whom a node is connected, by ids, and how: punched, relayed or dialled."""
    return node.run(connections)


def addresses_of(node):
    """Return where a node can be dialled, as far as it knows."""
    return node.own_addresses()


def answering(node):
    """Return the peers, by ids, that are connected with a node and answer it."""
    return node.run(pinged)


async def pinged(dht, node):
    del dht
    peers = [one.peer_id for one in await node.protocol.p2p.list_peers()]
    return [peer.to_base58() for peer in peers if await node.protocol.call_ping(peer) is not None]


def reached(node):
    """Return how others reach a node."""
    return node.reach.kind
