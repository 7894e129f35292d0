"""One process serves the DHT and this peer's services, and reports within a minute whether it has started."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2P
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.members.door import Door
from trahiv_cli.members.records import OwnersOnly, Readable
from trahiv_cli.swarm.corrections.nodes import RememberingValidator
from trahiv_cli.swarm.corrections.processes import ControlPipe, become_child, die_with_parent, require_start


class CorrectedDHT(hivemind.DHT):
    """`hivemind.DHT` whose process runs services, too, and ends with its parent; each `Node` has one.

    Each event loop of this peer has a copy of `door`. `signing_key` signs this peer's records, which are
    stored in its `place`.
    """

    def __init__(self, *args: Any, door: Door, signing_key: RSAPrivateKey, place: bytes, **more: Any) -> None:
        self.door = door
        self.signing_key = signing_key
        self.place = place
        self.tensors_lock = multiprocessing.Lock()  # over the averaged tensors; the later fork shares it
        self._hosting: list[threading.Thread] = []
        self.loops: list[asyncio.AbstractEventLoop] = []  # of the services in this process
        validators = [RSASignatureValidator(signing_key), OwnersOnly(door.owner), Readable()]
        super().__init__(*args, record_validators=validators, **more)

    def start(self) -> None:
        """MinorityWatch. The child's garbage collector ignores inherited objects.

        Freeing a GPU's tensors would end the child, and inspecting objects would copy their memory pages.
        """
        gc.freeze()
        try:
            super().start()
        finally:
            gc.unfreeze()  # in the parent, where all objects can be freed
        self._outer_pipe: Any = ControlPipe(self._outer_pipe)

    def run(self) -> None:
        """Serve the DHT in its own process until it is shut down."""
        become_child(self._parent_pid)
        # p2p/p2p_daemon.py:207 starts p2pd so that it does not end with this process, and in this process
        # group, where Ctrl-C ends it before this peer has said goodbye.
        asyncio.subprocess.create_subprocess_exec = partial(
            asyncio.subprocess.create_subprocess_exec, preexec_fn=die_with_parent, start_new_session=True
        )
        self._inner_pipe: Any = ControlPipe(self._inner_pipe)
        self._record_validator: Any = RememberingValidator(self._record_validator._validators)
        hivemind.dht.node.P2P = self.door.guarded()
        super().run()
        # A thread that reports its end holds the lock of all futures: killed then, it would never release it.
        for thread in self._hosting:
            thread.join(1.0)

    async def _shutdown(self) -> None:
        if (meeting := getattr(self._node, "meeting", None)) is not None:
            await meeting.close()
        await super()._shutdown()

    def host(self, work: Callable[[CorrectedDHT, Any], None]) -> Any:
        """Do some work in this DHT's process, in a thread of its own; return this end of a pipe to it."""
        ours, theirs = multiprocessing.Pipe()
        self._outer_pipe.send(("_host", [work, theirs], {}))
        theirs.close()
        return ControlPipe(ours)

    async def _host(self, work: Callable[[CorrectedDHT, Any], None], pipe: Any) -> None:
        self._hosting.append(threading.Thread(target=work, args=[self, ControlPipe(pipe)], daemon=True))
        self._hosting[-1].start()

    async def replicate_p2p(self) -> P2P:
        """Make a client of p2pd for a service's event loop, behind a copy of the door."""
        self.loops.append(asyncio.get_running_loop())
        p2p = self.door.another().guarded()
        return await p2p.replicate(self._node.protocol.p2p.daemon_listen_maddr)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the process has started; see `require_start`. On failure, or Ctrl-C, kill it."""
        del timeout  # dht/dht.py:87 gives none
        try:
            require_start(self._ready, self.is_alive)
        except BaseException:
            # A process that reports its failure ends by itself; killed then, it would keep all futures' lock.
            if not (self._ready.done() and self._ready.exception()):
                self.kill()
            self.join(1.0)  # its p2pd ends with it: another try would find the identity in use
            raise
