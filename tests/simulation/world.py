"""What stands in for a machine and a network, so that whole peers can live in memory.

The product's optimizer, tracker, leases, averagers and state exchange run as they are. What is fake lies at
the edges: p2pd (`network`), the DHT's nodes (`Board`), threads, processes and the clock (`strands`), the
disk's patience, and the arithmetic of RSA, by which each run would be another one.
"""

import asyncio
import base64
import contextvars
import hashlib
import itertools
import random
import secrets
import threading
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from unittest import mock

import base58
import torch
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from hivemind.compression import serialization
from hivemind.optim import progress_tracker
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import P2P
from hivemind.proto import runtime_pb2
from hivemind.utils import MPFuture
from hivemind.utils.crypto import RSAPublicKey

from tests.kit import faulty_peer
from tests.simulation import board as boards
from tests.simulation.network import Network, with_the_swarm_s_time
from tests.simulation.strands import Lock, Loop, PipeEnd, Strand, Strands
from trahiv_cli import clock
from trahiv_cli.assets import export
from trahiv_cli.net import streams
from trahiv_cli.net.borrowed import crypto
from trahiv_cli.progress import committed, leases
from trahiv_cli.progress.ledger import Spans
from trahiv_cli.swarm import service
from trahiv_cli.swarm.corrections.processes import keep_tasks

OWNER = contextvars.ContextVar("owner", default=None)
"""The peer whose code runs: its `tasks` and `strands` are noted."""

DHT_DELAY_S = 0.05
DELAY_S = 0.005
"""How long the DHT takes for an answer, and a message for its way."""

once = lru_cache(4096)
"""Computes once what all peers compute from the same values: enough for some rounds of a hundred peers."""

WIDTH = 6
HIDDEN = 4
"""Of the model: 58 values, in two parts for each pair."""


class Key:
    """Signs by a digest: as fast, and as much the same, as the run of a seed must be. Not a secret."""

    def __init__(self, name):
        number = int.from_bytes(random.Random(name).randbytes(256), "big") | 1 << 2047 | 1
        key = RSAPublicKey.__new__(RSAPublicKey)
        key._public_key = RSAPublicNumbers(65537, number).public_key()
        self._public = key

    def get_public_key(self):
        return self._public

    def sign(self, data):
        return base64.b64encode(hashlib.blake2b(data, key=_secret_of(self._public)).digest())


@once
def _secret_of(key):
    return hashlib.sha256(key.to_bytes()).digest()


def _verify(key, data, signature):
    return base64.b64encode(hashlib.blake2b(data, key=_secret_of(key)).digest()) == signature


class Board(boards.Board):
    """A DHT whose nodes are the peers: what is stored reaches those that the writer reaches."""

    def __init__(self, network):
        super().__init__()
        self._network = network
        self._seen = {}

    def put(self, writer, key, place, signed, until):
        for node in self._network.daemons.keys() | {writer}:
            if node == writer or not self._network.is_cut(writer, node):
                self._seen.setdefault(node, {}).setdefault(key, {})[place] = signed, until
        super().put(writer, key, place, signed, until)

    def find(self, reader, key):
        # A new node knows what its first neighbour knows.
        known = self._seen.setdefault(reader, {key: dict(records) for key, records in self.records.items()})
        now = clock.swarm_time()
        return {place: record for place, record in known.get(key, {}).items() if record[1] > now}


class Dht(boards.Dht):
    """One peer's DHT, which takes a moment to answer."""

    pid = None

    def __init__(self, world, name):
        super().__init__(world.board, Key(name))
        self._world = world
        self.tensors_lock = Lock(world.strands)
        # What a record is worth, and what it says, all find as the first peer does.
        world.verdict = self.validator._verdict = world.verdict or self.validator._verdict
        self._read = world.read = world.read or once(super()._read)
        self.is_dead = False
        self.services = {}
        self.loops = []

    def is_alive(self):
        return not self.is_dead

    def host(self, work):
        hosted, *_ = work.args
        self.services[hosted.WIRE_NAME] = hosted
        ours, theirs = PipeEnd.pair(self._world.strands)
        self._world.strands.spawn(partial(work, self, theirs))
        return ours

    async def replicate_p2p(self):
        self.loops.append(asyncio.get_running_loop())
        return self._world.network.p2p_of(self.peer_id)

    def store(self, *args, **kwargs):
        return self._later(partial(super().store, *args, **kwargs))

    def get(self, key, latest=False, return_future=False):
        look_up = partial(super().get, key, latest, True)
        return self._later(look_up) if return_future else look_up().result()

    def _later(self, act):
        future = MPFuture()

        def go():
            if not self.is_dead and not future.done():
                future.set_result(act().result())

        asyncio.get_running_loop().call_later(DHT_DELAY_S, go)
        return future


