"""One process serves the DHT and this peer's averagers, and reports within a minute whether it has started.

The training process has a `CorrectedDHT` and averagers. Copies of them do the work in the DHT's process; they
receive commands through pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import hivemind
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2P
from hivemind.utils import MPFuture, SerializerBase
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.swarm.corrections.nodes import RememberingValidator
from trahiv_cli.swarm.corrections.processes import ControlPipe, become_child, die_with_parent, require_start
from trahiv_cli.swarm.records import OwnersOnly, Readable
from trahiv_cli.swarm.snapshot import SharedNumber

if TYPE_CHECKING:
    from trahiv_cli.swarm.door import Door

logger = logging.getLogger(__name__)

HOSTING_END_S = 1.0  # for a thread that serves an averager, or a process that failed to start, to end


class CorrectedDHT(hivemind.DHT):
    """`hivemind.DHT` whose process serves averagers, too, and ends with its parent; each `Node` has one.

    Each event loop of this peer has a copy of `door`. `signing_key` signs this peer's records, which are
    stored in its `place`.
    """

    def __init__(self, *args: Any, door: Door, signing_key: RSAPrivateKey, place: bytes, **more: Any) -> None:
        self.door = door
        self.signing_key = signing_key
        self.place = place
        self.tensors_lock = multiprocessing.Lock()  # over the averaged tensors; the later fork shares it
        self._hosting: list[threading.Thread] = []
        self.loops: list[asyncio.AbstractEventLoop] = []  # of the averagers that this process serves
        validators = [RSASignatureValidator(signing_key), OwnersOnly(door.owner), Readable()]
        super().__init__(*args, record_validators=validators, **more)

    def start(self) -> None:
        """Fork. The child's garbage collector ignores inherited objects.

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
            thread.join(HOSTING_END_S)

    async def _shutdown(self) -> None:
        if (meeting := getattr(self._node, "meeting", None)) is not None:
            await meeting.close()
        await super()._shutdown()

    def host(self, averager: CorrectedAverager) -> None:
        """Serve an averager in this DHT's process, in a thread of its own.

        averaging/averager.py:150 forks a process for each, which keeps the model of that moment in memory.
        """
        self._outer_pipe.send(("_host", [averager, averager._inner_pipe], {}))

    async def _host(self, averager: CorrectedAverager, pipe: Any) -> None:
        self._hosting.append(threading.Thread(target=averager.serve, args=[self, pipe], daemon=True))
        self._hosting[-1].start()

    async def replicate_p2p(self) -> P2P:
        """Make a client of p2pd for an averager's event loop, behind a copy of the door."""
        self.loops.append(asyncio.get_running_loop())
        p2p = self.door.another().guarded()
        return await p2p.replicate(self._node.protocol.p2p.daemon_listen_maddr)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the process has started; see `require_start`. On failure, or Ctrl-C, kill it."""
        try:
            require_start(self._ready, self.is_alive, timeout)
        except BaseException:
            # A process that reports its failure ends by itself; killed then, it would keep all futures' lock.
            if not (self._ready.done() and self._ready.exception()):
                self.kill()
            self.join(HOSTING_END_S)  # its p2pd ends with it: another try would find the identity in use
            raise


def give_states(serializer: SerializerBase, pipe: Any, get_current_state: weakref.WeakMethod[Any]) -> None:
    """Copy the state whenever the DHT's process requests it, in a thread of the training process.

    The loop of averaging/averager.py:769 keeps the last state in memory until the next request.
    """
    with contextlib.suppress(EOFError, OSError):
        while (message := pipe.recv())[0] != "_SHUTDOWN" and (copy := get_current_state()) is not None:
            _give_state(serializer, message[1], copy)
            del message, copy  # the future in the message refers to the state


def _give_state(serializer: SerializerBase, future: Any, copy: Callable[[], Any]) -> None:
    try:
        metadata, tensors, infos = copy()
        future.set_result((serializer.dumps(metadata), tuple(tensors), infos))
    except Exception as error:
        logger.warning("The state was not copied for a joiner.", exc_info=True)
        future.set_exception(error)


class CorrectedControl(StepControl):
    """`StepControl` that sets its state to cancelled before it wakes its averager, and not after.

    averaging/control.py:169 wakes the DHT's process first. If that process checks before the state is set,
    the step goes on (averaging/averager.py:441) and looks for a group in parallel with its next round.
    """

    def cancel(self) -> bool:
        """Cancel; see `StepControl`."""
        is_cancelled = MPFuture.cancel(self)
        super().cancel()
        return is_cancelled


class CorrectedAverager(DecentralizedAverager):
    """Corrections that every averager needs; mix in before a concrete averager class.

    `SERVED` are the attributes that are sent to the DHT's process, which serves it. Each class lists its own.
    """

    dht: CorrectedDHT
    _ended: MPFuture[None] | None = None

    SERVED: ClassVar[tuple[str, ...]] = (
        *("prefix", "client_mode", "mode", "bandwidth", "schema_hash", "total_size", "tensor_infos"),
        *("matchmaking_kwargs", "allreduce_kwargs", "next_chunk_timeout", "shutdown_timeout"),
        *("state_compression", "_averaged_tensors", "_averaging_alpha", "_allreduce_timeout"),
        *("_allow_state_sharing", "_running_groups", "_parent_pid", "_ready", "_ended"),
    )

    rpc_download_state: Any = None  # not served: `ExactStateAverager` has its own

    def __init_subclass__(cls) -> None:
        """Clear the cached handlers of each class: p2p/servicer.py:44 would use its parent's."""
        super().__init_subclass__()
        cls._rpc_handlers = cls._stub_type = None

    def __getstate__(self) -> dict[str, Any]:
        served = [name for cls in type(self).__mro__ for name in vars(cls).get("SERVED", ())]
        return {name: getattr(self, name) for name in served}

    def start(self) -> None:
        """Start to serve this averager in the DHT's process."""
        self._allow_state_sharing = SharedNumber(0)
        self._ended = MPFuture()
        self._outer_pipe: Any = ControlPipe(self._outer_pipe)
        self.dht.host(self)

    def serve(self, dht: CorrectedDHT, pipe: Any) -> None:
        """Serve this averager until it is shut down, in a thread of the DHT's process."""
        assert self._ended is not None
        self.dht, self._inner_pipe = dht, ControlPipe(pipe)
        try:
            self._run_internal()
        finally:
            self._ended.set_result(None)

    @staticmethod
    async def fulfil(future: Any, work: Awaitable[Any], nothing: tuple[type[Exception], ...]) -> None:
        """Set a future of the training process to the result of `work`, or to None for a `nothing` error."""
        try:
            future.set_result(await work)
        except nothing as error:
            logger.debug("a request of the training process failed: %r", error)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)  # otherwise the training process would wait for a long time
            raise

    async def _declare_for_download_periodically(self) -> None:
        """Declare nothing: the progress reports show which peer has which state."""

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start; averaging/averager.py:334 ignores SIGINT in the *parent*, so that the child inherits it."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the DHT's process serves this averager; see `require_start`."""
        require_start(self._ready, self.is_alive, timeout)

    def is_alive(self) -> bool:
        """Return whether the DHT's process serves this averager."""
        return self._ended is not None and not self._ended.done() and self.dht.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the DHT's process has stopped serving this averager, for at most `timeout` seconds."""
        if self._ended is not None:
            with contextlib.suppress(TimeoutError):
                self._ended.result(timeout)

    def terminate(self) -> None:
        """Do nothing: the thread of this averager ends with the DHT's process."""

    async def _shutdown(self, timeout: float | None) -> None:
        self.dht.loops.remove(asyncio.get_running_loop())  # so that `show_life` does not miss it
        await super()._shutdown(timeout)
        await self._p2p.shutdown()


def drain(*averagers: DecentralizedAverager, quiet_s: float = 0.7) -> None:
    """Stop sharing states, and wait until averagers have answered: 12 of 12 times they had within 0.7 s."""
    for averager in averagers:
        averager._allow_state_sharing.value = False  # the setter would send one more message
    time.sleep(quiet_s)
