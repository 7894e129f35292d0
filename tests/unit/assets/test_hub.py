"""Whether the hub is asked, and what follows from its silence; nobody is called here."""

import contextlib
import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from trahiv_cli.assets.hub import PATIENCE_S, do_without_hub
from trahiv_cli.recipe.load import load_recipe

OF_THE_HUB = (
    "model.config=null",
    "model.model_name_or_path=owner/model",
    "model.tokenizer_name_or_path=null",
)


@pytest.fixture
def hub(monkeypatch):
    """`hub(error)` lets the hub answer with an error, or with nothing special; returns what it was asked."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
    monkeypatch.setattr(urllib.request, "getproxies", dict)

    def hub(error=None):
        asked = []

        def urlopen(request, timeout):
            asked.append((request.full_url, request.method, timeout))
            if error is not None:
                raise error
            return contextlib.ExitStack()

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return asked

    return hub


def said_of(*overrides):
    return do_without_hub(load_recipe("quickstart", overrides).recipe)


def test_the_hub_is_asked_only_for_what_it_has_and_unless_the_user_has_chosen(hub, monkeypatch):
    asked = hub()
    for overrides in ((), OF_THE_HUB, ('data.datasets=[{"path": "owner/data"}]',)):
        assert said_of(*overrides) == "" == os.environ["HF_HUB_OFFLINE"]
    assert asked == [("https://huggingface.co", "HEAD", PATIENCE_S)] * 2
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    said_of(*OF_THE_HUB)
    assert asked.pop() == ("https://mirror.example", "HEAD", 60.0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert said_of(*OF_THE_HUB) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert said_of(*OF_THE_HUB) == ""
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (urllib.error.HTTPError("https://hub", 503, "busy", None, None), ""),
        (urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")), ""),
        (http.client.BadStatusLine("?"), ""),
        (urllib.error.URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (TimeoutError("The read operation timed out"), "no answer in 9 s"),
    ],
)
def test_any_answer_is_one_and_without_one_only_the_cache_is_used(hub, error, why):
    hub(error)
    words = f"https://huggingface.co can't be reached ({why}); only what this machine has cached is used."
    assert said_of(*OF_THE_HUB) == (f"The hub {words}" if why else "")
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if why else "")


def test_a_name_server_that_hangs_is_not_waited_for(hub, monkeypatch):
    hub()
    over = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: over.wait(30) and contextlib.ExitStack())
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.01")
    assert "no answer in 0 s" in said_of(*OF_THE_HUB)
    over.set()
