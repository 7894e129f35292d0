"""One process serves the DHT and this peer's services, and ends with its parent."""

import gc
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock, call

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
    ended = Mock()
    dht._ready, dht.kill, dht.join = Future(), ended.kill, ended.join
    dht._ready.set_exception(answer) if answer else dht._ready.set_result(None)
    monkeypatch.setattr(corrected, "require_start", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        dht.wait_until_ready()
    assert [name for name, *_ in ended.mock_calls] == (["join"] if answer else ["kill", "join"])


ENDED = AsyncMock()


@pytest.mark.parametrize(
    "node, calls",
    [
        (SimpleNamespace(meeting=ENDED.meeting), [call.meeting.close(), call.shutdown()]),
        (SimpleNamespace(meeting=None), [call.shutdown()]),
        (SimpleNamespace(), [call.shutdown()]),  # its reach was never looked up
    ],
)
async def test_meeting_closes_before_dht(monkeypatch, dht, node, calls):
    ENDED.reset_mock()
    monkeypatch.setattr(hivemind.DHT, "_shutdown", ENDED.shutdown)
    dht._node = node
    await dht._shutdown()
    assert ENDED.mock_calls == calls
