"""Whether the hub answers: asked once, before libraries that try again and again for most of a minute."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request

from trahiv_cli.recipe.paths import BUILTIN, is_local
from trahiv_cli.recipe.schema import Recipe

PATIENCE_S = 9.0
"""About as long as `huggingface_hub` waits for one answer by default; `HF_HUB_ETAG_TIMEOUT` changes both."""

HINT = "check the connection; HF_ENDPOINT names another hub, HF_HUB_ETAG_TIMEOUT=60 is for a slow one"
"""What to try when the hub does not answer."""


def patience_s() -> float:
    """Return how many seconds the hub may take to answer: at most an hour."""
    try:
        wanted = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE_S)
    except ValueError:
        return PATIENCE_S
    return wanted if 0 < wanted < 3600 else PATIENCE_S


def do_without_hub(recipe: Recipe) -> str:
    """Have libraries use their cache alone if the hub does not answer; they must not be imported yet.

    Nothing is asked if the recipe needs no hub, if the user has chosen already (`HF_HUB_OFFLINE`), or if
    there is a proxy, which only the libraries may know. Returns a sentence for the user unless all is well.
    """
    names = [recipe.model.model_name_or_path, recipe.model.tokenizer_name_or_path]
    names += [dataset.path for dataset in recipe.data.datasets]
    needs_hub = any(name and not name.startswith(BUILTIN) and not is_local(name) for name in names)
    has_chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
    if not needs_hub or has_chosen or urllib.request.getproxies():
        return ""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    timeout_s = patience_s()
    why = [f"no answer in {timeout_s:.0f} s"]
    # A thread asks, as the look-up of a name has no limit.
    asking = threading.Thread(target=ask, args=(endpoint, timeout_s, why), name="asking the hub", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not why[0]:
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return f"The hub {endpoint} can't be reached ({why[0]}); only what this machine has cached is used."


def ask(endpoint: str, timeout_s: float, why: list[str]) -> None:
    """Write into `why[0]` why the hub does not answer: nothing if it does. If it is late, leave it."""
    why_not = ""
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=timeout_s).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        pass  # an answer, too
    except ValueError:
        why_not = "it is not a URL"
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return
        if not isinstance(reason, ssl.SSLError):  # the libraries have certificates of their own
            why_not = getattr(reason, "strerror", None) or str(reason)
    why[0] = why_not
