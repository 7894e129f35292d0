"""Whether the hub is asked, and the fallback without its answer; no network is used here."""

import contextlib
import os
import socket
import threading
import urllib.request

import pytest

from trahiv_cli.assets import hub
from trahiv_cli.recipe.load import load_recipe

OF_THE_HUB = ("model.config=null", "model.model_name_or_path=a/model", "model.tokenizer_name_or_path=null")


@pytest.fixture
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


def said_of(*overrides):
    return hub.do_without_hub(load_recipe("quickstart", overrides).recipe)


def test_hub_is_asked_only_when_needed(called, monkeypatch):
    names = {"owner/name": True, "squad": True, "builtin/trahiv": False, "texts/*": False, None: False}
    assert {name: hub.is_of_hub(name) for name in names} == names
    for overrides in ((), OF_THE_HUB, ('data.datasets=[{"path": "owner/data"}]',)):
        assert said_of(*overrides) == "" == os.environ["HF_HUB_OFFLINE"]
    for mirror in ("http://mirror.example", "https://mirror.example:8443"):
        monkeypatch.setenv("HF_ENDPOINT", mirror)
        said_of(*OF_THE_HUB)
    hosts = [("huggingface.co", 443)] * 2 + [("mirror.example", 80), ("mirror.example", 8443)]
    assert called == hosts
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert said_of(*OF_THE_HUB) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert said_of(*OF_THE_HUB) == "" and called == hosts


NO_NAME, NO_ANSWER = "The name of the hub {} could not be resolved.", "The hub {} does not answer."


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize(
    ("edge", "error", "said"),
    [
        ("getaddrinfo", socket.gaierror(-2, "Name or service not known"), NO_NAME),
        ("getaddrinfo", None, NO_NAME),
        ("create_connection", ConnectionRefusedError("refused"), NO_ANSWER),
        ("create_connection", None, NO_ANSWER),
    ],
    ids=["unknown", "the look-up takes long", "refused", "the hub is silent"],
)
def test_unreachable_hub_falls_back_to_cache(monkeypatch, edge, error, said):
    def fail(*_):
        if error is None:
            threading.Event().wait(0.5)
        raise error or TimeoutError

    assert hub.trouble() == ""
    monkeypatch.setattr(socket, edge, fail)
    monkeypatch.setattr(hub, "PATIENCE_S", 0.1)
    for url in ("https://huggingface.co", "http://mirror.example"):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        found = said_of(*OF_THE_HUB), os.environ["HF_HUB_OFFLINE"]
        assert found == (f"{said.format(url)} Only files in this machine's cache are used.", "1")
