"""Checks of packages, GPU, memory, disk and hub, on a machine that the tests define."""

import contextlib
import shutil
import socket
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.kit.recipes import write_tiny
from trahiv_cli.assets import model
from trahiv_cli.doctor import machine
from trahiv_cli.doctor.checks import Check
from trahiv_cli.doctor.machine import disk, examine_machine, gpu, names, packages
from trahiv_cli.recipe.load import load_recipe

GIB = 2**30

REQUIRED = ["here>=2,<3", "beta>=1.5", "elsewhere>=1; python_version < '3'", "tests>=1; extra == 'dev'"]
OF_THE_HUB = ("model.config=null", "model.model_name_or_path=a/model", "model.tokenizer_name_or_path=null")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"here": "2.1", "beta": "1.6rc1"}, ""),
        ({"here": "3.0", "beta": "1.5"}, "here is 3.0, and <3,>=2 is wanted."),
        ({"here": "1.0"}, "here is 1.0, and <3,>=2 is wanted; beta is missing."),
    ],
)
def test_missing_or_wrong_package_is_named(monkeypatch, installed, said):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "requires", lambda _: REQUIRED)
    monkeypatch.setattr(metadata, "version", version)
    check = packages()
    assert check.found.partition("; ")[2] == said
    assert check.verdict == ("bad" if said else "fine")
    assert bool(check.fix) == bool(said)


@pytest.mark.parametrize(
    ("driver", "visible", "cuda", "capability", "verdict", "words"),
    [
        ("", "0", "12.8", None, "poor", "No GPU was found: this peer trains on its CPU."),
        ("program", "0", None, None, "poor", "(2.0) was built without CUDA."),
        ("file", "0", "12.8", None, "poor", "built for CUDA 12.8, can't use it with this driver."),
        ("file", "", "12.8", None, "poor", "CUDA_VISIBLE_DEVICES hides it."),
        ("file", "0", "12.8", (6, 1), "bad", "compute capability 6.1; this torch was built for sm_75, sm_80"),
        ("file", "0", "12.8", (7, 5), "fine", "H1, compute capability 7.5, CUDA 12.8"),
    ],
)
def test_unusable_gpu_is_explained(monkeypatch, tmp_path, driver, visible, cuda, capability, verdict, words):
    (tmp_path / driver).touch()
    monkeypatch.setattr(shutil, "which", lambda _: driver == "program" or None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_90"])
    check = gpu(driver=tmp_path / "file")
    assert check.verdict == verdict
    assert bool(check.wanted) == (verdict != "fine")
    assert words in check.found


@pytest.mark.parametrize(
    ("free", "room", "verdict"),
    [(GIB, 0, "fine"), (GIB - 1, 0, "bad"), (2 * GIB, 3 * GIB, "bad"), (3 * GIB, 3 * GIB, "fine")],
)
def test_disk_check_requires_checkpoint_room(monkeypatch, tmp_path, free, room, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    check = disk(tmp_path / "runs" / "run-1", room)
    assert check.verdict == verdict
    assert ("make room" in check.fix) == (verdict == "bad")
    assert str(tmp_path) in check.found
    assert "run-1" not in check.found


@pytest.mark.parametrize(
    ("ram", "overrides", "verdict", "words"),
    [
        (64 * GIB, (), "fine", "64.0 GiB of RAM are free; without activations the recipe needs "),
        (GIB // 100, (), "bad", "GiB of RAM before activations, and 0.0 GiB are free."),
        (GIB, OF_THE_HUB, "fine", "1.0 GiB of RAM are free; `trahiv check --deep` says what"),
        (GIB, None, "fine", "1.0 GiB of RAM are free"),
    ],
)
def test_recipe_memory_is_compared_with_free(monkeypatch, tmp_path, ram, overrides, verdict, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for room in (machine, model):
        monkeypatch.setattr(room, "free_bytes", lambda: {"RAM": ram})
    recipe = None if overrides is None else load_recipe(write_tiny(tmp_path), overrides).recipe
    checks = {check.name: check for check in examine_machine(recipe, tmp_path)}
    assert [*checks] == ["packages", "gpu", "memory", "disk"]
    memory = checks["memory"]
    assert memory.verdict == verdict
    assert bool(memory.fix) == (verdict == "bad")
    assert words in memory.found


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers."""
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    monkeypatch.setattr(socket, "create_connection", lambda *_: contextlib.ExitStack())


def test_answering_hub_is_fine(hub):
    assert names() == Check("hub", "fine", "https://hub.example answers")


def test_unreachable_hub_is_only_poor(hub, monkeypatch):
    unknown = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=unknown))
    check = names()
    assert check.verdict == "poor"
    assert "hub.example could not be resolved." in check.found
