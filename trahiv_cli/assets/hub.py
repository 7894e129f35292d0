"""Whether the hub answers: asked once, before libraries that try again and again for most of a minute."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.request
from urllib.parse import urlsplit

from trahiv_cli.recipe.paths import BUILTIN, is_local
from trahiv_cli.recipe.schema import Recipe

PATIENCE_S = 9.0
"""About as long as `huggingface_hub` waits for one answer by default."""

HINT = "check the connection; HF_ENDPOINT names another hub, HF_HUB_OFFLINE=0 leaves it all to the libraries"
"""What to try when the hub does not answer."""


def is_of_hub(name: str | None) -> bool:
    """Tell whether others can find a model or dataset: it is none of ours, and no path of this machine."""
    return name is not None and not name.startswith(BUILTIN) and not is_local(name)


def do_without_hub(recipe: Recipe) -> str:
    """Have libraries use their cache alone if the hub does not answer; they must not be imported yet.

    Nothing is asked if the recipe needs no hub, if the user has chosen already (`HF_HUB_OFFLINE`), or if
    there is a proxy, which only the libraries may know. Returns a sentence for the user unless all is well.
    """
    names = [recipe.model.model_name_or_path, recipe.model.tokenizer_name_or_path]
    names += [dataset.path for dataset in recipe.data.datasets]
    has_chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
    if not any(map(is_of_hub, names)) or has_chosen or urllib.request.getproxies():
        return ""
    if not (said := trouble()):
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return f"{said} Only what this machine has cached is used."


def endpoint() -> str:
    """Return the hub's URL."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def trouble() -> str:
    """Connect to the hub; return a sentence on why it can't be had, or nothing."""
    found = [f"The name of the hub {endpoint()} could not be resolved."]

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            parts = urlsplit(endpoint())
            place = parts.hostname, parts.port or {"http": 80}.get(parts.scheme, 443)
            socket.getaddrinfo(*place)
            found[0] = f"The hub {endpoint()} does not answer."
            socket.create_connection(place, PATIENCE_S).close()
            found[0] = ""

    # A thread asks, as the look-up of a name has no limit.
    asking = threading.Thread(target=ask, name="asking the hub", daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return found[0]
