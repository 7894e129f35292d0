"""Blocking code on a virtual clock: its threads are greenlets of one event loop, its waits take no time.

The optimizer, its tracker and its averagers are written for threads and processes that wait. Here each of
their threads, and each of their processes, is a greenlet; whoever would wait lets the loop go on until what
it waits for has come to pass, or its time is over. So a run is a single thread: what happens next depends on
nothing but the seed, and only one part of a peer runs at a time.
"""

import asyncio
import contextvars
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

STARTED_AT = 1000.0  # the virtual clocks' time when the loop begins: hivemind subtracts from them


class Strand:
    """A thread, or a process, of the simulation, and what it does. It is begun and killed in the loop."""

    def __init__(self, strands, work):
        self._strands = strands
        self._work = work
        self._waiting = []
        self._greenlet = greenlet(self._run, parent=strands.hub)
        self._greenlet.gr_context = contextvars.copy_context()
        self.is_over = False
        strands.on_new(self)

    def begin(self):
        """Run until it waits for the first time."""
        if not self.is_over:
            self._greenlet.switch()

    def kill(self):
        """End it where it stands."""
        self.is_over = True
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def join(self, timeout_s=None):
        if not self.is_over:
            self._strands.park(timeout_s, self._waiting.append)

    def _run(self):
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

    def __init__(self, loop):
        self.loop = loop
        self.hub = getcurrent()
        self.errors = []
        """What strands ended with."""
        self.on_new = lambda strand: None
        """Told of each strand, in the context in which it was made."""

    def now(self):
        """Return the time of all clocks, in seconds."""
        return STARTED_AT + self.loop.now

    def spawn(self, work):
        """Make a strand that begins as soon as the loop comes to it."""
        strand = Strand(self, work)
        self.loop.call_soon(strand.begin)
        return strand

    def park(self, timeout_s, register):
        """Wait in the present strand, for so long at most (None: for ever).

        `register` is given what ends the wait. Returns whether it was ended, rather than over.
        """
        me = getcurrent()
        loop = self.loop
        if me is self.hub:
            raise RuntimeError("something in the event loop waits for what only the loop can bring")
        is_over = False

        def go_on(is_woken):
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

    def run(self, coroutine):
        """Stand in for `asyncio.run` in a strand: the loop that runs already does it."""
        task = self.loop.create_task(coroutine)
        if not task.done():
            self.park(None, lambda wake: task.add_done_callback(lambda _: wake()))
        return task.result()

    @contextmanager
    def in_place_of_threads(self):
        """Have all blocking code of this thread run by strands within the block."""
        own = threading.get_ident()
        by_thread = {}

        def here(stands_in, real):
            return lambda *args, **more: (stands_in if threading.get_ident() == own else real)(*args, **more)

        def start(thread):
            by_thread[thread] = self.spawn(thread.run)
            thread._started.set()
            thread._is_stopped = True  # as far as the interpreter is concerned

        patches = [
            (time, "monotonic", self.now),
            (time, "perf_counter", self.now),
            (time, "clock_gettime", lambda clock: self.now()),
            (time, "sleep", lambda seconds: self.park(seconds, lambda wake: None)),
            (threading.Thread, "start", start),
            (threading.Thread, "join", lambda thread, timeout=None: by_thread[thread].join(timeout)),
            (threading.Thread, "is_alive", lambda one: one in by_thread and not by_thread[one].is_over),
            (threading, "_allocate_lock", lambda: Lock(self)),  # by which conditions wait
            (asyncio, "run", self.run),
        ]
        with ExitStack() as stack:
            for owner, name, stands_in in patches:
                stack.enter_context(mock.patch.object(owner, name, here(stands_in, getattr(owner, name))))
            yield


class Lock:
    """Stands in for locks that are held while somebody waits: of threads, and of processes."""

    def __init__(self, strands, is_reentrant=False):
        self._strands = strands
        self._is_reentrant = is_reentrant
        self._holder = None
        self._times = 0
        self._waiting = []

    def acquire(self, blocking=True, timeout=-1):
        while self._times and not (self._is_reentrant and self._holder is getcurrent()):
            if not blocking:
                return False
            is_free = self._strands.park(None if timeout < 0 else timeout, self._waiting.append)
            if not is_free and self._times:
                return False
        self._holder = getcurrent()
        self._times += 1
        return True

    def release(self):
        self._times -= 1
        if not self._times:
            self._holder = None
            for wake in self._waiting:  # whoever comes first has it
                wake()
            self._waiting.clear()

    def locked(self):
        return self._times > 0

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class PipeEnd:
    """One end of a pipe between two processes; see `multiprocessing.Pipe`. It is its own `fileno`."""

    def __init__(self, strands):
        self._strands = strands
        self._came = deque()
        self.on_message = None
        self._waiting = []

    @classmethod
    def pair(cls, strands, duplex=True):
        one = cls(strands)
        other = cls(strands)
        one.other = other
        other.other = one
        return one, other

    def send(self, message):
        there = self.other
        there._came.append(message)
        for wake in there._waiting:
            wake()
        there._waiting.clear()
        if there.on_message is not None:
            self._strands.loop.call_soon(there.on_message)

    def recv(self):
        while not self._came:
            self._strands.park(None, self._waiting.append)
        return self._came.popleft()

    def poll(self):
        return bool(self._came)

    def fileno(self):
        return self


class Loop:
    """What a process takes for an event loop of its own."""

    def __init__(self, strands):
        self.run_until_complete = strands.run

    def add_reader(self, end, act):
        end.on_message = act
