"""Which folder a peer takes, and that no other takes it meanwhile; between processes: `tests/swarm`."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.conftest import refused
from trahiv_cli.errors import FolderTaken, SetupError
from trahiv_cli.files import INVITATION_FILE, INVITED_BY_FILE, MEMBER_FILE, OWNER_FILE
from trahiv_cli.members.identity import IDENTITY_FILE
from trahiv_cli.members.invitation import Invitation
from trahiv_cli.members.membership import KEY_BYTES, Owner
from trahiv_cli.run.folder import (
    earlier_peers,
    folders_to_join,
    known_identity,
    owned_first,
    read_run,
    recorded,
)
from trahiv_cli.run.lock import owned, require_free
from trahiv_cli.telemetry.events import PEERS_FILE

OWNER = Owner(bytes(KEY_BYTES))
OURS = OWNER.invite()
OF_ANOTHER = OWNER.invite()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(name, membership, *files):
    """Make a folder in `runs` with these files, and its peer's membership."""
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    for file in (*files, MEMBER_FILE):
        (folder / file).touch(mode=0o600)
    (folder / MEMBER_FILE).write_text(Invitation(membership=membership).to_text())
    return folder


def taken_to_join(membership):
    with owned_first(folders_to_join("run", membership, earlier_peers(None))) as folder:
        return folder.name


def test_taken_folder_is_refused():
    said = r"runs/.*a already \(process \d+\); nothing was changed"
    hint = "trahiv join --peer @.*/invitation; for anything else.*--output-dir"
    with owned(make("a", OURS, INVITATION_FILE)):
        for name in ("a", "../runs/a"):
            with refused(said, hint, FolderTaken):
                require_free(Path("runs", name))
            with pytest.raises(FolderTaken), owned(Path("runs", name)):
                pass


@pytest.mark.parametrize("text", ["[]", "{}", '{"hivemind_config": {"opt": []}}', "7"])
def test_recipe_of_another_form_is_refused(text):
    Path("recipe.json").write_text(text)
    with refused("not a recipe of this version", "--output-dir", SetupError):
        read_run(Path())


def test_failure_frees_folders():
    with pytest.raises(ZeroDivisionError), owned(Path("a")), owned(Path("b")):
        raise ZeroDivisionError
    for name in ("a", "never there"):
        require_free(Path(name))
    assert not Path("never there").exists()


def test_folder_must_be_writable():
    Path("a file").touch()
    with pytest.raises(SetupError, match="a file can't be written"), owned(Path("a file")):
        pass


def test_concurrent_joiners_get_own_folders():
    folders = folders_to_join("run", OURS, [])
    with ExitStack() as stack:
        names = [stack.enter_context(owned_first(folders)).name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_joiner_passes_on_failure_within_folder():
    with pytest.raises(FolderTaken, match="elsewhere"), owned_first([Path("run")]):
        raise FolderTaken("elsewhere")


def test_joiner_returns_to_folder_of_invitation():
    make("run", OURS, OWNER_FILE)
    assert taken_to_join(OURS) == taken_to_join(OF_ANOTHER) == "run", "there is no other"
    make("run-2", OF_ANOTHER, INVITED_BY_FILE)
    make("run-3", OURS, INVITED_BY_FILE)
    assert taken_to_join(OURS) == "run-3"
    assert taken_to_join(OF_ANOTHER) == "run-2"
    with owned(Path("runs/run-3")):
        assert taken_to_join(OURS) == "run-2", "it may have got a fresh line"


def test_visitor_avoids_identity_of_running_peer():
    mine = make("a", OURS, IDENTITY_FILE)
    owners = make("b", OURS, OWNER_FILE, IDENTITY_FILE)
    assert known_identity(earlier_peers(None), OURS) == mine / IDENTITY_FILE
    with owned(mine):
        assert known_identity(earlier_peers(None), OURS) == owners / IDENTITY_FILE
        with owned(owners):
            assert known_identity(earlier_peers(None), OURS) is None
    assert known_identity(earlier_peers(None), OF_ANOTHER) is None


def test_peer_reports_have_own_file(tmp_path, events):
    with recorded(tmp_path, events):
        for name in ("Ann", "Bob"):
            events.emit("peers", run_id="run-1", peers=[{"peer_id": "QmA", "name": name}])
    events.emit("peers", run_id="run-1", peers=[])  # it is over
    assert json.loads((tmp_path / PEERS_FILE).read_text())["peers"] == [{"peer_id": "QmA", "name": "Bob"}]
    assert [path.name for path in tmp_path.iterdir()] == [PEERS_FILE]


def test_error_ending_run_is_recorded(tmp_path, events):
    with pytest.raises(SetupError), recorded(tmp_path, events):
        raise SetupError("The disk is gone.", "look for it")
    told = json.loads((tmp_path / "events.jsonl").read_text())
    assert (told["event"], told["message"]) == ("error", "The disk is gone.")
