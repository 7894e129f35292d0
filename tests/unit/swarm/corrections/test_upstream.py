"""hivemind still needs each correction: its source has the lines against which it is made.

If upstream changes such a line, a test fails here, and the correction can be deleted. Tests elsewhere whose
ids contain `upstream` run hivemind's own code, and expect its failure.
"""

from pathlib import Path

import hivemind
import pytest

CORRECTED = {
    # It drops its tasks, and waits for ever for a process that does not start
    "task = asyncio.create_task(getattr(self, method)": ("dht/dht.py",),
    "self._ready.result(timeout=timeout)\n": ("dht/dht.py",),
    # It stores a record where nodes claim its key, and sends everything that is stored
    "num_successful_stores < self.num_replicas": ("dht/node.py",),
    "for key, (value, expiration_time) in self.items()]": ("dht/storage.py",),
    "self.call_store(peer_id, *zip(*data_to_send), in_cache=False)": ("dht/protocol.py",),
    # It accepts any length that a message claims, and puts its sockets into one shared folder
    "data = await reader.readexactly(content_length)": ("p2p/p2p_daemon.py",),
    '_UNIX_SOCKET_PREFIX = "/unix/tmp/hivemind-"': ("p2p/p2p_daemon.py",),
    # It drops an answer that can't be read
    'logger.exception(f"Could not retrieve update': ("utils/mpfuture.py",),
    # It uses the machine's clock as the swarm's time
    "get_dht_time = time.time": ("utils/timed_storage.py",),
    # It adopts an optimizer's state into other memory
    "return optimizer.load_state_dict(nested_pack(flat_optimizer_state": ("optim/state_averager.py",),
}


@pytest.mark.parametrize("source", CORRECTED)
def test_hivemind_still_needs_correction(source):
    for file in CORRECTED[source]:
        assert source in (Path(hivemind.__path__[0]) / file).read_text(), file
