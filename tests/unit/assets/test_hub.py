"""Whether the hub is asked, and the fallback without its answer; no network is used here."""

import contextlib
import os
import socket
import threading
import urllib.request

import pytest

from trahiv_cli.assets import hub
from trahiv_cli.recipe.load import load_recipe


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The addresses at which the hub was called; it answers."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "")  # so that the test restores it
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    called = []

    def answer(address, timeout):
        called.append(address)
        return contextlib.ExitStack()

    monkeypatch.setattr(socket, "create_connection", answer)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [host])
    return called


HUB_MODEL = ("model.config=null", "model.model_name_or_path=a/model", "model.tokenizer_name_or_path=null")


def said_of(*overrides, **options):
    return hub.do_without_hub(load_recipe("quickstart", overrides).recipe, **options)


def test_hub_names_are_known():
    names = {"owner/name": True, "squad": True, "builtin/trahiv": False, "texts/*": False, None: False}
    assert {name: hub.is_of_hub(name) for name in names} == names


def test_answering_hub_is_used(called):
    assert said_of(*HUB_MODEL) == said_of('data.datasets=[{"path": "owner/data"}]') == ""
    assert os.environ["HF_HUB_OFFLINE"] == ""
    assert called == [("huggingface.co", 443)] * 2


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://mirror.example", ("mirror.example", 80)),
        ("https://mirror.example:8443", ("mirror.example", 8443)),
    ],
)
def test_mirror_is_asked_instead(called, monkeypatch, url, address):
    monkeypatch.setenv("HF_ENDPOINT", url)
    said_of(*HUB_MODEL)
    assert called == [address]


def test_local_recipe_needs_no_hub(called):
    said_of()
    assert called == []


def test_user_choice_is_respected(called, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said_of(*HUB_MODEL)
    assert called == []


def test_proxy_is_left_to_libraries(called, monkeypatch):
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    said_of(*HUB_MODEL)
    assert called == []


NO_NAME = "The name of the hub http://mirror.example could not be resolved."
NO_ANSWER = "The hub http://mirror.example does not answer."


@pytest.mark.parametrize("error", [OSError("refused"), None], ids=["refused", "slow"])
@pytest.mark.parametrize(("edge", "said"), [("getaddrinfo", NO_NAME), ("create_connection", NO_ANSWER)])
def test_unreachable_hub_falls_back_to_cache(monkeypatch, edge, error, said):
    def fail(*_):
        if error is None:
            threading.Event().wait(0.5)
        raise error or TimeoutError

    monkeypatch.setattr(socket, edge, fail)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    assert said_of(*HUB_MODEL, patience_s=0.1) == f"{said} Only files in this machine's cache are used."
    assert os.environ["HF_HUB_OFFLINE"] == "1"
