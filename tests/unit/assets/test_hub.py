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


@pytest.mark.parametrize(
    ("overrides", "is_asked"),
    [((), False), (OF_THE_HUB, True), (('data.datasets=[{"path": "owner/data"}]',), True)],
    ids=["nothing", "model", "data"],
)
def test_the_hub_is_asked_only_for_what_it_has(hub, overrides, is_asked):
    asked = hub()
    assert said_of(*overrides) == ""
    assert asked == [("https://huggingface.co", "HEAD", PATIENCE_S)] * is_asked
    assert os.environ["HF_HUB_OFFLINE"] == ""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (urllib.error.HTTPError("https://hub", 503, "busy", None, None), ""),
        (urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")), ""),
        (http.client.BadStatusLine("?"), ""),
        (urllib.error.URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (urllib.error.URLError(TimeoutError("timed out")), "no answer in 9 s"),
        (TimeoutError("The read operation timed out"), "no answer in 9 s"),
    ],
)
def test_any_answer_is_one_and_without_one_only_the_cache_is_used(hub, error, why):
    hub(error)
    said = (
        f"The hub https://huggingface.co can't be reached ({why}); only what this machine has cached is used."
    )
    assert said_of(*OF_THE_HUB) == (said if why else "")
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if why else "")


def test_a_name_server_that_hangs_is_not_waited_for(hub, monkeypatch):
    hub()
    over = threading.Event()

    def urlopen(request, timeout):
        over.wait(30)
        raise OSError("too late")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.01")
    assert "no answer in 0 s" in said_of(*OF_THE_HUB)
    over.set()


def test_what_the_user_has_set_counts(hub, monkeypatch):
    asked = hub()
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    said_of(*OF_THE_HUB)
    assert asked == [("https://mirror.example", "HEAD", 60.0)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert said_of(*OF_THE_HUB) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert said_of(*OF_THE_HUB) == ""
    assert len(asked) == 1
