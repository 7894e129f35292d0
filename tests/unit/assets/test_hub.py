"""Whether the hub is asked, and what follows from its silence; nobody is called here."""

import contextlib
import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from trahiv_cli.assets import hub
from trahiv_cli.recipe.load import load_recipe

OF_THE_HUB = (
    "model.config=null",
    "model.model_name_or_path=owner/model",
    "model.tokenizer_name_or_path=null",
)


@pytest.fixture
def answer(monkeypatch):
    """`answer(how)` lets the hub answer by calling `how`; returns what it was asked."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
    monkeypatch.setattr(urllib.request, "getproxies", dict)

    def answer(how):
        asked = []

        def urlopen(request, timeout):
            asked.append((request.full_url, request.method))
            how()
            return contextlib.ExitStack()

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return asked

    return answer


def said_of(*overrides):
    return hub.do_without_hub(load_recipe("quickstart", overrides).recipe)


def test_the_hub_is_asked_only_for_what_it_has_and_unless_the_user_has_chosen(answer, monkeypatch):
    names = {"owner/name": True, "squad": True, "builtin/trahiv": False, "texts/*": False, None: False}
    assert {name: hub.is_of_hub(name) for name in names} == names
    asked = answer(bool)
    for overrides in ((), OF_THE_HUB, ('data.datasets=[{"path": "owner/data"}]',)):
        assert said_of(*overrides) == "" == os.environ["HF_HUB_OFFLINE"]
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    said_of(*OF_THE_HUB)
    assert asked == [("https://huggingface.co", "HEAD")] * 2 + [("https://mirror.example", "HEAD")]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert said_of(*OF_THE_HUB) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert said_of(*OF_THE_HUB) == "" and len(asked) == 3


@pytest.mark.parametrize(
    ("error", "is_answer"),
    [
        (urllib.error.HTTPError("https://hub", 503, "busy", None, None), True),
        (urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")), True),
        (http.client.BadStatusLine("?"), True),
        (urllib.error.URLError(OSError(-2, "Name or service not known")), False),
        (TimeoutError("The read operation timed out"), False),
        (ValueError("unknown url type"), False),
        (None, False),  # as where the look-up of a name takes for ever
    ],
)
def test_any_answer_is_one_and_without_one_only_the_cache_is_used(answer, monkeypatch, error, is_answer):
    over = threading.Event()

    def fail():
        if error is None:
            over.wait(30)
        else:
            raise error

    answer(fail)
    if error is None:
        monkeypatch.setattr(hub, "PATIENCE_S", 0.01)
    words = "The hub https://huggingface.co does not answer; only what this machine has cached is used."
    assert said_of(*OF_THE_HUB) == ("" if is_answer else words)
    assert os.environ["HF_HUB_OFFLINE"] == ("" if is_answer else "1")
    over.set()
