"""The key file: private, stable, and never overwritten."""

import os

import pytest
from hivemind.p2p import P2P

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.identity import ensure_identity, write_private


def test_a_new_key_is_for_its_owner_only_and_fixes_the_peer_id(tmp_path, monkeypatch):
    path, modes, real = tmp_path / "run" / "identity.key", [], P2P.generate_identity

    def generate(to):
        modes.append(os.stat(os.path.dirname(to)).st_mode & 0o777)
        real(to)

    monkeypatch.setattr(P2P, "generate_identity", generate)
    umask = os.umask(0)  # it hides nothing
    try:
        peer_id = ensure_identity(path)
    finally:
        os.umask(umask)
    assert modes == [0o700] and path.stat().st_mode & 0o777 == 0o600, "hidden also while it is written"
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    write_private(tmp_path / "copy.key", path.read_bytes())
    assert ensure_identity(path) == ensure_identity(tmp_path / "copy.key") == peer_id


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN PRIVATE KEY-----"])
def test_a_file_that_is_no_key_or_that_others_can_read_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "identity.key"
    for place, mode, words, hint in (
        *(
            (path, 0o600, "not a libp2p private key", "--identity"),
            (path / "key", 0o600, "can't be", "--output"),
        ),
        *((path, mode, "other users", f"chmod 600 {path}") for mode in (0o640, 0o604, 0o620)),
    ):
        write_private(path, content)
        path.chmod(mode)
        with pytest.raises(SetupError, match=words) as refused:
            ensure_identity(place)
        assert hint in refused.value.hint and refused.value.exit_code == 3
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == mode
