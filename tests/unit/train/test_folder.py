"""Which folder a peer takes, and that nobody else takes it meanwhile; between processes: `tests/swarm`."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from trahiv_cli.errors import FolderTaken, SetupError
from trahiv_cli.swarm.identity import IDENTITY_FILE
from trahiv_cli.swarm.invitation import INVITATION_FILE, INVITED_BY_FILE, MEMBER_FILE, OWNER_FILE, Invitation
from trahiv_cli.swarm.membership import KEY_BYTES, Owner
from trahiv_cli.train.folder import owned, owned_to_join, require_free
from trahiv_cli.train.joining import known_identity

OWNER = Owner(bytes(KEY_BYTES))
OURS, OF_ANOTHER = OWNER.invite(), OWNER.invite()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(name, *files, membership=None):
    """Make a folder in `runs` with these files, and by what its peer is a member."""
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).touch(mode=0o600)
    if membership is not None:
        (folder / MEMBER_FILE).touch(mode=0o600)
        (folder / MEMBER_FILE).write_text(Invitation(membership=membership).to_text())
    return folder


def taken_to_join(membership=OURS):
    with owned_to_join("run", membership) as folder:
        return folder.name


def test_a_folder_has_one_owner_at_a_time():
    with owned(Path("a")) as folder:
        assert folder == Path("a") and folder.is_dir()
        for name in ("a", "./a", "b/../a"):
            with pytest.raises(
                FolderTaken, match=r"runs in .*a already \(process \d+\); nothing was changed"
            ):
                require_free(Path(name))
        with pytest.raises(FolderTaken), owned(Path("a")):
            pass
        with owned(Path("b")):
            pass
    with pytest.raises(ZeroDivisionError), owned(Path("a")):
        raise ZeroDivisionError
    require_free(Path("a"))
    require_free(Path("never there"))
    assert not Path("never there").exists()


def test_a_folder_that_is_a_file_is_refused():
    Path("a").touch()
    with pytest.raises(SetupError, match="a can't be written"), owned(Path("a")):
        pass


def test_who_meets_an_owner_is_told_what_to_type():
    folder = make("run", INVITATION_FILE)
    with owned(folder), pytest.raises(FolderTaken) as refused:
        require_free(folder)
    assert "trahiv join --peer @runs/run/invitation" in refused.value.hint
    assert "--output-dir DIR" in refused.value.hint


def test_joiners_beside_each_other_get_a_folder_each():
    with ExitStack() as stack:
        names = [stack.enter_context(owned_to_join("run", OURS)).name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_a_joiner_comes_back_to_its_own_folder_and_not_to_that_of_who_started_the_swarm():
    make("run", OWNER_FILE, membership=OURS)
    make("run-3", INVITED_BY_FILE)
    assert taken_to_join() == "run-3"


def test_a_joiner_comes_back_to_the_folder_of_its_invitation():
    make("run-2", INVITED_BY_FILE, membership=OF_ANOTHER)
    make("run-3", INVITED_BY_FILE, membership=OURS)
    assert taken_to_join(OURS) == "run-3"
    assert taken_to_join(OF_ANOTHER) == "run-2"
    with owned(Path("runs/run-3")):
        assert taken_to_join(OURS) == "run-2", "it may have got a fresh line"


def test_who_started_the_swarm_may_come_back_by_the_line_of_another_one():
    make("run", OWNER_FILE, membership=OURS)
    assert taken_to_join(OF_ANOTHER) == "run"


def test_a_failure_of_a_joiner_is_not_taken_for_a_folder_that_is_taken():
    with pytest.raises(FolderTaken, match="elsewhere"), owned_to_join("run", OURS):
        raise FolderTaken("elsewhere")


def test_nobody_visits_as_a_peer_that_runs():
    mine, owners = (
        make("a", IDENTITY_FILE, membership=OURS),
        make("b", OWNER_FILE, IDENTITY_FILE, membership=OURS),
    )
    invitation = Invitation(membership=OURS)
    assert known_identity(invitation, None) == mine / IDENTITY_FILE
    with owned(mine):
        assert known_identity(invitation, None) == owners / IDENTITY_FILE
        with owned(owners):
            assert known_identity(invitation, None) is None
    assert known_identity(Invitation(membership=OF_ANOTHER), None) is None
