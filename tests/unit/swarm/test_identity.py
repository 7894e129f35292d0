"""The key file: private, stable, and never overwritten."""

import os

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.private_files import write_private


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A fresh key file, made while the umask hides nothing, and its peer id."""
    path = tmp_path_factory.mktemp("identity") / "run" / "identity.key"
    umask = os.umask(0)
    try:
        return path, ensure_identity(path)
    finally:
        os.umask(umask)


def test_a_new_key_is_for_its_owner_only_and_fixes_the_peer_id(made, tmp_path):
    path, peer_id = made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    assert peer_id.startswith("Qm") and PeerID.from_base58(peer_id).to_base58() == peer_id
    content = path.read_bytes()
    write_private(tmp_path / "copy.key", content)
    assert ensure_identity(path) == ensure_identity(tmp_path / "copy.key") == peer_id
    assert path.read_bytes() == content


def test_a_key_is_hidden_from_others_while_it_is_written(tmp_path, monkeypatch):
    def generate(path):
        modes.append(os.stat(os.path.dirname(path)).st_mode & 0o777)
        real(path)

    modes, real = [], P2P.generate_identity
    monkeypatch.setattr(P2P, "generate_identity", generate)
    ensure_identity(tmp_path / "identity.key")
    assert modes == [0o700]


def private_key(data, kind=crypto_pb2.KeyType.RSA):
    return crypto_pb2.PrivateKey(key_type=kind, data=data).SerializeToString()


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"-----BEGIN PRIVATE KEY-----", private_key(b"123"), private_key(b"1" * 64, 1), None],
    ids=["empty", "text", "PEM", "RSA in name only", "another kind", "truncated"],
)
def test_a_file_that_is_no_key_is_refused_and_kept(made, tmp_path, content):
    path = tmp_path / "identity.key"
    content = made[0].read_bytes()[:-100] if content is None else content
    write_private(path, content)
    with pytest.raises(SetupError, match="not a libp2p private key") as refused:
        ensure_identity(path)
    assert "--identity" in refused.value.hint and refused.value.exit_code == 3
    assert path.read_bytes() == content


def test_a_key_that_others_can_read_is_refused_and_kept(made):
    path, _ = made
    path.chmod(0o644)
    with pytest.raises(SetupError, match="other users"):
        ensure_identity(path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_place_that_can_t_be_used_is_said(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(SetupError, match="can't be used") as refused:
        ensure_identity(tmp_path / "run" / "identity.key")
    assert "--output-dir" in refused.value.hint
    assert (tmp_path / "run").read_text() == "a file where the folder should be"
    with pytest.raises(SetupError, match="Is a directory"):
        ensure_identity(tmp_path)
