"""Keys, ids and signatures are the ones that hivemind makes, though hivemind is not imported."""

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.multiaddr import Multiaddr
from trahiv_cli.net.borrowed.multiaddr import Multiaddr as Borrowed

from trahiv_cli.members.identity import ensure_identity, id_bytes, read_signing_key
from trahiv_cli.members.records import own_subkey, peer_of
from trahiv_cli.net import borrowed


@pytest.fixture
def identity(tmp_path):
    path = tmp_path / "identity.key"
    ensure_identity(path)
    return path


def test_key_file_and_id_are_libp2p_s(identity):
    message = crypto_pb2.PrivateKey.FromString(identity.read_bytes())
    assert message.key_type == crypto_pb2.RSA
    assert message.SerializeToString() == identity.read_bytes()
    peer = PeerID.from_identity(identity.read_bytes())
    assert ensure_identity(identity) == peer.to_base58()
    assert id_bytes(peer.to_base58()) == peer.to_bytes()


@pytest.mark.parametrize("bits", [1024, 2048])
def test_keys_of_all_sizes_have_ids(bits, tmp_path):
    key = RSAPrivateKey()
    key._private_key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    content = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=key.to_bytes()).SerializeToString()
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    assert ensure_identity(path) == PeerID.from_identity(content).to_base58()
    assert peer_of(key.get_public_key().to_bytes()) == ensure_identity(path)


def test_other_keys_are_refused(tmp_path):
    for content in (
        crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=bytes(200)).SerializeToString(),
        crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=bytes(200)).SerializeToString() + b"more",
    ):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(ValueError, match="not an RSA key"):
            read_signing_key(tmp_path / "key")


def test_signatures_and_places_are_hivemind_s(identity):
    key = read_signing_key(identity)
    assert own_subkey(key) == RSASignatureValidator(key).local_public_key
    public = RSAPublicKey.from_bytes(key.get_public_key().to_bytes())
    signature = key.sign(b"content")
    assert public.verify(b"content", signature)
    assert not public.verify(b"other", signature)


def test_borrowed_modules_are_hivemind_s_files():
    assert all("/hivemind/" in folder for folder in borrowed.__path__)


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.7/tcp/31337",
        "/ip6/2001:db8::1/udp/4001/quic-v1",
        "/dns4/example.org/tcp/443/ws/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8",
    ],
)
def test_borrowed_addresses_equal_hivemind_s(address):
    assert Borrowed(address).to_bytes() == Multiaddr(address).to_bytes()
