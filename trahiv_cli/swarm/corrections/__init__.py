"""Corrections of hivemind 1.1.12: its processes, its DHT, the trust among its nodes, and its streams.

Every correction has its reason, and names the upstream place (file:line of 1.1.12);
`tests/unit/swarm/corrections/` fails once upstream no longer needs it. The import fails with another version.
`state/inner_optimizer.py` corrects the first step and the adoption of an optimizer's state.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
import time

import hivemind
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P

from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import SetupError
from trahiv_cli.net.streams import receive_protobuf, receive_raw_data, send_raw_data
from trahiv_cli.swarm.corrections.nodes import CorrectedNode, CorrectedProtocol, pack_dictionary
from trahiv_cli.swarm.corrections.processes import close_event_loop, private_folder, start_memory_manager

CORRECTED_VERSION = "1.1.12"

if hivemind.__version__ != CORRECTED_VERSION:
    raise SetupError(
        f"hivemind {hivemind.__version__} is installed, but trahiv corrects {CORRECTED_VERSION} only.",
        hint=f"pip install 'hivemind=={CORRECTED_VERSION}'",
    )


def apply() -> None:
    """Apply the corrections that replace names inside hivemind; call it before a fork, as often as you like.

    utils/timed_storage.py:13 takes the machine's clock for the swarm's (`clock`). On sockets see `processes`.
    """
    P2P._UNIX_SOCKET_PREFIX = f"/unix{private_folder(os.getpid())}/"
    P2P.send_raw_data = staticmethod(send_raw_data)
    P2P.receive_raw_data = staticmethod(receive_raw_data)
    P2P.receive_protobuf = staticmethod(receive_protobuf)
    DictionaryDHTValue.packb = pack_dictionary
    hivemind.dht.dht.DHTNode = CorrectedNode
    hivemind.dht.node.DHTProtocol = CorrectedProtocol
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # each stream is one; the usual limit is 1,024
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and getattr(module, "get_dht_time", None) is time.time:
            vars(module)["get_dht_time"] = swarm_time
    atexit.register(close_event_loop)
    start_memory_manager()
