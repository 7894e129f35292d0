"""What somebody who helps needs to see of a run, in one archive: without keys, secrets and paths of home."""

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
from trahiv_cli.recipe.pasted import without_secrets
from trahiv_cli.swarm.identity import IDENTITY_FILE
from trahiv_cli.swarm.invitation import INVITATION_FILE, INVITED_BY_FILE, MEMBER_FILE, OWNER_FILE
from trahiv_cli.swarm.owning import GIVEN_FOLDER

TOLD = ("recipe.yaml", "recipe.json", "events.jsonl*", "trahiv.log*")
SECRET = (
    IDENTITY_FILE,
    OWNER_FILE,
    MEMBER_FILE,
    INVITATION_FILE,
    INVITED_BY_FILE,
    f"{GIVEN_FOLDER}/*",
    "*.key",
)
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{10,}|(?<=Bearer )\S+")
LEFT_OUT = "(left out)"


def write_report(folder: Path, archive: Path) -> list[str]:
    """Write what there is of a run's folder, and what this machine is; return the names of what is in it.

    The archive can be read by this user alone. SetupError if the folder holds no run, or the archive can't be
    written; then there is none.
    """
    found = sorted({path for pattern in TOLD for path in folder.glob(pattern)})
    if not found:
        raise SetupError(f"{folder} holds no run.", hint="name the run's folder: trahiv report RUN_DIR")
    hidden = list(secrets_of(folder))
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in found}
    texts["machine.json"] = json.dumps(machine(folder), indent=2) + "\n"
    try:
        with (
            open(os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as tar,
        ):
            for name, text in texts.items():
                content = cleaned(text, hidden).encode()
                entry = tarfile.TarInfo(f"{archive.name.removesuffix('.tar.gz')}/{name}")
                entry.size, entry.mtime = len(content), int(time.time())
                tar.addfile(entry, io.BytesIO(content))
    except OSError as error:
        archive.unlink(missing_ok=True)
        raise SetupError(
            f"{archive} can't be written: {error.strerror or error}.",
            hint="name another place: --output FILE",
        ) from error
    return list(texts)


def machine(folder: Path) -> dict[str, object]:
    """Say what this machine is and has installed."""
    packages = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
        "checks": [check._asdict() for check in examine_machine(None, folder)],
    }


def secrets_of(folder: Path) -> Iterator[str]:
    """List what is secret in a run's folder, in each way in which it may be written."""
    for path in {path for pattern in SECRET for path in folder.glob(pattern) if path.is_file()}:
        content = path.read_bytes()
        yield content.hex()
        yield base64.b64encode(content).decode()
        yield base64.urlsafe_b64encode(content).rstrip(b"=").decode()
        yield content.decode(errors="replace").strip()


def cleaned(text: str, hidden: list[str]) -> str:
    """Take secrets, tokens and this user's home out of a text."""
    for secret in filter(None, hidden):
        text = text.replace(secret, LEFT_OUT)
    text = TOKEN.sub(LEFT_OUT, without_secrets(text))
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")
