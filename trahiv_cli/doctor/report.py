"""An archive with a run's files for a helper, without keys, secrets and the path of the user's home."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from trahiv_cli.doctor.machine import examine_machine
from trahiv_cli.errors import SetupError
from trahiv_cli.files import INVITATION_FILE, INVITED_BY_FILE, MEMBER_FILE, OWNER_FILE, write_whole
from trahiv_cli.members.identity import IDENTITY_FILE
from trahiv_cli.recipe.pasted import INVITATION_PREFIX, without_secrets
from trahiv_cli.swarm.owner import GIVEN_FOLDER
from trahiv_cli.telemetry.events import EVENT_FILE

LEFT_OUT = "(left out)"
SHAPES = (
    # The option `--on-event` and all up to the next event or entry of a log. Its command may hold secrets,
    # and may be quoted by a shell, by Python or by both.
    (r"(?s)--on-event(?! \(left out\)).*?(?=\n(?:\{|\d{4}-)|\n?\Z)", f"--on-event {LEFT_OUT}"),
    (rf"({INVITATION_PREFIX}[\w-]+)(?:\s*\n[\s#>]*[\w-]{{16,}})+", r"\1"),  # wrapped
    (r"\b(?:hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|sk-)[\w-]{10,}", LEFT_OUT),
    (r"(?i)(\b(?:bearer|authorization[\\\"']*\s*[:=]\s*[\\\"']*\w+) +)[\w.~+/=-]{6,}", rf"\1{LEFT_OUT}"),
    (r"(?<=://)[^\s/?#\"']+@", ""),
    (r"(://[^\s\"'?]+\?)[^\s\"']+", rf"\1{LEFT_OUT}"),
    (
        r"(://(?:hooks\.[\w.]+|[\w.]*discord\w*\.com/api|api\.telegram\.org)/)[^\s\"'\\]+",
        rf"\1{LEFT_OUT}",
    ),
    (
        r"(\b(?:(?i:(?:(?:hf|hub|access|auth|api|refresh|client|wandb|x)[_-])*"
        r"(?:api[_-]?key|token|passw(?:or)?d|secret(?:[_-]\w*key)?|access[_-]key))"
        r"|[A-Z][A-Z0-9_]*_(?:TOKEN|KEY|SECRET|PASS\w*))[\\\"']*\s*[=:]\s*[\\\"']*)[^\s\"',}\\]+",
        rf"\1{LEFT_OUT}",
    ),
)
"""Patterns of secrets, and their replacements."""


def write_report(folder: Path, archive: Path) -> list[str]:
    """Archive a run's recipe, events and logs with a description of this machine; return the files' names.

    Only this user can read the archive. Raises SetupError if the folder holds no run, or the archive can't be
    written; an existing archive is unchanged then.
    """
    patterns = ("recipe.yaml", "recipe.json", f"{EVENT_FILE}*", "trahiv.log*")
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not found:
        raise SetupError(f"{folder} holds no run.", hint="name the run's folder: trahiv report RUN_DIR")
    hidden = list(secrets_of(folder))
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in found}
    texts["machine.json"] = json.dumps(machine(folder), indent=2) + "\n"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in texts.items():
            content = cleaned(text, hidden).encode()
            entry = tarfile.TarInfo(f"{archive.name.removesuffix('.tar.gz')}/{name}")
            entry.size = len(content)
            entry.mtime = int(time.time())
            tar.addfile(entry, io.BytesIO(content))
    try:
        write_whole(archive, packed.getvalue(), 0o600)
    except OSError as error:
        raise SetupError(
            f"{archive} can't be written: {error.strerror or error}; nothing was changed.",
            hint="name another place: --output FILE",
        ) from error
    return list(texts)


def machine(folder: Path) -> dict[str, object]:
    """Describe this machine and its installed packages."""
    packages = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
        "checks": [check._asdict() for check in examine_machine(None, folder)],
    }


def secrets_of(folder: Path) -> Iterator[str]:
    """Yield the secrets in a run's folder and the environment, in each encoding that a text may have."""
    files = (IDENTITY_FILE, OWNER_FILE, MEMBER_FILE, INVITATION_FILE, INVITED_BY_FILE)
    patterns = (*files, f"{GIVEN_FOLDER}/*", "*.key")
    for path in {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}:
        content = path.read_bytes()
        yield content.hex()
        yield base64.b64encode(content).decode()
        yield base64.urlsafe_b64encode(content).rstrip(b"=").decode()
        yield content.decode(errors="replace").strip()
    for name, value in os.environ.items():
        # A shorter value may occur in any text.
        if re.search("TOKEN|KEY|SECRET|PASSW", name, re.IGNORECASE) and len(value) >= 8:
            yield value


def cleaned(text: str, hidden: list[str]) -> str:
    """Remove secrets, texts that look like one, and the path of this user's home from a text."""
    for secret in filter(None, hidden):
        text = text.replace(secret, LEFT_OUT).replace(json.dumps(secret)[1:-1], LEFT_OUT)
    text = "".join(map(without_commands_in_event, text.splitlines(keepends=True)))
    for shape, instead in SHAPES:
        text = re.sub(shape, instead, text)
    text = without_secrets(text)
    homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    for home in homes | {json.dumps(home)[1:-1] for home in homes}:
        text = text.replace(home, "~")
    return text


def without_commands_in_event(line: str) -> str:
    """Remove the command of `--on-event` from each text in a line, if the line is an event."""
    if not line.startswith('{"') or not line.rstrip().endswith("}"):  # the event may have been cut short
        return line
    return re.sub(r'--on-event(?:\\.|[^"\\])*', f"--on-event {LEFT_OUT}", line)
