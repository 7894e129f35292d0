"""The archive for a helper: what it contains, and what it leaves out."""

import base64
import json
import shlex
import tarfile

import pytest

from trahiv_cli.doctor.report import cleaned, write_report
from trahiv_cli.errors import SetupError
from trahiv_cli.files import INVITATION_FILE, MEMBER_FILE, OWNER_FILE
from trahiv_cli.swarm.identity import IDENTITY_FILE, ensure_identity
from trahiv_cli.swarm.invitation import Invitation, find_standing, keep_invitation

ADDRESS = "/ip4/1.2.3.4/tcp/9/p2p/QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of an owner's run, whose files contain all its secrets in several forms."""
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ann"))
    folder = tmp_path / "home" / "ann" / "runs" / "run-1"
    ensure_identity(folder / IDENTITY_FILE)
    membership = find_standing(folder, Invitation()).membership
    keep_invitation(folder / INVITATION_FILE, Invitation((ADDRESS,), membership=membership))
    keep_invitation(folder / MEMBER_FILE, Invitation(membership=membership))
    (folder / "watch.key").write_text("h3DIAWLFga58xM1nf3PcrN7vEw4HbDK7")
    texts = [(folder / name).read_text() for name in (OWNER_FILE, INVITATION_FILE, MEMBER_FILE, "watch.key")]
    own = (folder / IDENTITY_FILE).read_bytes()
    texts += [
        own.hex(),
        base64.b64encode(own).decode(),
        "hf_abcdefGHIJKL123456",
        "Authorization: Bearer s3cr3t",
    ]
    events = [{"event": "warning", "message": f"{text.strip()} in {folder}"} for text in texts]
    for name in ("events.jsonl", "events.jsonl.1", "trahiv.log", "recipe.yaml", "recipe.json"):
        (folder / name).write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "checkpoints").mkdir()
    return folder, [text.strip() for text in texts]


def test_report_has_no_secret_or_home(run, tmp_path):
    folder, secrets = run
    archive = tmp_path / "report.tar.gz"
    names = write_report(folder, archive)
    expected = {"events.jsonl", "events.jsonl.1", "trahiv.log", "recipe.yaml", "recipe.json", "machine.json"}
    assert set(names) == expected and archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as tar:
        held = {member.name: tar.extractfile(member).read().decode() for member in tar.getmembers()}
    assert held.keys() == {f"report/{name}" for name in expected}
    for name, text in held.items():
        assert not [secret for secret in secrets if secret in text], name
        assert str(tmp_path / "home" / "ann") not in text and "s3cr3t" not in text
    event = json.loads(held["report/events.jsonl"].splitlines()[0])
    assert event == {"event": "warning", "message": "(left out) in ~/runs/run-1"}
    machine = json.loads(held["report/machine.json"])
    assert machine["packages"]["hivemind"] == "1.1.12"
    assert {"packages", "gpu", "disk"} <= {check["name"] for check in machine["checks"]}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "trahiv join --peer trahiv1:abcdefghijklmnop\n  # qrstuvwxyz0123456789\nname: x\n",
            "trahiv1:...\nname: x",
        ),
        ("--on-event 'curl https://hooks/T/B/S' --yes", "--on-event (left out)"),
        ('{"resume": "trahiv init x --on-event ./tell", "step": 1}', '--on-event (left out)", "step": 1}'),
        ("https://ann:pw@host/x?X-Amz-Signature=abc&y=1", "https://host/x?(left out)"),
        (
            'api_key=abc "token": "xyz", tokens: 12, pad_token: <pad>',
            'api_key=(left out) "token": "(left out)"',
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
    assert "tokens: 12, pad_token: <pad>" in cleaned(text, []) or "pad_token" not in text


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
    assert told["resume"].replace("'", "") == "trahiv init x --on-event (left out)" and told["step"] == 1
    logged = f"Command {words!r} failed:\n{resume}\nTraceback"
    for text in (left, cleaned(f"{event[:-30]}\n{event}\n", []), cleaned(logged, [])):
        assert "S3CRET" not in text and "curl" not in text and "--on-event" in text


def test_environment_secret_is_removed_from_json():
    assert (
        cleaned(json.dumps({"message": 'my "secret" word'}), ['my "secret" word'])
        == '{"message": "(left out)"}'
    )


def test_every_form_of_home_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    home = tmp_path / "josé"
    home.symlink_to(tmp_path / "real")
    monkeypatch.setenv("HOME", str(home))
    for text in (f"{home}/x", json.dumps(f"{home}/x"), f"{tmp_path}/real/x"):
        assert cleaned(text, []) in ("~/x", '"~/x"')


def test_existing_report_is_replaced_whole(run, tmp_path):
    archive = tmp_path / "report.tar.gz"
    archive.write_text("mine")
    archive.chmod(0o644)
    write_report(run[0], archive)
    assert archive.stat().st_mode & 0o777 == 0o600 and tarfile.is_tarfile(archive)
    with pytest.raises(SetupError, match="can't be written: Is a directory; nothing was changed"):
        write_report(run[0], tmp_path / "home")
    assert not list(tmp_path.glob(".*"))


def test_missing_run_or_folder_is_refused(run, tmp_path):
    with pytest.raises(SetupError, match="holds no run"):
        write_report(tmp_path, tmp_path / "report.tar.gz")
    with pytest.raises(SetupError, match="can't be written: No such file"):
        write_report(run[0], tmp_path / "nowhere" / "report.tar.gz")
    assert not list(tmp_path.glob("**/*.tar.gz"))
