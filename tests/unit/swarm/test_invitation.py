"""The invitation that a joiner pastes, its membership, and the private files of both and of its id."""

import os
import re

import pytest

from trahiv_cli.errors import NotAdmitted, SetupError, Unreachable
from trahiv_cli.files import write_private
from trahiv_cli.recipe.pasted import INVITATION_PREFIX as PREFIX
from trahiv_cli.swarm import invitation as invitations
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.invitation import Invitation, find_standing, passing_standing, read_invitation
from trahiv_cli.swarm.membership import KEY_BYTES, Owner, Role

PEER = "QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
HOME, AWAY = f"/ip4/192.168.1.20/tcp/38211/p2p/{PEER}", f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
NAMED = f"/dns4/example.org/udp/4001/quic/p2p/{PEER}"
THERE = "/ip4/198.51.100.4/tcp/1/p2p/QmPEMy4fLVLFW5QgB2bh7kTdZmrz9J9hNKoJrHwzM1sLrS"
OWNER = Owner(bytes(range(KEY_BYTES)))
SECRET, OTHERS = OWNER.invite(), Owner(bytes(KEY_BYTES)).invite()
SECRETS = (invitations.OWNER_FILE, invitations.MEMBER_FILE)
WHOLE = Invitation((AWAY, HOME), SECRET, "tiny-4f0c1d2e", "6a1b" * 4)


def test_invitation_round_trips_and_detects_damage():
    for invitation in (
        *(WHOLE, Invitation((HOME,)), Invitation((NAMED, AWAY, THERE), SECRET, "äöü-名前")),
        Invitation((HOME,), OWNER.invite(Role.watcher, is_once=True, expires=2**32)),
        Invitation(membership=SECRET),
    ):
        assert Invitation.parse(invitation.to_text()) == invitation
    text = WHOLE.to_text()
    assert re.fullmatch(PREFIX + r"[A-Za-z0-9_-]{,320}", text) and repr(SECRET.secret) not in repr(WHOLE)
    assert Invitation.parse(Invitation((HOME,), fingerprint="ab" * 32).to_text()).fingerprint == "ab" * 8
    damaged = ["", PREFIX, PREFIX + "====", PREFIX + "ü", PREFIX + "A" * 3 * invitations.MAX_CHARS, "x"]
    for place in range(len(PREFIX), len(text)):
        other = "A" if text[place] != "A" else "B"
        damaged += [text[:place], text[:place] + other + text[place + 1 :]]
    for one in damaged:
        with pytest.raises(Unreachable, match="damaged, or not complete"):
            Invitation.parse(one)


def test_addresses_invitations_and_files_combine(tmp_path):
    file = tmp_path / "friend"
    invitations.keep_invitation(file, WHOLE)
    expected = Invitation((THERE, AWAY, HOME), SECRET, WHOLE.run_id, WHOLE.fingerprint)
    assert read_invitation([THERE, f"@{file}", HOME]) == expected and read_invitation([]) == Invitation()
    write_private(file, f"trahiv join --peer {WHOLE.to_text()}\n".encode())  # as it was printed
    assert read_invitation([f"@{file}"]) == WHOLE
    with pytest.raises(NotAdmitted, match="different swarms"):
        read_invitation([WHOLE.to_text(), Invitation((AWAY,), OTHERS).to_text()])
    file.chmod(0o644)
    for name, words in (("friend", "other users"), ("missing", "missing")):
        with pytest.raises(SetupError, match=words):
            read_invitation([f"@{tmp_path / name}"])


def test_starter_becomes_owner_and_joiner_member(tmp_path):
    owned = [find_standing(tmp_path, Invitation()) for _ in range(2)]
    assert {one.owner.public for one in owned} == {one.membership.owner for one in owned}
    assert owned[0].membership == owned[1].membership
    assert invitations.read_owner(tmp_path).public == owned[0].owner.public
    assert not any((tmp_path / name).stat().st_mode & 0o077 for name in SECRETS)
    for folder in (None, tmp_path):
        assert passing_standing(folder, WHOLE).membership == SECRET
    assert find_standing(tmp_path, Invitation()).membership == owned[0].membership, "that changed no file"
    for invitation in (WHOLE, Invitation((HOME,)), Invitation()):
        joined = find_standing(tmp_path, invitation)
        assert joined.membership == SECRET and joined.folder == tmp_path
        assert joined.owner is None, "it owns nothing in another swarm"
    assert passing_standing(tmp_path, Invitation((HOME,))).membership == SECRET


def test_open_swarm_needs_no_membership(tmp_path):
    assert find_standing(tmp_path, Invitation(), is_public=True) is None
    for found in (find_standing(tmp_path, Invitation((HOME,))), passing_standing(None, Invitation((HOME,)))):
        assert found is None
    watcher = Invitation((HOME,), OWNER.invite(Role.watcher))
    with pytest.raises(NotAdmitted, match="to watch"):
        find_standing(tmp_path, watcher)
    assert passing_standing(tmp_path, watcher).membership.grant.role is Role.watcher
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SECRETS)
def test_unusable_secret_file_is_refused(tmp_path, name):
    open_one = Invitation((HOME,)).to_text()
    for content in ("", "nonsense", "00" * (KEY_BYTES - 1), "00" * 5000, "trahiv1:AAAA", "\xff", open_one):
        write_private(tmp_path / name, content.encode())
        with pytest.raises(SetupError, match="does not hold"):
            find_standing(tmp_path, Invitation())
        assert (tmp_path / name).read_text() == content
    (tmp_path / name).chmod(0o640)
    for folder, words in ((tmp_path, "can be read by other users"), (tmp_path / name, "can't be used")):
        with pytest.raises(SetupError, match=words):
            find_standing(folder, Invitation())


def test_new_identity_key_is_private(tmp_path):
    path = tmp_path / "run" / "identity.key"
    umask = os.umask(0)  # masks no permission
    try:
        peer_id = ensure_identity(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    write_private(tmp_path / "copy.key", path.read_bytes())
    assert ensure_identity(path) == ensure_identity(tmp_path / "copy.key") == peer_id


def test_invalid_or_readable_key_is_refused(tmp_path):
    path = tmp_path / "identity.key"
    for place, mode, content, words, hint in (
        *((path, 0o600, content, "not a libp2p private key", "--identity") for content in (b"", b"hello")),
        *((path, mode, b"", "other users", f"chmod 600 {path}") for mode in (0o640, 0o604, 0o620)),
        (path / "key", 0o600, b"", "can't be", "--output"),
    ):
        write_private(path, content)
        path.chmod(mode)
        with pytest.raises(SetupError, match=words) as refused:
            ensure_identity(place)
        assert hint in refused.value.hint and refused.value.exit_code == 3
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == mode
