"""What hivemind 1.1.12 gets wrong, one small correction each, with its reason and its reference.

1. `processes`: hivemind's processes end with their parent, and outlive each other's failures.
2. `dht`: one process serves the DHT and the averagers, and says within a minute whether it has started.
3. `nodes`: what the nodes of the DHT ask each other, and what they believe.
4. `streams`: a message between peers has a largest size, and one that can't be read ends its stream.

Every correction names the upstream place (file:line of 1.1.12); `tests/unit/swarm/corrections/` fails once
upstream no longer needs it. Another version is refused at import. How a state is copied and adopted is
corrected in `optim/state.py`.
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

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections.dht import give_states
from trahiv_cli.swarm.corrections.nodes import CorrectedNode, CorrectedProtocol, pack_dictionary
from trahiv_cli.swarm.corrections.processes import close_event_loop, private_folder, start_memory_manager
from trahiv_cli.swarm.corrections.streams import receive_protobuf, receive_raw_data

CORRECTED_VERSION = "1.1.12"

if hivemind.__version__ != CORRECTED_VERSION:
    raise SetupError(
        f"hivemind {hivemind.__version__} is installed, but trahiv corrects {CORRECTED_VERSION} only.",
        hint=f"pip install 'hivemind=={CORRECTED_VERSION}'",
    )


def apply() -> None:
    """Apply the corrections that nobody asks for by name; call it before a fork, as often as you like.

    utils/timed_storage.py:13 takes the machine's clock for the swarm's (`clock`), and p2p/p2p_daemon.py:74
    puts its sockets into /tmp, where nothing says whose they are.
    """
    P2P._UNIX_SOCKET_PREFIX = f"/unix{private_folder(os.getpid())}/"
    P2P.receive_raw_data = staticmethod(receive_raw_data)
    P2P.receive_protobuf = staticmethod(receive_protobuf)
    DictionaryDHTValue.packb = pack_dictionary
    hivemind.dht.dht.DHTNode = CorrectedNode
    hivemind.dht.node.DHTProtocol = CorrectedProtocol
    hivemind.averaging.averager._background_thread_fetch_current_state = give_states
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # each stream is one, and 1,024 are usual
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and getattr(module, "get_dht_time", None) is time.time:
            vars(module)["get_dht_time"] = swarm_time
    atexit.register(close_event_loop)
    start_memory_manager()
