"""hivemind's processes outlive each other's failures, and hivemind still needs our help for it.

A test `..._upstream_still_...`, here and beside, runs hivemind's own code and expects its failure: when the
test fails, upstream is fixed and the correction can go.
"""

import asyncio
import ctypes
import gc
import importlib.util
import inspect
import multiprocessing
import os
import resource
import threading
from contextlib import nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler

import hivemind
import pytest
from hivemind.averaging import DecentralizedAverager
from hivemind.utils import MPFuture
from hivemind.utils.mpfuture import UpdateType

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm import corrections
from trahiv_cli.swarm.corrections import processes
from trahiv_cli.swarm.corrections.processes import ControlPipe, return_freed_memory

HALF_SENT = []
"""Pipes with half a message: open until the end, or hivemind's thread would complain."""


def test_another_version_of_hivemind_is_refused_at_import(monkeypatch):
    monkeypatch.setattr(hivemind, "__version__", "1.1.13")
    spec = importlib.util.spec_from_file_location("corrections_again", corrections.__file__)
    with pytest.raises(SetupError, match=r"1\.1\.13") as refused:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert corrections.CORRECTED_VERSION in refused.value.hint


def test_a_process_may_have_as_many_open_files_as_the_machine_allows():
    corrections.apply()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


# -- messages and tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "upstream still"])
def test_a_message_is_read_when_all_of_it_is_there(is_ours):
    reader, writer = multiprocessing.Pipe(duplex=False)
    os.set_blocking(reader.fileno(), False)  # as uvloop does
    packed = bytes(ForkingPickler.dumps(message := b"x" * 9000))
    sent = len(packed).to_bytes(4, "big") + packed
    os.write(writer.fileno(), sent[:5000])
    rest = threading.Timer(0.05, os.write, (writer.fileno(), sent[5000:]))
    rest.start()
    with nullcontext() if is_ours else pytest.raises(BlockingIOError):
        assert (ControlPipe(reader) if is_ours else reader).recv() == message
    rest.join()


def test_messages_of_several_senders_stay_whole():
    reader, writer = map(ControlPipe, multiprocessing.Pipe(duplex=False))
    messages = [bytes([number]) * 9000 for number in range(4)]
    senders = [
        threading.Thread(target=lambda one=one: [writer.send(one) for _ in range(50)]) for one in messages
    ]
    for sender in senders:
        sender.start()
    assert {reader.recv() for _ in range(4 * 50)} == set(messages)
    for sender in senders:
        sender.join()


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "as upstream leaves them"])
def test_a_task_that_nobody_refers_to_ends_all_the_same(is_kept):
    create = processes.keep_tasks(asyncio.create_task) if is_kept else asyncio.create_task

    async def wait_for_what_only_this_task_knows(ended):
        try:
            await asyncio.get_running_loop().create_future()
        except GeneratorExit:
            ended.append("collected")
            raise

    async def run():
        ended = []
        create(wait_for_what_only_this_task_knows(ended))
        await asyncio.sleep(0)
        gc.collect()
        return ended

    assert asyncio.run(run()) == ([] if is_kept else ["collected"])


def test_upstream_still_drops_its_tasks_and_waits_forever_for_a_process_that_does_not_start():
    for cls, serve in ((hivemind.DHT, "run"), (DecentralizedAverager, "_run_internal")):
        source = inspect.getsource(getattr(cls, serve))
        assert source.count("task = asyncio.create_task(getattr(self, method)") == 1
        assert ".add(task)" not in source
        waiting = inspect.getsource(cls.wait_until_ready)
        assert "timeout: Optional[float] = None" in waiting
        assert waiting.endswith("self._ready.result(timeout=timeout)\n")


# -- futures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_alive", "timeout_s"), [(True, 0.0), (False, None)])
def test_a_process_that_has_ended_or_stands_still_is_not_waited_for(is_alive, timeout_s):
    assert not processes.has_started(MPFuture(), lambda: is_alive, timeout_s)


@pytest.mark.parametrize("is_helped", [True, False], ids=["ours", "upstream still"])
def test_futures_work_again_after_a_child_was_killed_within_an_answer(is_helped):
    MPFuture()
    MPFuture._update_lock.acquire()
    HALF_SENT.append(MPFuture._global_sender_pipe)
    os.write(HALF_SENT[-1].fileno(), b"\x00\x00")
    if is_helped:
        processes.forget_futures()
    future = MPFuture()
    answer = partial(future._send_update, UpdateType.RESULT, "value")  # as another process does
    threading.Thread(target=answer, daemon=True).start()
    with nullcontext() if is_helped else pytest.raises(TimeoutError):
        assert future.result(timeout=1.0) == "value"
    processes.forget_futures()


@pytest.mark.parametrize(
    ("reset", "is_apart"), [(processes.forget_futures, False), (MPFuture.reset_backend, True)]
)
def test_a_subclass_of_futures_has_no_backend_apart_as_upstream_s_still_has(reset, is_apart):
    class Subclass(MPFuture):
        pass

    (MPFuture.reset_backend if is_apart else processes.forget_futures)()
    Subclass()
    assert ("_global_sender_pipe" in vars(Subclass)) == is_apart
    processes.forget_futures()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "as upstream leaves it"])
def test_the_event_loop_that_a_future_made_is_closed(is_closed):
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    loop = MPFuture()._loop
    if is_closed:
        processes.close_event_loop()
    assert loop.is_closed() == is_closed
    processes.close_event_loop()
    asyncio.set_event_loop_policy(before)


class Usage(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    ] + [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def test_a_large_piece_of_memory_goes_back_to_the_machine_when_it_is_freed():
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = (
        Usage,
        ctypes.c_void_p,
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(16 * 2**20))  # from now on glibc takes up to as much for small
    kept = libc.malloc(2**20)
    mapped = libc.mallinfo2().hblkhd
    return_freed_memory()
    piece = libc.malloc(2**20)
    assert libc.mallinfo2().hblkhd >= mapped + 2**20
    libc.free(piece)
    assert libc.mallinfo2().hblkhd == mapped
    libc.free(kept)
