"""One process serves the DHT and this peer's averagers, and says within a minute whether it has started.

The process that trains has a `CorrectedDHT` and averagers. Copies of them do the work in the DHT's process;
pipes tell them what to do.
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

HOSTING_END_S = 1.0  # the DHT's process waits so long for each of its averagers, which were told before it


class CorrectedDHT(hivemind.DHT):
    """`hivemind.DHT` whose process serves averagers, too, and ends with its parent.

    Each event loop of this peer has a `door` like that which is given; `signing_key` signs its records, which
    stand in its `place`.
    """

    def __init__(self, *args: Any, door: Door, signing_key: RSAPrivateKey, place: bytes, **more: Any) -> None:
        self.door = door
        self.signing_key = signing_key
        self.place = place
        self.tensors_lock = multiprocessing.Lock()  # over what is averaged; made here, as a fork shares it
        self._hosting: list[threading.Thread] = []
        self.loops: list[asyncio.AbstractEventLoop] = []  # of the averagers that this process serves
        validators = [RSASignatureValidator(signing_key), OwnersOnly(door.owner), Readable()]
        super().__init__(*args, record_validators=validators, **more)

    def start(self) -> None:
        """Fork. The child's garbage collector leaves alone what it inherits.

        Freeing a GPU's tensors would end the child, and looking at objects would give it pages of its own.
        """
        gc.freeze()
        try:
            super().start()
        finally:
            gc.unfreeze()  # of the parent, where all can be freed as before
        self._outer_pipe: Any = ControlPipe(self._outer_pipe)

    def run(self) -> None:
        """Serve the DHT in its own process until it is shut down."""
        become_child(self._parent_pid)
        # p2p/p2p_daemon.py:207 starts p2pd with nothing that would end it with us, and in our process
        # group, where Ctrl-C ends it before the goodbye is said.
        asyncio.subprocess.create_subprocess_exec = partial(
            asyncio.subprocess.create_subprocess_exec, preexec_fn=die_with_parent, start_new_session=True
        )
        self._inner_pipe: Any = ControlPipe(self._inner_pipe)
        self._record_validator: Any = RememberingValidator(self._record_validator._validators)
        hivemind.dht.node.P2P = self.door.guarded()
        super().run()
        # One that tells of its end holds the lock of all futures: ended with this process, it would keep it.
        for thread in self._hosting:
            thread.join(HOSTING_END_S)

    async def _shutdown(self) -> None:
        if (meeting := getattr(self._node, "meeting", None)) is not None:
            await meeting.close()
        await super()._shutdown()

    def host(self, averager: CorrectedAverager) -> None:
        """Have this DHT's process serve an averager, in a thread of its own.

        averaging/averager.py:150 forks a process for each, which keeps in memory what the model was then.
        """
        self._outer_pipe.send(("_host", [averager, averager._inner_pipe], {}))

    async def _host(self, averager: CorrectedAverager, pipe: Any) -> None:
        self._hosting.append(threading.Thread(target=averager.serve, args=[self, pipe], daemon=True))
        self._hosting[-1].start()

    async def replicate_p2p(self) -> P2P:
        """Make a client of p2pd for an averager's event loop; it stands behind a door like this one's."""
        self.loops.append(asyncio.get_running_loop())
        p2p = self.door.another().guarded()
        return await p2p.replicate(self._node.protocol.p2p.daemon_listen_maddr)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until it has started; see `require_start`. If it has not, it is killed, also after Ctrl-C."""
        try:
            require_start(self._ready, self.is_alive, timeout)
        except BaseException:
            # One that says why it fails ends by itself; killed meanwhile, it would keep all futures' lock.
            if not (self._ready.done() and self._ready.exception()):
                self.kill()
                self.join()
            raise


def give_states(serializer: SerializerBase, pipe: Any, get_current_state: weakref.WeakMethod[Any]) -> None:
    """Copy the state whenever the DHT's process asks for it, in a thread of the one that trains.

    The loop of averaging/averager.py:769 holds the last state that it gave until the next is asked for.
    """
    with contextlib.suppress(EOFError, OSError):
        while (message := pipe.recv())[0] != "_SHUTDOWN" and (copy := get_current_state()) is not None:
            _give_state(serializer, message[1], copy)
            del message, copy  # its future has the state


def _give_state(serializer: SerializerBase, future: Any, copy: Callable[[], Any]) -> None:
    try:
        metadata, tensors, infos = copy()
        future.set_result((serializer.dumps(metadata), tuple(tensors), infos))
    except Exception as error:
        logger.warning("The state was not copied for a joiner.", exc_info=True)
        future.set_exception(error)


class CorrectedControl(StepControl):
    """`StepControl` that is cancelled before its averager is told so, and not after.

    averaging/control.py:169 wakes the DHT's process first. If that looks before the state is set, the step
    goes on (averaging/averager.py:441) and looks for a group beside its next round.
    """

    def cancel(self) -> bool:
        """Cancel; see `StepControl`."""
        is_cancelled = MPFuture.cancel(self)
        super().cancel()
        return is_cancelled


class CorrectedAverager(DecentralizedAverager):
    """Corrections that every averager needs; mix in before a concrete averager class.

    `SERVED` are the attributes that travel to the DHT's process, which serves it. Each class names its own.
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
        """Have each class find its own handlers: p2p/servicer.py:44 would take those of a parent for them."""
        super().__init_subclass__()
        cls._rpc_handlers = cls._stub_type = None

    def __getstate__(self) -> dict[str, Any]:
        served = [name for cls in type(self).__mro__ for name in vars(cls).get("SERVED", ())]
        return {name: getattr(self, name) for name in served}

    def start(self) -> None:
        """Have the DHT's process serve this averager."""
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
        """Give the training process what comes of `work`, and None for an error that means: nothing came."""
        try:
            future.set_result(await work)
        except nothing as error:
            logger.debug("nothing came of what was asked for: %r", error)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)  # else whoever asked would wait for a long time
            raise

    async def _declare_for_download_periodically(self) -> None:
        """Declare nothing: who has which state is in the reports on progress."""

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start; averaging/averager.py:334 ignores SIGINT in the *parent*, so that the child inherits it."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the DHT's process serves it; see `require_start`."""
        require_start(self._ready, self.is_alive, timeout)

    def is_alive(self) -> bool:
        """Say whether the DHT's process serves it."""
        return self._ended is not None and not self._ended.done() and self.dht.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is served no more, for at most `timeout` seconds."""
        if self._ended is not None:
            with contextlib.suppress(TimeoutError):
                self._ended.result(timeout)

    def terminate(self) -> None:
        """Leave it to the end of the DHT's process."""

    async def _shutdown(self, timeout: float | None) -> None:
        self.dht.loops.remove(asyncio.get_running_loop())  # nobody expects a sign of life of it any more
        await super()._shutdown(timeout)
        await self._p2p.shutdown()


def drain(*averagers: DecentralizedAverager, quiet_s: float = 0.7) -> None:
    """Let averagers fall silent before they are shut down: 12 of 12 times they had answered in 0.7 s."""
    for averager in averagers:
        averager._allow_state_sharing.value = False  # the setter would send one more message
    time.sleep(quiet_s)
