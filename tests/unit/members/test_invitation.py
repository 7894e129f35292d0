"""The invitation that a joiner pastes, its membership, and the private files of both and of its id."""

import re

import pytest

from tests.unit.conftest import refused
from trahiv_cli.errors import NotAdmitted, SetupError, Unreachable
from trahiv_cli.files import write_private
from trahiv_cli.members import invitation as invitations
from trahiv_cli.members.identity import ensure_identity
from trahiv_cli.members.invitation import Invitation, find_credentials, read_invitation, visitor_credentials
from trahiv_cli.members.membership import KEY_BYTES, Owner, Role
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.recipe.pasted import INVITATION_PREFIX as PREFIX

PEER = "QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
HOME, AWAY = f"/ip4/192.168.1.20/tcp/38211/p2p/{PEER}", f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
THERE = "/ip4/198.51.100.4/tcp/1/p2p/QmPEMy4fLVLFW5QgB2bh7kTdZmrz9J9hNKoJrHwzM1sLrS"
OWNER = Owner(bytes(range(KEY_BYTES)))
SECRET = OWNER.invite()
OPEN = Invitation((HOME,))
SECRETS = (invitations.OWNER_FILE, invitations.MEMBER_FILE)
WHOLE = Invitation((AWAY, HOME), SECRET, "tiny-4f0c1d2e", "6a1b" * 4)


@pytest.mark.parametrize(
    "invitation",
    [
        WHOLE,
        OPEN,
        Invitation((f"/dns4/example.org/udp/4001/quic/p2p/{PEER}", AWAY, THERE), SECRET, "äöü-名前"),
        Invitation(membership=SECRET),
        Invitation((HOME,), OWNER.invite(Role.watcher, is_once=True, expires=2**32)),
    ],
)
def test_invitation_survives_text(invitation):
    assert Invitation.parse(invitation.to_text()) == invitation


def test_invitation_is_short_and_hides_secret():
    assert re.fullmatch(PREFIX + r"[A-Za-z0-9_-]{,320}", WHOLE.to_text())
    assert repr(SECRET.secret) not in repr(WHOLE)
    assert Invitation.parse(Invitation(fingerprint="ab" * 32).to_text()).fingerprint == "ab" * 8


def test_damaged_invitation_is_refused():
    text = WHOLE.to_text()
    damaged = ["x", *(PREFIX + end for end in ("", "====", "ü", "A" * 3 * invitations.MAX_CHARS)), ""]
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
    assert read_invitation([THERE, f"@{file}", HOME]) == expected
    assert read_invitation([]) == Invitation()
    write_private(file, f"trahiv join --peer {WHOLE.to_text()}\n".encode())  # as it was printed
    assert read_invitation([f"@{file}"]) == WHOLE


def test_invitations_to_different_swarms_are_refused():
    others = Owner(bytes(KEY_BYTES)).invite()
    with pytest.raises(NotAdmitted, match="different swarms"):
        read_invitation([WHOLE.to_text(), Invitation((AWAY,), others).to_text()])


def test_unusable_invitation_file_is_refused(tmp_path):
    (tmp_path / "friend").touch()
    (tmp_path / "friend").chmod(0o644)
    for name, words in (("friend", "other users"), ("missing", "missing")):
        with pytest.raises(SetupError, match=words):
            read_invitation([f"@{tmp_path / name}"])


def test_owner_of_other_swarm_joins_as_member(tmp_path):
    own = find_credentials(tmp_path, Invitation()).membership
    for folder in (None, tmp_path):
        assert visitor_credentials(folder, WHOLE).membership == SECRET
    assert find_credentials(tmp_path, Invitation()).membership == own  # no file was changed
    for invitation in (WHOLE, OPEN, Invitation()):
        assert find_credentials(tmp_path, invitation) == Credentials(SECRET, None, tmp_path)
    assert visitor_credentials(tmp_path, OPEN).membership == SECRET


def test_open_swarm_needs_no_membership(tmp_path):
    assert find_credentials(tmp_path, Invitation(), is_public=True) is None
    assert find_credentials(tmp_path, OPEN) is None
    assert visitor_credentials(None, OPEN) is None
    assert list(tmp_path.iterdir()) == []


def test_watcher_takes_no_part(tmp_path):
    watcher = Invitation((HOME,), OWNER.invite(Role.watcher))
    with pytest.raises(NotAdmitted, match="to watch"):
        find_credentials(tmp_path, watcher)
    assert visitor_credentials(tmp_path, watcher).membership.grant.role is Role.watcher
    assert list(tmp_path.iterdir()) == []


NO_SECRETS = ("", "nonsense", "00" * (KEY_BYTES - 1), "00" * 5000, "trahiv1:AAAA", "\xff", OPEN.to_text())


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("content", NO_SECRETS, ids=len)
def test_invalid_secret_file_is_refused(tmp_path, name, content):
    path = tmp_path / name
    write_private(path, content.encode())
    with pytest.raises(SetupError, match="does not hold"):
        find_credentials(tmp_path, Invitation())
    assert path.read_text() == content


@pytest.mark.parametrize("name", SECRETS)
def test_unusable_secret_file_is_refused(tmp_path, name):
    path = tmp_path / name
    path.touch()
    path.chmod(0o640)
    for folder, words in ((tmp_path, "can be read by other users"), (path, "can't be used")):
        with pytest.raises(SetupError, match=words):
            find_credentials(folder, Invitation())


def test_invalid_or_readable_key_is_refused(tmp_path):
    path = tmp_path / "identity.key"
    for place, mode, content, words, hint in (
        *((path, 0o600, content, "not a libp2p private key", "--identity") for content in (b"", b"hello")),
        *((path, mode, b"", "other users", f"chmod 600 {path}") for mode in (0o640, 0o604, 0o620)),
        (path / "key", 0o600, b"", "can't be", "--output"),
    ):
        write_private(path, content)
        path.chmod(mode)
        with refused(words, hint, SetupError):
            ensure_identity(place)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, mode)
