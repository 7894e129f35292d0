"""The archive for a helper: what it contains, and what it leaves out."""

import base64
import json
import re
import shlex
import tarfile

import pytest

from trahiv_cli.doctor.report import cleaned, write_report
from trahiv_cli.errors import SetupError
from trahiv_cli.files import INVITATION_FILE, MEMBER_FILE, OWNER_FILE
from trahiv_cli.members.identity import IDENTITY_FILE, ensure_identity
from trahiv_cli.members.invitation import Invitation, find_credentials, keep_invitation

ADDRESS = "/ip4/1.2.3.4/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"


def secrets_in(folder):
    """The secrets of a run, in several forms."""
    for name in (OWNER_FILE, INVITATION_FILE, MEMBER_FILE, "watch.key"):
        yield (folder / name).read_text().strip()
    own = (folder / IDENTITY_FILE).read_bytes()
    yield own.hex()
    yield base64.b64encode(own).decode()
    yield "hf_abcdefGHIJKL123456"
    yield "Authorization: Bearer s3cr3t"


RECORDS = {"events.jsonl", "events.jsonl.1", "trahiv.log", "recipe.yaml", "recipe.json"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of an owner's run, whose files contain all its secrets."""
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    folder = tmp_path / "ann" / "runs" / "run-1"
    ensure_identity(folder / IDENTITY_FILE)
    membership = find_credentials(folder, Invitation()).membership
    keep_invitation(folder / INVITATION_FILE, Invitation((ADDRESS,), membership=membership))
    keep_invitation(folder / MEMBER_FILE, Invitation(membership=membership))
    (folder / "watch.key").write_text("h3DIAWLFga58xM1nf3PcrN7vEw4HbDK7")
    events = [{"event": "warning", "message": f"{text} in {folder}"} for text in secrets_in(folder)]
    for name in RECORDS:
        (folder / name).write_text("\n".join(map(json.dumps, events)))
    (folder / "checkpoints").mkdir()
    return folder


def test_report_has_no_secret_or_home(run, tmp_path):
    archive = tmp_path / "report.tar.gz"
    names = write_report(run, archive)
    assert set(names) == RECORDS | {"machine.json"}
    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as tar:
        held = {member.name: tar.extractfile(member).read().decode() for member in tar}
    assert held.keys() == {f"report/{name}" for name in names}
    for secret in (*secrets_in(run), "s3cr3t", str(tmp_path / "ann")):
        assert not [name for name, text in held.items() if secret in text]
    event = json.loads(held["report/events.jsonl"].splitlines()[0])
    assert event == {"event": "warning", "message": "(left out) in ~/runs/run-1"}
    machine = json.loads(held["report/machine.json"])
    assert machine["packages"]["hivemind"] == "1.1.12"
    assert {"packages", "gpu", "disk"} <= {check["name"] for check in machine["checks"]}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("join --peer trahiv1:abcdefghijklmnop\n  # qrstuvwxyz0123456789\nname: x\n", "trahiv1:...\nname: x"),
        ("--on-event 'curl https://hooks/T/B/S' --yes", "--on-event (left out)"),
        ('{"resume": "trahiv init x --on-event ./tell", "step": 1}', '--on-event (left out)", "step": 1}'),
        ("https://ann:pw@host/x?X-Amz-Signature=abc&y=1", "https://host/x?(left out)"),
        (
            'api_key=abc "token": "xyz", tokens: 12, pad_token: <pad>',
            'api_key=(left out) "token": "(left out)", tokens: 12, pad_token: <pad>',
        ),
        ("HF_TOKEN=abc WANDB_API_KEY: abc\n", "HF_TOKEN=(left out) WANDB_API_KEY: (left out)"),
        ("hf_token: abc, hub_token='abc'", "hf_token: (left out), hub_token='(left out)'"),
        ("authorization: Basic YW5uOnB3 x", "authorization: Basic (left out) x"),
        ('{"Authorization": "token abcdefg"}', '"token (left out)"}'),
        ("basic accuracy: 3", "basic accuracy: 3"),
        ("curl -H 'authorization: bearer abcdef.g' x", "bearer (left out)' x"),
        ("proxy http://ann:p@ss@host:3128/ failed", "proxy http://host:3128/ failed"),
        ("https://hooks.slack.com/services/T/B/S x", "https://hooks.slack.com/(left out) x"),
        ("https://discord.com/api/webhooks/1/S x", "https://discord.com/api/(left out) x"),
        ("ghp_0123456789abc xoxb-0123456789 hf_a0123456789", "(left out) (left out) (left out)"),
    ],
)
def test_only_secrets_are_removed(text, left):
    assert left in cleaned(text, [])


COMMANDS = [
    "curl --data @- https://host/1/S3CRET",
    "curl -d 'it is' -H \"X: S3CRET\" --next https://host/S3CRET",
    """sh -c 'a '"'"'S3CRET "b" S3CRET'"'"' --x'""",
    "curl \\\n  --url S3CRET\n --x S3CRET",
    'curl {S3CRET}, [\\"S3CRET\\"] é',
    r"curl -H \'X: S3CRET\' https://host/S3CRET",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("is_one_word", [False, True])
def test_quoted_command_secrets_are_removed(command, is_one_word):
    words = [f"--on-event={command}"] if is_one_word else ["--on-event", command]
    words = ["trahiv", "init", "x", *words, "--yes", *words, "--name", "it's me"]
    resume = shlex.join(words)
    event = json.dumps({"event": "done", "resume": resume, "step": 1})
    left = cleaned(f"{event}\n", [])
    told = json.loads(left)
    assert told["resume"].replace("'", "") == "trahiv init x --on-event (left out)"
    assert told["step"] == 1
    logged = f"Command {words!r} failed:\n{resume}\nTraceback"
    for text in (left, cleaned(f"{event[:-30]}\n{event}\n", []), cleaned(logged, [])):
        assert not re.search("S3CRET|curl", text)
        assert "--on-event" in text


def test_environment_secret_is_removed_from_json():
    secret = 'my "secret" word'
    assert cleaned(json.dumps({"message": secret}), [secret]) == '{"message": "(left out)"}'


def test_every_form_of_home_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    home = tmp_path / "josé"
    home.symlink_to(tmp_path / "real")
    monkeypatch.setenv("HOME", str(home))
    text = f"{home}/x {json.dumps(str(home))} {tmp_path}/real/x"
    assert cleaned(text, []) == '~/x "~" ~/x'


def test_existing_report_is_replaced_whole(run, tmp_path):
    archive = tmp_path / "report.tar.gz"
    archive.write_text("mine")
    archive.chmod(0o644)
    write_report(run, archive)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert tarfile.is_tarfile(archive)


@pytest.mark.parametrize(
    ("folder", "archive", "said"),
    [
        (".", "report.tar.gz", "holds no run"),
        ("ann/runs/run-1", "nowhere/report.tar.gz", "can't be written: No such file"),
        ("ann/runs/run-1", "ann", "can't be written: Is a directory; nothing was changed"),
    ],
)
def test_impossible_report_leaves_nothing(run, tmp_path, folder, archive, said):
    with pytest.raises(SetupError, match=said):
        write_report(tmp_path / folder, tmp_path / archive)
    assert [path.name for path in tmp_path.iterdir()] == ["ann"]
