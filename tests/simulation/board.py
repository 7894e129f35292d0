"""A DHT in memory: what is stored is there at once, for all. Who signs and refuses is the product's."""

import asyncio
import concurrent.futures
from functools import lru_cache
from types import SimpleNamespace

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr

from trahiv_cli.clock import swarm_time
from trahiv_cli.members.membership import KEY_BYTES, Owner
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.members.records import OwnersOnly, Readable, own_subkey, owner_of
from trahiv_cli.net.addresses import Listening
from trahiv_cli.reach.reachability import Reach
from trahiv_cli.swarm.corrections.nodes import CorrectedProtocol, RememberingValidator
from trahiv_cli.swarm.node import Node

OWNER = Owner(bytes(KEY_BYTES))
INVITED = OWNER.invite()


@lru_cache
def key_of(name):
    return RSAPrivateKey()  # as long as a place's must be


def id_of(name):
    return str(owner_of(own_subkey(key_of(name))))


def done(value):
    future = concurrent.futures.Future()
    future.set_result(value)
    return future


class Board:
    """What is stored: signed values, and when they are over, by key and place."""

    def __init__(self):
        self.records = {}
        self.nodes = []

    def put(self, writer, key, place, signed, until):
        self.records.setdefault(key, {})[place] = signed, until

    def find(self, reader, key):
        return self.records.get(key, {})


class Dht:
    """The `hivemind.DHT` of the peer that has a key."""

    client_mode = False

    def __init__(self, board, key):
        self.board = board
        self.peer_id = PeerID.from_base58(str(owner_of(own_subkey(key))))
        self.place = own_subkey(key, INVITED.certify(self.peer_id.to_bytes()))
        self.signing_key = key
        self.told = {}  # what this peer last stored, by key
        validators = [RSASignatureValidator(key), OwnersOnly(OWNER.public), Readable()]
        self.validator = RememberingValidator(validators)
        self.protocol = CorrectedProtocol(_initialized_with_create=True)
        self.protocol.record_validator = self.validator
        board.nodes.append(self.peer_id)

    def add_validators(self, validators):
        self.validator.extend(validators)

    def is_alive(self):
        return True

    def store(self, key, value, expiration_time, subkey, return_future):
        self.told[key] = value
        self.put(key, MSGPackSerializer.dumps(value), expiration_time, subkey)
        return done(True)

    def put(self, key, packed, expiration_time=0.0, place=b""):
        """Store bytes, whatever they are, as one whose own node refuses nothing."""
        place = place or self.place
        until = expiration_time or swarm_time() + 60
        signed = self.validator.sign_value(_record(key, place, packed, until))
        self.board.put(self.peer_id, key, place, signed, until)

    def get(self, key, latest=False, return_future=False):
        answer = DictionaryDHTValue()
        for place, (signed, until) in self.board.find(self.peer_id, key).items():
            answer.store(place, signed, until)
        self.protocol._validate_dictionary(DHTID.generate(source=key).to_bytes(), answer)
        values = {
            place: ValueWithExpiration(self._read(key, place, signed, until), until)
            for place, (signed, until) in answer.items()
        }
        found = ValueWithExpiration(values, swarm_time() + 60) if values else None
        return done(found) if return_future else found

    def _read(self, key, place, signed, until):
        return MSGPackSerializer.loads(self.validator.strip_value(_record(key, place, signed, until)))

    def run_coroutine(self, coroutine, *, return_future):
        known = dict.fromkeys(self.board.nodes, 0)

        async def visible(latest):
            return [Multiaddr(f"/ip4/203.0.113.7/tcp/31337/p2p/{self.peer_id}")]

        async def connected():
            return []

        table = SimpleNamespace(peer_id_to_uid=known)
        p2p = SimpleNamespace(list_peers=connected)
        protocol = SimpleNamespace(routing_table=table, p2p=p2p, client_mode=False)
        node = SimpleNamespace(peer_id=self.peer_id, protocol=protocol, get_visible_maddrs=visible)
        return done(asyncio.run(coroutine(self, node)))


def _record(key, place, value, until):
    return DHTRecord(DHTID.generate(source=key).to_bytes(), MSGPackSerializer.dumps(place), value, until)


class InMemory(Node):
    """The node of the peer of a name, without the constructor, which forks."""

    def __init__(self, board, name):
        self.dht = Dht(board, key_of(name))
        self.peer_id = id_of(name)
        self._listening = Listening([], [], [])
        self._finder = SimpleNamespace(reach=Reach("direct", "It is in memory."), addresses=list)
        self.credentials = Credentials(INVITED)
