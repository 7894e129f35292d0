"""Blocking code on a virtual clock: its threads are greenlets of one event loop, its waits take no time.

The optimizer, its tracker and its averagers are written for threads and processes that wait. Here each of
their threads, and each of their processes, is a greenlet; whoever would wait lets the loop go on until what
it waits for has come to pass, or its time is over. So a run is a single thread: what happens next depends on
nothing but the seed, and only one part of a peer runs at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet
from hivemind.averaging.control import StepControl
from hivemind.utils import MPFuture

from tests.simulation.network import VirtualLoop

STARTED_AT = 1000.0
"""The virtual clocks' time when the loop begins: hivemind subtracts from them."""


class WouldBlock(RuntimeError):
    """Something in the event loop waits for what only the event loop can bring."""


class Strand:
    """A thread, or a process, of the simulation.

    Args:
        strands: all of the loop.
        work: what it does.
    """

    def __init__(self, strands: Strands, work: Callable[[], object]) -> None:
        self._strands, self._work = strands, work
        self._waiting: list[Callable[[], None]] = []
        self._greenlet = greenlet(self._run, parent=strands.hub)
        self._greenlet.gr_context = contextvars.copy_context()
        self.is_over = False
        strands.on_new(self)

    def begin(self) -> None:
        """Run until it waits for the first time. Call in the loop."""
        if not self.is_over:
            self._greenlet.switch()

    def kill(self) -> None:
        """End it where it stands. Call in the loop."""
        self.is_over = True
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it is over."""
        if not self.is_over:
            self._strands.park(timeout_s, self._waiting.append)

    def _run(self) -> None:
        try:
            self._work()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - whoever looks at it decides
            self._strands.errors.append(error)
        self.is_over = True
        for wake in self._waiting:
            wake()


class Strands:
    """All strands of one loop. Make it in the greenlet that runs the loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.hub = loop, getcurrent()
        self.errors: list[BaseException] = []
        """What strands ended with."""
        self.on_new: Callable[[Strand], None] = lambda strand: None
        """Told of each strand, in the context in which it was made."""

    def now(self) -> float:
        """Return the time of all clocks, in seconds."""
        return STARTED_AT + self.loop.now

    def spawn(self, work: Callable[[], object]) -> Strand:
        """Make a strand that begins as soon as the loop comes to it."""
        strand = Strand(self, work)
        self.loop.call_soon(strand.begin)
        return strand

    def park(self, timeout_s: float | None, register: Callable[[Callable[[], None]], None]) -> bool:
        """Wait in the present strand.

        Args:
            timeout_s: for so long at most; None: for ever.
            register: is given what ends the wait.

        Returns:
            Whether the wait was ended, rather than over.
        """
        me, loop = getcurrent(), self.loop
        if me is self.hub:
            raise WouldBlock
        is_over = False

        def go_on(is_woken: bool) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                me.switch(is_woken)

        timer = None if timeout_s is None else loop.call_later(max(0.0, timeout_s), go_on, False)
        register(lambda: loop.call_soon(go_on, True))
        try:
            return bool(self.hub.switch())
        finally:
            is_over = True
            if timer is not None:
                timer.cancel()

    def sleep(self, seconds: float) -> None:
        """Stand in for `time.sleep`."""
        self.park(seconds, lambda wake: None)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Stand in for `asyncio.run` in a strand: the loop that runs already does it."""
        task = self.loop.create_task(coroutine)
        if not task.done():
            self.park(None, lambda wake: task.add_done_callback(lambda _: wake()))
        return task.result()

    @contextmanager
    def in_place_of_threads(self) -> Iterator[None]:
        """Have all blocking code of this thread run by strands within the block."""
        own = threading.get_ident()
        by_thread: dict[threading.Thread, Strand] = {}

        def here(stands_in: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
            def choose(*args: Any, **kwargs: Any) -> Any:
                return (stands_in if threading.get_ident() == own else real)(*args, **kwargs)

            return choose

        def start(thread: threading.Thread) -> None:
            by_thread[thread] = self.spawn(thread.run)
            thread._started.set()
            thread._is_stopped = True  # as far as the interpreter is concerned

        def join(thread: threading.Thread, timeout: float | None = None) -> None:
            by_thread[thread].join(timeout)

        def is_alive(thread: threading.Thread) -> bool:
            return thread in by_thread and not by_thread[thread].is_over

        def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            waiter = _Waiter()
            condition._waiters.append(waiter)
            saved = condition._release_save()
            try:
                is_notified = self.park(timeout, waiter.attach)
            finally:
                condition._acquire_restore(saved)
                if waiter in condition._waiters:
                    condition._waiters.remove(waiter)
            return is_notified

        def clock_gettime(clock: int) -> float:
            del clock
            return self.now()

        patches = [
            (time, "monotonic", self.now),
            (time, "perf_counter", self.now),
            (time, "clock_gettime", clock_gettime),
            (time, "sleep", self.sleep),
            (threading.Thread, "start", start),
            (threading.Thread, "join", join),
            (threading.Thread, "is_alive", is_alive),
            (threading.Condition, "wait", wait),
            (asyncio, "run", self.run),
        ]
        with ExitStack() as stack:
            for owner, name, stands_in in patches:
                stack.enter_context(mock.patch.object(owner, name, here(stands_in, getattr(owner, name))))
            yield


class _Waiter:
    """What a condition has of somebody who waits for it; see `threading.Condition.notify`."""

    def attach(self, wake: Callable[[], None]) -> None:
        self.release = wake


class Lock:
    """Stands in for the locks that are held while somebody waits: of threads, and of processes."""

    def __init__(self, strands: Strands) -> None:
        self._strands, self._is_held = strands, False
        self._waiting: list[Callable[[], None]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock`."""
        while self._is_held:
            if not blocking:
                return False
            is_free = self._strands.park(None if timeout < 0 else timeout, self._waiting.append)
            if not is_free and self._is_held:
                return False
        self._is_held = True
        return True

    def release(self) -> None:
        """See `threading.Lock`."""
        self._is_held = False
        for wake in self._waiting:  # whoever comes first has it
            wake()
        self._waiting.clear()

    def locked(self) -> bool:
        """See `threading.Lock`."""
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """The same, which its holder can take again."""

    def __init__(self, strands: Strands) -> None:
        super().__init__(strands)
        self._holder: Any = None
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.RLock`."""
        if self._holder is not getcurrent():
            if not super().acquire(blocking, timeout):
                return False
            self._holder = getcurrent()
        self._times += 1
        return True

    def release(self) -> None:
        """See `threading.RLock`."""
        self._times -= 1
        if not self._times:
            self._holder = None
            super().release()


class PipeEnd:
    """One end of a pipe between two processes; see `multiprocessing.Pipe`."""

    other: PipeEnd

    def __init__(self, strands: Strands) -> None:
        self._strands, self._came = strands, deque[Any]()
        self._on_message: Callable[[], object] | None = None
        self._waiting: list[Callable[[], None]] = []

    @classmethod
    def pair(cls, strands: Strands, duplex: bool = True) -> tuple[PipeEnd, PipeEnd]:
        """Make both ends."""
        del duplex
        one, other = cls(strands), cls(strands)
        one.other, other.other = other, one
        return one, other

    def send(self, message: Any) -> None:
        """Hand a message to the other end, as it is."""
        there = self.other
        if isinstance(message, tuple) and isinstance(message[-1], dict):
            call, given, named = message
            message = call, given, {name: _copied(value) for name, value in named.items()}
        there._came.append(message)
        for wake in there._waiting:
            wake()
        there._waiting.clear()
        if there._on_message is not None:
            self._strands.loop.call_soon(there._on_message)

    def recv(self) -> Any:
        """Wait for a message."""
        while not self._came:
            self._strands.park(None, self._waiting.append)
        return self._came.popleft()

    def poll(self) -> bool:
        """Whether a message is there."""
        return bool(self._came)

    def fileno(self) -> PipeEnd:
        """Return what `Loop.add_reader` knows this end by."""
        return self

    def on_message(self, act: Callable[[], object]) -> None:
        """Have something done whenever a message comes."""
        self._on_message = act


def _copied(value: Any) -> Any:
    return Copy(value) if isinstance(value, StepControl) else value


class Copy:
    """A step's control as a process has it that it was sent to: with futures of its own; see `StepControl`.

    Args:
        control: of the process that made it.
    """

    def __init__(self, control: StepControl) -> None:
        vars(self).update(_control=control, _trigger=None, _cancel=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._control, name, value)

    def attach(self, trigger: MPFuture[None], cancel: MPFuture[None]) -> None:
        """Set what the process that made the step tells this one by."""
        vars(self).update(_trigger=trigger, _cancel=cancel)

    @property
    def triggered(self) -> bool:
        """Whether the exchange may begin."""
        return bool(self._trigger.done())

    async def wait_for_trigger(self) -> None:
        """Wait until it may."""
        await self._trigger

    async def wait_for_cancel(self) -> None:
        """Wait until the step is cancelled."""
        await self._cancel


class Loop:
    """What a process takes for an event loop of its own."""

    def __init__(self, strands: Strands) -> None:
        self._strands = strands

    def add_reader(self, end: PipeEnd, act: Callable[[], object]) -> None:
        """See `asyncio.AbstractEventLoop`."""
        end.on_message(act)

    def run_until_complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """See `asyncio.AbstractEventLoop`."""
        return self._strands.run(coroutine)
