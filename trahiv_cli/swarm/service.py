"""Services: the parts of a peer that work in its DHT's process, beside training.

1. The training process makes a `Service` and a `ServiceHandle`, which sends a copy to the DHT's process.
2. There `serve` runs the copy, in a thread with its own event loop. Other peers call its `rpc_` methods.
3. The handle sends commands through a pipe. Each is a method of the copy; its result comes as a future.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.servicer import ServicerBase
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import switch_to_uvloop

from trahiv_cli.errors import RoundFailed, TrahivError
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.corrections.processes import require_start

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Service(ServicerBase):
    """The base of a service. Its fields are pickled on its way; `start` makes everything that can't be.

    The peers of a run have the same `prefix`. Peers that don't listen (`is_client`) offer no `rpc_` methods.
    """

    WIRE_NAME: ClassVar[str]
    """Part of the names of the calls, and so of the protocol."""

    prefix: str
    is_client: bool

    async def start(self, dht: CorrectedDHT, p2p: P2P, pipe: Any) -> None:
        """Begin to work, in the DHT's process. A message that is sent into `pipe` reaches the handle."""
        self._p2p = p2p

    def stub(self, peer: PeerID) -> Any:
        """Return an object whose `rpc_` methods call this service of another peer."""
        return self.get_stub(self._p2p, peer, namespace=self.prefix)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"{namespace}::{cls.WIRE_NAME}.{method_name}"


class ServiceHandle:
    """The training process's handle of a service, from its start to `shutdown`.

    `give` answers requests of the service, in a thread; its result must be picklable.

    Raises:
        SwarmError: the DHT's process has ended, or does not start the service.
    """

    def __init__(self, dht: CorrectedDHT, service: Service, give: Callable[[], Any] | None = None) -> None:
        self._dht = dht
        self._ended: MPFuture[None] = MPFuture()
        ready: MPFuture[None] = MPFuture()
        self._pipe = dht.host(partial(serve, service, ready, self._ended))
        if give is not None:
            threading.Thread(target=answer_requests, args=[self._pipe, give], daemon=True).start()
        require_start(ready, self.is_alive)

    def is_alive(self) -> bool:
        """Whether the DHT's process runs the service."""
        return not self._ended.done() and self._dht.is_alive()

    def send(self, command: str, *arguments: Any) -> None:
        """Call a method of the service without waiting for it."""
        self._pipe.send((command, arguments, None))

    def request(self, command: str, *arguments: Any) -> MPFuture[Any]:
        """Call a method of the service; return a future of its result, or of a `TrahivError`."""
        future: MPFuture[Any] = MPFuture()
        self._pipe.send((command, arguments, future))
        return future

    def shutdown(self, timeout_s: float) -> None:
        """End the service; wait for that, but no longer than `timeout_s`. Safe to call twice."""
        if self.is_alive():
            self._pipe.send(None)
            with contextlib.suppress(TimeoutError):
                self._ended.result(timeout_s)


def answer_requests(pipe: Any, give: Callable[[], Any]) -> None:
    """Answer each request of a service with the result of `give`, until the service ends."""
    with contextlib.suppress(EOFError, OSError):
        while (future := pipe.recv()) is not None:
            try:
                future.set_result(give())
            except Exception as error:
                logger.warning("The state was not copied for a joiner.", exc_info=True)
                future.set_exception(error)
            del future  # it refers to the result


def serve(
    service: Service, ready: MPFuture[None], ended: MPFuture[None], dht: CorrectedDHT, pipe: Any
) -> None:
    """Run a service until its handle ends it, in a thread of the DHT's process."""
    loop = switch_to_uvloop()
    has_come = asyncio.Event()
    loop.add_reader(pipe.fileno(), has_come.set)
    try:
        loop.run_until_complete(_work(service, dht, pipe, ready, has_come))
    finally:
        ended.set_result(None)


async def _work(
    service: Service, dht: CorrectedDHT, pipe: Any, ready: MPFuture[None], has_come: asyncio.Event
) -> None:
    try:
        p2p = await dht.replicate_p2p()
        await service.start(dht, p2p, pipe)
        if not service.is_client:
            await service.add_p2p_handlers(p2p, namespace=service.prefix)
    except Exception as error:  # noqa: BLE001 - the training process raises it
        ready.set_exception(error)
        return
    ready.set_result(None)
    async for command, arguments, future in _commands(pipe, has_come):
        asyncio.create_task(_obey(getattr(service, command)(*arguments), future))
    pipe.send(None)  # ends the thread of `answer_requests`
    dht.loops.remove(asyncio.get_running_loop())  # so that `show_life` does not miss it
    if not service.is_client:
        await service.remove_p2p_handlers(p2p, namespace=service.prefix)
    await p2p.shutdown()


async def _commands(pipe: Any, has_come: asyncio.Event) -> AsyncIterator[Any]:
    """Yield the commands of the training process until it sends None."""
    while True:
        await has_come.wait()
        has_come.clear()
        while pipe.poll():
            if (command := pipe.recv()) is None:
                return
            yield command


async def _obey(work: Awaitable[Any], future: MPFuture[Any] | None) -> None:
    """Do the work of a command, and hand its result, or its error, to the training process.

    Errors are such that the training process can read them: utils/mpfuture.py:198 drops others, and the
    caller would wait forever.
    """
    result = None
    failure: BaseException | None = None
    try:
        result = await work
    except (TrahivError, AllreduceException, asyncio.CancelledError) as error:
        failure = error
    except Exception as error:
        logger.warning("A service of this peer failed.", exc_info=True)
        failure = RoundFailed(f"{type(error).__name__}: {error}")
    if future is None:
        return
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller has given up
        if isinstance(failure, asyncio.CancelledError):
            future.cancel()
        elif failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)
