"""Identities of peers that sign: real keys, of fewer bits, so that many are made in no time."""

from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.members.records import peer_of


@lru_cache
def key_of(name):
    """The key of the peer of this name."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return key


@lru_cache
def id_of(name):
    """Its id."""
    return PeerID.from_base58(peer_of(key_of(name).get_public_key().to_bytes()))
