"""An event loop for async unit tests, and ids of peers without keys."""

import asyncio
import contextlib
import inspect

import pytest
from hivemind.p2p import PeerID

from tests.simulation.network import VirtualLoop


def peer(number):
    """Make the id of a peer that has no key."""
    return PeerID(b"\x12\x20" + number.to_bytes(32))


with_sockets = pytest.mark.parametrize("loop", [None], indirect=True, ids=["sockets"])


@pytest.fixture(autouse=True)
def loop(request):
    """The loop of an async test: unless that is `with_sockets`, its clock jumps."""
    factory = getattr(request, "param", VirtualLoop)
    with contextlib.closing(asyncio.Runner(loop_factory=factory)) as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run an async test in its `loop`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["loop"].run(pyfuncitem.obj(**given))
    return True
