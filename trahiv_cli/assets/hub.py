"""Check once whether the hub answers, before libraries retry for most of a minute."""

from __future__ import annotations

import os
import socket
import urllib.request
from concurrent.futures import wait
from urllib.parse import urlsplit

from trahiv_cli.background import in_background
from trahiv_cli.recipe.paths import BUILTIN, is_local
from trahiv_cli.recipe.schema import Recipe

PATIENCE_S = 9.0
"""About as long as `huggingface_hub` waits for one answer by default."""

HINT = "check the connection; HF_ENDPOINT names another hub, HF_HUB_OFFLINE=0 leaves it all to the libraries"
"""The hint when the hub does not answer."""


def is_of_hub(name: str | None) -> bool:
    """Tell whether a model or dataset is on the hub: it is neither built in nor a path on this machine."""
    return name is not None and not name.startswith(BUILTIN) and not is_local(name)


def do_without_hub(recipe: Recipe, *, patience_s: float = PATIENCE_S) -> str:
    """Make libraries use only their cache if the hub does not answer; they must not be imported yet.

    Does nothing if the recipe needs no hub, if the user has chosen already (`HF_HUB_OFFLINE`), or if there is
    a proxy, which only the libraries may know. Returns a sentence for the user if the hub does not answer,
    else "".
    """
    names = [recipe.model.model_name_or_path, recipe.model.tokenizer_name_or_path]
    names += [dataset.path for dataset in recipe.data.datasets]
    has_chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
    if not any(map(is_of_hub, names)) or has_chosen or urllib.request.getproxies():
        return ""
    if not (said := trouble(patience_s)):
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return f"{said} Only files in this machine's cache are used."


def endpoint() -> str:
    """Return the hub's URL."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def trouble(patience_s: float = PATIENCE_S) -> str:
    """Connect to the hub; return a sentence about the failure, or ""."""
    found = [f"The name of the hub {endpoint()} could not be resolved."]

    def ask() -> None:
        parts = urlsplit(endpoint())
        place = parts.hostname, parts.port or {"http": 80}.get(parts.scheme, 443)
        socket.getaddrinfo(*place)
        found[0] = f"The hub {endpoint()} does not answer."
        socket.create_connection(place, patience_s).close()
        found[0] = ""

    # In the background, because the look-up of a name has no time limit; if it fails, `found` has the reason.
    wait([in_background(ask)], patience_s)
    return found[0]
