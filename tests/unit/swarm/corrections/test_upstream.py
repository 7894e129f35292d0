"""hivemind still needs our help: its source says what each correction is against.

Where upstream has changed it a test fails here, and the correction can go. Others, `..._upstream_still_...`,
run hivemind's own code and expect its failure.
"""

from pathlib import Path

import hivemind
import pytest

TAKES_TASKS = "task = asyncio.create_task(getattr(self, method)"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        # It drops its tasks, and waits for ever for a process that does not start
        *(("dht/dht.py", TAKES_TASKS), ("averaging/averager.py", TAKES_TASKS)),
        *(
            (file, "self._ready.result(timeout=timeout)\n")
            for file in ("dht/dht.py", "averaging/averager.py")
        ),
        # It forks a process for each averager, and ignores Ctrl-C then
        ("averaging/averager.py", "class DecentralizedAverager(mp.Process, ServicerBase)"),
        ("averaging/averager.py", "signal.signal(signal.SIGINT, signal.SIG_IGN)\n        self.start()"),
        # It holds the state that it gave last
        ("averaging/averager.py", "state_metadata, state_tensors, tensor_infos = state\n"),
        # It asks everybody before a record is stored, and sends whatever is stored
        ("dht/node.py", "store_task = asyncio.create_task(\n            self.find_nearest_nodes("),
        ("dht/storage.py", "for key, (value, expiration_time) in self.items()]"),
        ("dht/protocol.py", "self.call_store(peer_id, *zip(*data_to_send), in_cache=False)"),
        # It believes whatever length a message claims, and puts its sockets into one shared folder
        ("p2p/p2p_daemon.py", "data = await reader.readexactly(content_length)"),
        ("p2p/p2p_daemon.py", '_UNIX_SOCKET_PREFIX = "/unix/tmp/hivemind-"'),
        # Futures work only if the first one of a process is of the class itself
        ("utils/mpfuture.py", "receiver_pipe, cls._global_sender_pipe = mp.Pipe(duplex=False)"),
        # It takes the machine's clock for the swarm's
        ("utils/timed_storage.py", "get_dht_time = time.time"),
        # It takes every step of a schedule
        ("optim/state_averager.py", "while self.scheduler._step_count <= self.local_epoch:"),
    ],
)
def test_hivemind_still_has_what_is_corrected(file, source):
    assert source in (Path(hivemind.__path__[0]) / file).read_text()