class World:
    """Everything that peers share. Make it in the loop, and use it within `in_place`."""

    def __init__(self, loop, seed, folder):
        self.loop = loop
        self.seed = seed
        self.folder = folder
        self.strands = Strands(loop)
        self.dice = random.Random(seed)
        self.network = Network()
        self.board = Board(self.network)
        self.verdict = None
        self.read = None
        self.peers = {}
        self.furthest = 0
        """The step of the longest history."""
        self.hear = lambda peer, said: None
        loop.execute = self._work
        loop.set_task_factory(_owned_task)
        _Task.numbers = itertools.count()
        loop.set_exception_handler(lambda loop, context: None)  # who dies leaves errors that nobody asks for
        self.strands.on_new = _note_owner

    def _work(self, work):
        # A thread of an executor's takes a moment, as to encode a part, in which others go on.
        self.loop.call_later(self.dice.uniform(0.0, 0.02), lambda: Strand(self.strands, work).begin())

    @contextmanager
    def in_place(self):
        """Have this world stand in for threads, processes, clocks and chance within the block."""
        MPFuture()  # its thread, which nobody needs here, is a real one
        strands = self.strands
        dice = self.dice
        lock = partial(Lock, strands)
        reentrant = partial(Lock, strands, is_reentrant=True)
        threads = SimpleNamespace(**vars(threading) | {"Lock": lock, "RLock": reentrant})
        patches = [
            (progress_tracker, "threading", threads),
            (committed, "threading", threads),
            (leases, "threading", threads),
            (service, "switch_to_uvloop", partial(Loop, strands)),
            # Processes set these for themselves; here one process is all of them.
            (serialization, "_BASE_COMPRESSION_TYPES", serialization._BASE_COMPRESSION_TYPES),
            (runtime_pb2, "CompressionType", runtime_pb2.CompressionType),
            (asyncio, "create_task", keep_tasks(asyncio.create_task)),
            (P2P, "receive_protobuf", staticmethod(streams.receive_protobuf)),
            (RSAPublicKey, "verify", _verify),
            (crypto.RSAPublicKey, "verify", _verify),
            # Without these, forty peers take twice as long.
            (base58, "b58encode", once(base58.b58encode)),
            (base58, "b58decode", once(base58.b58decode)),
            (
                LocalTrainingProgress,
                "parse_obj",
                classmethod(_once_for_each(LocalTrainingProgress.parse_obj.__func__)),
            ),
            (LocalTrainingProgress, "dict", _once_for_each(LocalTrainingProgress.dict)),
            (Spans, "from_wire", _once_for_each(Spans.from_wire)),
            (secrets, "token_bytes", lambda size=32: dice.randbytes(size)),
            (secrets, "SystemRandom", lambda: dice),
            (clock, "_began", 1.8e9),  # the swarm's time at the beginning
            (export, "sync", lambda path: None),
            (torch.Tensor, "share_memory_", lambda tensor: tensor),
            (torch.Tensor, "is_shared", lambda tensor: True),
            (torch.UntypedStorage, "_new_shared", classmethod(lambda cls, size, **_: cls(size))),
            (faulty_peer, "WIDTH", WIDTH),
            (faulty_peer, "HIDDEN", HIDDEN),
            (faulty_peer, "HELD_OUT", 1),
        ]
        patches += [(module, "get_dht_time", clock.swarm_time) for module in with_the_swarm_s_time()]
        random.seed(self.seed)  # by which hivemind names groups
        with strands.in_place_of_threads(), ExitStack() as stack:
            for owner, name, stands_in in patches:
                stack.enter_context(mock.patch.object(owner, name, stands_in))
            yield


def _note_owner(strand):
    if (owner := OWNER.get()) is not None:
        owner.strands = [one for one in owner.strands if not one.is_over] + [strand]


class _Task(asyncio.Task):
    """A task that sets order by its number: by its place in memory, each run would order them anew."""

    numbers = itertools.count()

    def __init__(self, *args, **kwargs):
        self._number = next(self.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self):
        return self._number


def _owned_task(loop, work, **options):
    task = _Task(work, loop=loop, **options)
    context = options.get("context")
    if (owner := context.get(OWNER) if context else OWNER.get()) is not None:
        owner.tasks[task] = None
        task.add_done_callback(owner.tasks.pop)
    return task


def _once_for_each(read):
    """Have a function called once for each object, whatever its value; the options are always the same."""
    known = {}

    def read_once(*said, **options):
        key = *map(id, said), *options
        if key not in known:
            if len(known) >= 4096:
                known.clear()
            known[key] = said, read(*said, **options)  # with what was said, so that no other has its id
        return known[key][1]

    return read_once
