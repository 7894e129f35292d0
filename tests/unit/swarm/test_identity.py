"""The key file: private, stable, and never overwritten."""

import os

import pytest
from hivemind.p2p import P2P, PeerID

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.identity import ensure_identity, require_private, write_private


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A fresh key file, made while the umask hides nothing, and its peer id."""
    path = tmp_path_factory.mktemp("identity") / "run" / "identity.key"
    umask = os.umask(0)
    try:
        return path, ensure_identity(path)
    finally:
        os.umask(umask)


def test_a_new_key_is_for_its_owner_only_and_fixes_the_peer_id(made, tmp_path, monkeypatch):
    path, peer_id = made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    assert PeerID.from_base58(peer_id).to_base58() == peer_id
    write_private(tmp_path / "copy.key", path.read_bytes())
    assert ensure_identity(path) == ensure_identity(tmp_path / "copy.key") == peer_id
    modes, real = [], P2P.generate_identity
    monkeypatch.setattr(
        P2P,
        "generate_identity",
        lambda to: (modes.append(os.stat(os.path.dirname(to)).st_mode & 0o777), real(to)),
    )
    ensure_identity(tmp_path / "new.key")
    assert modes == [0o700], "it is hidden from others while it is written"


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN PRIVATE KEY-----", None])
def test_a_file_that_is_no_key_or_that_others_can_read_is_refused_and_kept(made, tmp_path, content):
    path = tmp_path / "identity.key"
    content = made[0].read_bytes()[:-100] if content is None else content
    write_private(path, content)
    with pytest.raises(SetupError, match="not a libp2p private key") as refused:
        ensure_identity(path)
    assert "--identity" in refused.value.hint and refused.value.exit_code == 3
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(SetupError, match="other users") as refused:
            ensure_identity(path)
        assert f"chmod 600 {path}" in refused.value.hint
    assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o620
    write_private(path, b"y")
    require_private(path)


def test_a_place_that_can_t_be_used_is_said(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(SetupError, match="can't be used") as refused:
        ensure_identity(tmp_path / "run" / "identity.key")
    assert "--output-dir" in refused.value.hint
    with pytest.raises(SetupError, match="Is a directory"):
        ensure_identity(tmp_path)
