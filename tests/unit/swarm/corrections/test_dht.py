"""One process serves the DHT and this peer's services, and ends with its parent."""

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace

import hivemind
import pytest

from tests.kit.identities import key_of
from trahiv_cli.members.door import Door
from trahiv_cli.swarm.corrections import dht as corrected
from trahiv_cli.swarm.corrections.dht import CorrectedDHT


@pytest.fixture
def dht():
    """A DHT without its process."""
    return CorrectedDHT(start=False, door=Door(), signing_key=key_of("peer"), place=b"")


def test_forked_process_freezes_inherited_objects(monkeypatch, dht):
    left_alone, before = [], gc.get_freeze_count()
    monkeypatch.setattr(hivemind.DHT, "start", lambda self: left_alone.append(gc.get_freeze_count()))
    dht.start()
    assert left_alone[0] > before == gc.get_freeze_count()


@pytest.mark.parametrize("answer", [None, OSError("no p2pd")], ids=["it has started", "it ends by itself"])
def test_interrupted_dht_start_leaves_no_process(monkeypatch, dht, answer):
    def interrupt(*_):
        raise KeyboardInterrupt

    ended = []
    dht._ready, dht.kill, dht.join = Future(), lambda: ended.append("killed"), lambda _: ended.append("gone")
    dht._ready.set_exception(answer) if answer else dht._ready.set_result(None)
    monkeypatch.setattr(corrected, "require_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dht.wait_until_ready()
    assert ended == (["gone"] if answer else ["killed", "gone"])


@pytest.mark.parametrize("has_meeting", [True, False])
def test_meeting_closes_before_dht(monkeypatch, dht, has_meeting):
    async def end(self):
        ended.append("meeting" if self is meeting else "DHT")

    ended, meeting = [], SimpleNamespace()
    meeting.close = lambda: end(meeting)
    monkeypatch.setattr(hivemind.DHT, "_shutdown", end)
    dht._node = SimpleNamespace(meeting=meeting if has_meeting else None)
    asyncio.run(dht._shutdown())
    dht._node = SimpleNamespace()  # its reach was never looked up
    asyncio.run(dht._shutdown())
    assert ended == [*["meeting"] * has_meeting, "DHT", "DHT"]
