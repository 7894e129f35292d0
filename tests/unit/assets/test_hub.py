"""Whether the hub is asked, and what follows from its silence; nobody is called here."""

import http.client
import os
import ssl
import threading
import urllib.error

import pytest

from trahiv_cli.assets import hub
from trahiv_cli.recipe.load import load_recipe

OF_THE_HUB = (
    "model.config=null",
    "model.model_name_or_path=owner/model",
    "model.tokenizer_name_or_path=null",
)


@pytest.fixture
def answers(monkeypatch):
    """Let the hub answer with an error, or with nothing special; returns what it was asked."""
    asked = []
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)

    class Answer:
        def close(self):
            pass

    def answers(error=None):
        def urlopen(request, timeout):
            asked.append((request.full_url, request.method, timeout))
            if error is not None:
                raise error
            return Answer()

        monkeypatch.setattr(hub.urllib.request, "urlopen", urlopen)
        return asked

    return answers


def recipe(*overrides):
    return load_recipe("quickstart", overrides).recipe


@pytest.mark.parametrize(
    ("overrides", "is_asked"),
    [((), False), (OF_THE_HUB, True), (('data.datasets=[{"path": "owner/data"}]',), True)],
    ids=["nothing", "model", "data"],
)
def test_the_hub_is_asked_only_for_what_it_has(answers, overrides, is_asked):
    asked = answers()
    assert hub.do_without_hub(recipe(*overrides)) == ""
    assert asked == [("https://huggingface.co", "HEAD", hub.PATIENCE_S)] * is_asked
    assert os.environ["HF_HUB_OFFLINE"] == ""


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.HTTPError("https://hub", 503, "busy", None, None),
        urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")),
        http.client.BadStatusLine("?"),
    ],
)
def test_a_hub_that_answers_anything_is_there(answers, error):
    answers(error)
    assert hub.do_without_hub(recipe(*OF_THE_HUB)) == ""
    assert os.environ["HF_HUB_OFFLINE"] == ""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (urllib.error.URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (urllib.error.URLError(TimeoutError("timed out")), "no answer in 9 s"),
        (TimeoutError("The read operation timed out"), "no answer in 9 s"),
    ],
)
def test_without_an_answer_only_the_cache_is_used(answers, error, why):
    answers(error)
    assert hub.do_without_hub(recipe(*OF_THE_HUB)) == (
        f"The hub https://huggingface.co can't be reached ({why}); only what this machine has cached is used."
    )
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_name_server_that_hangs_is_not_waited_for(answers, monkeypatch):
    answers()
    over = threading.Event()

    def urlopen(request, timeout):
        over.wait(30)
        raise OSError("too late")

    monkeypatch.setattr(hub.urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.01")
    assert "no answer in 0 s" in hub.do_without_hub(recipe(*OF_THE_HUB))
    over.set()


def test_what_the_user_has_set_counts(answers, monkeypatch):
    asked = answers()
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    hub.do_without_hub(recipe(*OF_THE_HUB))
    assert asked == [("https://mirror.example", "HEAD", 60.0)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert hub.do_without_hub(recipe(*OF_THE_HUB)) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert hub.do_without_hub(recipe(*OF_THE_HUB)) == ""
    assert len(asked) == 1
