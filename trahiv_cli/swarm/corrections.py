"""What hivemind 1.1.12 gets wrong, one small correction each, with its reason and its reference.

Every correction names the upstream place (file:line of 1.1.12) and has a test in
`tests/unit/swarm/test_corrections.py` or `tests/swarm/test_corrections.py` that fails once upstream no
longer needs it. The version is pinned in `pyproject.toml`; another one is refused at import.

What is ours by design (how a round is made exact, when a peer may step) is not here but in `optim/`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import gc
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import hivemind
import torch
from google.protobuf.message import DecodeError
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.dht import DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto.dht_pb2 import (
    NOT_FOUND,
    FindRequest,
    FindResponse,
    PingRequest,
    PingResponse,
)
from hivemind.utils import MPFuture, MSGPackSerializer, get_logger, nested_flatten, nested_pack
from hivemind.utils.crypto import RSAPrivateKey

from trahiv_cli.errors import NotAdmitted, RoundFailed, SetupError, SwarmError
from trahiv_cli.swarm.clock import Answer, swarm_time, take_over
from trahiv_cli.swarm.door import Door, GuardedP2P
from trahiv_cli.swarm.download import OF_NO_USE, Report, StateExchange, StateRequest
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.swarm.policy import TAKEN_OUT
from trahiv_cli.swarm.records import (
    MAX_ID_BYTES,
    SIGNATURE_PRIORITY,
    OwnersOnly,
    Quota,
    Readable,
    disbelieve,
    owner_of,
)
from trahiv_cli.swarm.snapshot import (
    FEW_BYTES,
    Rank,
    SharedNumber,
    buffer_bytes,
    copy_into,
    shared_bytes,
    unpacked,
)

CORRECTED_VERSION = "1.1.12"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NODES_ASKED = 3
"""Nodes nearest to a key that are asked for what is stored under it. Five have it, and whoever does not
answer is not among the nearest the next time."""
START_S = 60.0
"""A DHT whose process does not say within this time that it has started is given up. p2pd has 15 s."""
START_LOOK_S = 0.5
HOSTING_END_S = 1.0
"""The DHT's process waits this long for each of its averagers to end, which were told to before it was."""
MAX_MESSAGE_BYTES = 4 * 2**20
"""A message of a stream has at most so many bytes; p2pd has the same limit for calls without one. The longest
of ours are parts of tensors."""
MAX_ANSWER_BYTES = 3 * 2**19
"""One message of the DHT carries at most so many bytes of records: hivemind waits 3 s for an answer, in which
an uplink of 5 Mbit/s sends them."""
AROUND_RECORDS_BYTES = 64
"""MessagePack adds at most so many bytes to the records under one key."""
MOST_FORGED = 32
"""Records of one dictionary that are found to be bad before the rest is left out: who hands on a dictionary
has judged it. To judge one takes 0.3 ms."""
MAX_KEYS = 16
"""One message looks up at most so many keys; hivemind's look up four (dht/node.py:661) of the 16 that it
renews at once."""
RECORDS_REMEMBERED = 2048
SOCKET_FOLDER_PREFIX, UPSTREAM_SOCKETS = "trahiv-", P2P._UNIX_SOCKET_PREFIX
UNREACHABLE = (P2PDaemonError, P2PHandlerError, ConnectionError, TimeoutError)
"""What a call to a peer that is gone, or hangs, ends with."""

logger = get_logger(__name__)

if hivemind.__version__ != CORRECTED_VERSION:
    raise SetupError(
        f"hivemind {hivemind.__version__} is installed, but trahiv corrects {CORRECTED_VERSION} only.",
        hint=f"pip install 'hivemind=={CORRECTED_VERSION}'",
    )


# -- processes ------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that forked it ends.

    hivemind's children are `daemon=True`, which only helps when the parent exits in good order: after kill
    -9, and after a SIGTERM without a handler, the DHT's process and p2pd live on for ever as a ghost peer
    that holds the port and the peer id.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_child(parent_pid: int) -> None:
    """Begin a hivemind process: it dies with its parent, and leaves the parent's signals to the parent.

    Ctrl-C reaches the whole process group, and a fork inherits its parent's handlers: without this the
    DHT's process would try to leave in good order by itself, in the middle of the goodbye.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != parent_pid:  # it died between fork and prctl
        os._exit(1)
    if (folder := _folders.get(parent_pid)) is not None:
        (folder / "children").mkdir(exist_ok=True)
        (folder / "children" / str(os.getpid())).touch()
    asyncio.create_task = keep_tasks(asyncio.create_task)


def renew_thread_pool() -> None:
    """Have torch replace the threads that this process lost when it was forked, while it has just this one.

    caffe2/utils/threadpool/pthreadpool-cpp.cc does that when a thread first asks for them, without a lock. A
    round's threads ask at once, and what one of them raises ("Invalid thread pool!") fails the round.
    """
    torch.set_num_threads(torch.get_num_threads())


def keep_tasks(create_task: Callable[..., asyncio.Task[Any]]) -> Callable[..., asyncio.Task[Any]]:
    """Have `asyncio.create_task` hold its tasks until they are done.

    The event loop refers to a task weakly, and dht/dht.py:133 and averaging/averager.py:322 drop theirs: one
    that waits for something that nobody else refers to is collected, and its caller waits for ever.
    """
    held: set[asyncio.Task[Any]] = set()

    def create_and_hold(coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = create_task(coro, **kwargs)
        held.add(task)
        task.add_done_callback(held.discard)
        return task

    return create_and_hold


class _TolerantPipe:
    """The control pipe of a hivemind process, without the messages that can't be read any more.

    A sender that exits takes the socket of its MPFutures along; unpickling such a message raises
    FileNotFoundError or ConnectionResetError, which dht/dht.py:129 answers with three seconds of sleep
    (so that `shutdown` ends "the hard way"), or EOFError, which it does not catch at all.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def recv(self) -> tuple[str, list[Any], dict[str, Any]]:
        try:
            message: tuple[str, list[Any], dict[str, Any]] = self._pipe.recv()
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):
            return "_ignore", [], {}
        return message


class Forked:
    """A process that is forked, whatever start method the program has chosen for its own.

    dht/dht.py:24 is a plain `mp.Process` that can't be pickled, so it dies under spawn and forkserver. Mix in
    before hivemind's class.
    """

    _start_method = "fork"
    _Popen = staticmethod(ForkProcess._Popen)

    def start(self) -> None:
        """Fork. The child's garbage collector leaves alone what it inherits.

        Freeing a GPU's tensors or pinned memory calls CUDA, which ends a forked process; and a collector that
        looks at objects writes to them, so that the child gets memory pages of its own.
        """
        gc.freeze()
        try:
            super().start()  # type: ignore[misc]
        finally:
            gc.unfreeze()  # of the parent, where all can be freed as before


class CorrectedDHT(Forked, hivemind.DHT):
    """`hivemind.DHT` whose process serves averagers, too, ends with its parent, and survives a dead sender.

    dht/node.py:597 asks the 20 nodes nearest to a key, in a swarm all of them, whenever it is looked up, and
    each answers with all that is stored under the key. Here `NODES_ASKED` are.

    Args:
        door: of the swarm. Each event loop of this peer has one like it.
        signing_key: of this peer; what it publishes is signed with it.
        place: of this peer's records (`records.own_place`).
        args: see `hivemind.DHT`.
        kwargs: see `hivemind.DHT`.
    """

    _hosting: list[threading.Thread]
    _inner_pipe: Any
    _node: DHTNode
    _ready: MPFuture[None]
    _record_validator: CompositeValidator

    def __init__(
        self, *args: Any, door: Door, signing_key: RSAPrivateKey, place: bytes, **kwargs: Any
    ) -> None:
        self.door, self.signing_key, self.place = door, signing_key, place
        self.tensors_lock = multiprocessing.Lock()
        """Of what is averaged. It is made here because only a fork can share it."""
        validators = [RSASignatureValidator(signing_key), OwnersOnly(door.owner), Readable()]
        super().__init__(*args, record_validators=validators, **kwargs)

    def run(self) -> None:
        """Serve the DHT in its own process until it is shut down."""
        _become_child(self._parent_pid)
        renew_thread_pool()
        self._hosting = []
        # p2p/p2p_daemon.py:207 starts p2pd with nothing that would end it with us, and in our process
        # group, where Ctrl-C ends it before the goodbye is said.
        asyncio.subprocess.create_subprocess_exec = partial(
            asyncio.subprocess.create_subprocess_exec, preexec_fn=die_with_parent, start_new_session=True
        )
        self._inner_pipe = _TolerantPipe(self._inner_pipe)
        self._record_validator = RememberingValidator(self._record_validator._validators)
        hivemind.dht.node.P2P = GuardedP2P.behind(self.door)
        super().run()
        # One that tells of its end holds the lock of all futures: ended with this process, it would keep it.
        for thread in self._hosting:
            thread.join(HOSTING_END_S)

    def host(self, averager: CorrectedAverager) -> None:
        """Have this DHT's process serve an averager, in a thread of its own.

        averaging/averager.py:150 forks a process for each averager, after the model is loaded: it keeps what
        the model was then in memory, and lives where the DHT lives anyway.
        """
        self._outer_pipe.send(("_host", [averager, averager._inner_pipe], {}))

    async def _host(self, averager: CorrectedAverager, pipe: Any) -> None:
        self._hosting.append(threading.Thread(target=averager.serve, args=[self, pipe], daemon=True))
        self._hosting[-1].start()

    async def replicate_p2p(self) -> P2P:
        """Make a client of p2pd for an averager's event loop; it stands behind a door like this one's."""
        p2p = GuardedP2P.behind(self.door.another())
        return cast(P2P, await p2p.replicate(self._node.protocol.p2p.daemon_listen_maddr))

    async def _ignore(self) -> None:
        """Stand in for a message that could not be read."""

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until it has started.

        dht/dht.py:144 waits forever for a process that was killed or stands still before that.

        Args:
            timeout: in seconds; default: `START_S`.

        Raises:
            SwarmError: it has ended, or needs longer; it is ended then.
            Exception: whatever it told of why it can't start.
        """
        until = time.monotonic() + (START_S if timeout is None else timeout)
        is_under_way = True
        try:
            while is_under_way:
                is_under_way = self.is_alive() and time.monotonic() < until  # before the last look, not after
                with contextlib.suppress(TimeoutError):
                    self._ready.result(timeout=START_LOOK_S)
                    return
        except BaseException as error:
            # A process that reports an error ends by itself. Killed while it does, it would keep the lock of
            # all futures. After Ctrl-C it would go on.
            if not isinstance(error, Exception):
                self.kill()
                self.join()
                forget_futures()
            raise
        self.kill()
        self.join()
        raise SwarmError(
            "This peer's DHT process ended, or stood still, while it started; nothing was changed.",
            hint="start again with the same command",
        )

    def get(self, *args: Any, **keywords: Any) -> Any:
        """Look a key up; see `hivemind.DHT.get`."""
        return super().get(*args, **{"beam_size": NODES_ASKED} | keywords)


_initial_peers: ContextVar[Collection[PeerID]] = ContextVar("_initial_peers", default=())
"""The peers through which the node that is being made enters a swarm."""


class CorrectedNode(DHTNode):
    """`DHTNode` that searches for nobody where it knows everybody, and says when it was refused.

    dht/node.py:464 asks the 20 nodes nearest to a key which others they know, whenever a record is stored,
    and each answers with all that is stored under the key. A routing table with fewer nodes than fit into a
    bucket has all that were ever heard of and still answer.
    """

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTNode:
        """Make a node; see `DHTNode`.

        Raises:
            NotAdmitted: peers answered, and none of them took this one for a member.
        """
        maddrs = map(str, kwargs.get("initial_peers") or ())
        _initial_peers.set({PeerID.from_base58(maddr.rpartition("/p2p/")[2]) for maddr in maddrs})
        try:
            return cast(DHTNode, await super().create(*args, **kwargs))
        except RuntimeError as error:
            door: Door = hivemind.dht.node.P2P.door
            if not (door.was_refused or door.was_open):
                raise
            raise _why_refused(door) from error

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        *args: Any,
        node_to_peer_id: dict[DHTID, PeerID] | None = None,
        found_callback: Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]] | None = None,
        **keywords: Any,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """Search; see `DHTNode`. For a store where everybody is known, call back at once, find nothing."""
        known = node_to_peer_id or {}
        if found_callback is None or len(known) >= self.protocol.bucket_size:
            keywords |= {"found_callback": found_callback, "node_to_peer_id": node_to_peer_id}
            return cast(Any, await super().find_nearest_nodes(queries, *args, **keywords))
        for query in queries:
            await found_callback(query, sorted(known, key=query.xor_distance), set())
        return {}


def not_admitted(objection: str) -> NotAdmitted:
    """Say to a peer that has a certificate why it is no member (see `Policy.objection`)."""
    if objection == TAKEN_OUT:
        return NotAdmitted(
            "The owner of this swarm has taken this peer out. What it trained is kept, and goes to nobody.",
            hint="ask the owner; who is invited again comes with another folder: --output-dir DIR",
        )
    return NotAdmitted(
        f"The swarm does not take this peer for a member: {objection or 'its invitation is to another one'}.",
        hint="ask the owner, or a member, for a fresh invitation",
    )


def _why_refused(door: Door) -> NotAdmitted:
    if door.is_open:
        return NotAdmitted(
            "The swarm is closed: it answers members alone.",
            hint="ask a member for its invitation, and type: trahiv join --peer trahiv1:...",
        )
    if door.was_open:
        return NotAdmitted(
            "That swarm is open to everybody, and this peer belongs to a closed one. Nobody was joined.",
            hint="to join it all the same, give it a folder of its own with --output-dir DIR, and an address",
        )
    return not_admitted(door.objection)


class CorrectedProtocol(DHTProtocol):
    """`DHTProtocol` of a node that takes over the time of the swarm that it enters, and drops bad records.

    dht/protocol.py:126 ends a node that is more than 3 s apart from one of its `initial_peers`. Here it takes
    over the time of most of them, and does without the others.
    dht/protocol.py:420 refuses a whole dictionary for one record in it: whoever gets a bad one into an answer
    hides all others. What a peer may store has no limit, nor what it may answer, which dht/node.py:837 puts
    among what is stored here (`records.Quota`). Nor has a message with what is stored (dht/protocol.py:355,
    :395), of which p2pd takes 4 MiB: who gets no answer forgets the node. dht/protocol.py:304 writes ids of
    any number and length in base58, which takes hours for 4 MiB.
    """

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTProtocol:
        """Make a protocol; see `DHTProtocol`. It asks for the time before its node pings anybody."""
        protocol = cast(CorrectedProtocol, await super().create(*args, **kwargs))
        await protocol._take_over_time(_initial_peers.get())
        return protocol

    @cached_property
    def _quota(self) -> Quota:
        return Quota()

    def get_stub(self, peer: PeerID) -> Any:
        """Return what calls another node; see `DHTProtocol`. An answer with ids that are none is refused."""
        stub = super().get_stub(peer)

        async def rpc_ping(request: PingRequest, **options: Any) -> PingResponse:
            answer = await stub.rpc_ping(request, **options)
            require(len(answer.peer.node_id) in (0, DHTID.HASH_NBYTES))
            return answer

        async def rpc_find(request: FindRequest, **options: Any) -> FindResponse:
            answer = await stub.rpc_find(request, **options)
            for result in answer.results:
                require(len(result.nearest_peer_ids) <= self.bucket_size)
                require(all(len(one) <= MAX_ID_BYTES for one in result.nearest_peer_ids))
            return answer

        def require(is_met: bool) -> None:
            if not is_met:
                disbelieve(str(peer), "it answers with ids that are none")
                raise P2PHandlerError(f"peer {peer} answered with ids that are none")

        return SimpleNamespace(rpc_ping=rpc_ping, rpc_store=stub.rpc_store, rpc_find=rpc_find)

    async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
        """Answer with what is stored under keys, as far as it fits; see `DHTProtocol`."""
        del request.keys[MAX_KEYS:]
        response = await super().rpc_find(request, context)
        left = MAX_ANSWER_BYTES
        for result in response.results:
            left -= len(result.value)
            if left < 0:
                result.type, result.value = NOT_FOUND, b""
        return response

    async def call_store(
        self,
        peer: PeerID,
        keys: Sequence[DHTID],
        values: Sequence[Any],
        expiration_time: Any,
        subkeys: Any = None,
        in_cache: Any = None,
    ) -> list[bool] | None:
        """Have another node store records; see `DHTProtocol`. A new one is handed as many keys as fit."""
        if subkeys is None and len(keys) > 1:  # what is left out its owners bring: they publish it again
            sizes = accumulate(len(self.serializer.dumps(value)) for value in values)
            fits = sum(size <= MAX_ANSWER_BYTES for size in sizes)
            keys, values, expiration_time = keys[:fits], values[:fits], expiration_time[:fits]
        stored = await super().call_store(peer, keys, values, expiration_time, subkeys, in_cache)
        return cast("list[bool] | None", stored)

    def _validate_record(
        self, key_bytes: bytes, subkey_bytes: bytes, value_bytes: bytes, expiration_time: float
    ) -> bool:
        record = DHTRecord(key_bytes, subkey_bytes, value_bytes, expiration_time)
        is_kept = self._quota.has_room(record) and super()._validate_record(
            key_bytes, subkey_bytes, value_bytes, expiration_time
        )
        if is_kept:
            self._quota.count(record)
        return is_kept

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        bad, num_forged = [], 0
        with dictionary.freeze():
            for subkey, (value, expires) in dictionary.items():
                record = key_bytes, self.serializer.dumps(subkey), value, expires
                if num_forged >= MOST_FORGED or not self._validate_record(*record):
                    bad.append(subkey)
                    num_forged += self._quota.has_room(DHTRecord(*record))  # so it was judged
        for subkey in bad:
            del dictionary[subkey]
        return True

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """Ping; see `DHTProtocol`. One that upstream would end this node for counts as not there."""
        # Of two that meet later, both of them alone, one keeps its time.
        gives_way = not strict and self.p2p.peer_id.to_base58() > peer.to_base58()
        if gives_way and not self.routing_table.uid_to_peer_id:
            await self._take_over_time([peer])
        try:
            return cast("DHTID | None", await super().call_ping(peer, validate=validate, strict=strict))
        except ValidationError as error:
            logger.warning(f"Peer {peer} is not entered by: {error}")
            return None

    async def _take_over_time(self, peers: Iterable[PeerID]) -> None:
        """Ask peers for the time, all at once, and go by what they answer."""
        answers = await asyncio.gather(*map(self._ask_for_time, peers))
        if seconds := take_over(answer for answer in answers if answer is not None):
            logger.warning(f"The swarm's time is taken over: this machine's was {-seconds:+.1f} s off.")

    async def _ask_for_time(self, peer: PeerID) -> Answer | None:
        asked_at = swarm_time()
        try:
            answer = await self.get_stub(peer).rpc_ping(PingRequest(), timeout=self.wait_timeout)
        except UNREACHABLE:
            return None
        return Answer(answer.dht_time, asked_at, swarm_time())


class RememberingValidator(CompositeValidator):
    """`CompositeValidator` that judges the same record once, and names who signed a bad one.

    dht/protocol.py:424 judges every record of a dictionary anew in every answer, also of a search for where
    to store one. Each answer has the signed reports of all peers: with sixteen, that kept two cores busy.

    Args:
        validators: see `CompositeValidator`.
    """

    def __init__(self, validators: Iterable[RecordValidatorBase] = ()) -> None:
        self._verdict = lru_cache(RECORDS_REMEMBERED)(self._judge)
        super().__init__(validators)

    def extend(self, validators: Iterable[RecordValidatorBase]) -> None:
        """Add validators; records that were judged without them are judged again."""
        self._verdict.cache_clear()
        super().extend(validators)

    def validate(self, record: DHTRecord) -> bool:
        """Say whether a record is valid, which depends on nothing but its bytes."""
        return self._verdict(record)

    def _judge(self, record: DHTRecord) -> bool:
        is_good = super().validate(record)
        before = [one for one in self._validators if one.priority >= SIGNATURE_PRIORITY]
        if not is_good and before and CompositeValidator(before).validate(record):  # its owner signed it
            disbelieve(str(owner_of(unpacked(record.subkey))), "it publishes what nobody can read")
        return is_good


class CorrectedControl(StepControl):
    """`StepControl` that is cancelled before its averager is told so, and not after.

    averaging/control.py:169 wakes the DHT's process first. If that looks before the state is set, it
    takes the step for one that goes on (averaging/averager.py:441), and looks for a group for as long as it
    takes: with what this peer claimed of older gradients, and beside its next round.
    """

    def cancel(self) -> bool:
        """Cancel; see `StepControl`."""
        is_cancelled = MPFuture.cancel(self)
        super().cancel()
        return is_cancelled


def forget_futures() -> None:
    """Make hivemind's futures work again after children were killed; those that are pending never end.

    All of a program's processes answer each other's futures under one lock, through one pipe each
    (utils/mpfuture.py:81): who is killed within may leave the one held and half a message in the other. Call
    it when no child is left.
    """
    MPFuture.reset_backend()
    MPFuture()  # the first one sets the backend up for its class: a subclass (`StepControl`) for itself alone


_folders: dict[int, Path] = {}
"""By process id, of this process and of those that it was forked from."""


def private_folder() -> Path:
    """Make the folder of this process and its children for what is there as long as they are, once.

    p2p/p2p_daemon.py:74 puts hivemind's sockets directly into /tmp under random names, and multiprocessing
    has some by which processes hand each other pipes. Who is killed leaves them, and the shared memory, if
    torch's process that keeps it is killed, too. By the folder's name it can be told whose they were; what
    belonged to processes that are gone is swept here, and what belongs to this one when it ends.
    """
    if os.getpid() in _folders:
        return _folders[os.getpid()]
    for stale in Path("/tmp").glob(f"{SOCKET_FOLDER_PREFIX}*-*"):
        pid = stale.name.removeprefix(SOCKET_FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _sweep(stale, pid)
    for manager in Path(tempfile.gettempdir()).glob("torch-shm-dir-*/manager.sock"):
        if _is_deserted(manager):
            shutil.rmtree(manager.parent, ignore_errors=True)
    # Not tempfile's default folder: a unix socket's path may have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=f"{SOCKET_FOLDER_PREFIX}{os.getpid()}-", dir="/tmp"))
    _folders[os.getpid()] = folder
    cast(Any, multiprocessing.process.current_process())._config.setdefault("tempdir", str(folder))
    # After all else: multiprocessing removes its sockets, then its own folder, at -100.
    multiprocessing.util.Finalize(None, _sweep, args=(folder, str(os.getpid())), exitpriority=-100)
    return folder


def _sweep(folder: Path, pid: str) -> None:
    """Remove a private folder, and the shared memory of its process and that one's children."""
    for one in (pid, *(child.name for child in folder.glob("children/*"))):
        for memory in Path("/dev/shm").glob(f"torch_{one}_*"):  # lib/libshm/alloc_info.h
            memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_deserted(address: Path) -> bool:
    """Whether nobody listens at a unix socket any more."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(address))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def private_sockets() -> Path:
    """Make a folder for hivemind's unix sockets and have hivemind use it.

    The sockets of averagers are never removed; with a folder for them, leaving takes one `rmtree`.

    Returns:
        The folder, for `remove_sockets` when the DHT is closed. Call this before the first DHT is made.
    """
    folder = Path(tempfile.mkdtemp(dir=private_folder(), prefix=""))
    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
    return folder


def remove_sockets(folder: Path) -> None:
    """Remove a folder of `private_sockets`; if hivemind uses it, have it use its own place again."""
    shutil.rmtree(folder, ignore_errors=True)
    if P2P._UNIX_SOCKET_PREFIX == f"/unix{folder}/":
        P2P._UNIX_SOCKET_PREFIX = UPSTREAM_SOCKETS


# -- averagers ------------------------------------------------------------------------------------


class CorrectedAverager(DecentralizedAverager):
    """Corrections that every averager needs; mix in before a concrete averager class.

    What trains has one of these, and the DHT's process another one that serves it (`CorrectedDHT.host`).
    """

    dht: CorrectedDHT
    _inner_pipe: Any
    _running_groups: dict[bytes, Any]
    _allow_state_sharing: Any
    _kwargs: dict[str, Any]
    _ready: MPFuture[None]
    _ended: MPFuture[None] | None = None

    SERVED: ClassVar[tuple[str, ...]] = (
        *("prefix", "client_mode", "mode", "bandwidth", "schema_hash", "total_size", "tensor_infos"),
        *("matchmaking_kwargs", "allreduce_kwargs", "next_chunk_timeout", "shutdown_timeout"),
        *("state_compression", "_averaged_tensors", "_averaging_alpha", "_allreduce_timeout"),
        *("_allow_state_sharing", "_running_groups", "_parent_pid", "_ready", "_ended"),
    )
    """The attributes that the one which serves needs of the other. Each class names its own."""

    rpc_download_state: Any = None
    """Not served: averaging/averager.py:583 sends all in one stream, which nobody checks, and which begins
    anew when it breaks off (issues 504 and 653). `StateExchange` has its own."""

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
        self.dht.host(self)

    def serve(self, dht: CorrectedDHT, pipe: Any) -> None:
        """Serve this averager until it is shut down; in a thread of the DHT's process.

        Args:
            dht: of this process.
            pipe: the averager's control pipe.
        """
        assert self._ended is not None
        self.dht, self._inner_pipe = dht, _TolerantPipe(pipe)
        try:
            self._run_internal()
        finally:
            self._ended.set_result(None)

    async def _ignore(self) -> None:
        """Stand in for a message that could not be read."""

    async def _declare_for_download_periodically(self) -> None:
        """Leave it: who has which state is in the reports on progress."""

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start.

        averaging/averager.py:334 ignores SIGINT in the *parent*, so that the child inherits it.
        """
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the DHT's process serves it.

        Raises:
            SwarmError: that has ended, or needs longer than `timeout` seconds (default: `START_S`).
        """
        until = time.monotonic() + (START_S if timeout is None else timeout)
        while self.is_alive() and time.monotonic() < until:
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                self._ready.result(timeout=START_LOOK_S)
                return
        raise SwarmError(
            "This peer's DHT process ended, or stood still, while it took over an averager.",
            hint="start again with the same command",
        )

    def is_alive(self) -> bool:
        """Whether the DHT's process serves it."""
        return self._ended is not None and not self._ended.done() and self.dht.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is served no more."""
        if self._ended is not None:
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                self._ended.result(timeout)

    def terminate(self) -> None:
        """Leave it to the end of the DHT's process."""

    async def _shutdown(self, timeout: float | None) -> None:
        await super()._shutdown(timeout)
        await self._p2p.shutdown()

    # -- what `Vitals` asks ---------------------------------------------------------------------------

    def pulse(self) -> MPFuture[None]:
        """Ask for a sign of life."""
        future: MPFuture[None] = MPFuture()
        self._outer_pipe.send(("_pulse", [], {"future": future}))
        return future

    async def _pulse(self, future: MPFuture[None]) -> None:
        future.set_result(None)

    def pids(self) -> list[int]:
        """Return the id of the process that serves it."""
        return [self.dht.pid] if self.dht.pid else []


class CorrectedGradientAverager(CorrectedAverager, GradientAverager):
    """`GradientAverager` with no state to share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"allow_state_sharing": False, "warn": False}))


class CorrectedStateAverager(StateExchange, CorrectedAverager, TrainingStateAverager):
    """`TrainingStateAverager` that gives away whole states only, and adopts them whole or not at all.

    Hold `lock_state` while weights, optimizer state and `local_epoch` change together.
    """

    local_epoch: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lock_state = StateLock()
        super().__init__(*args, **kwargs)
        self.lock_state.devices = frozenset(weight.device for weight in self.weights if weight.is_cuda)

    def _make_averaged_parameters(self, main_parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy the weights to host memory where the optimizer is offloaded, and moves the copies.

        optim/state_averager.py:173 copies them everywhere, to average them. Here no weights are averaged.
        """
        return super()._make_averaged_parameters(main_parameters) if self.offload_optimizer else ()

    def _init_averaged_tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def _init_tensor_infos(self) -> Sequence[CompressionInfo]:
        return ()

    @property
    def rank(self) -> Rank:
        """Orders the states of a run: a greater one is further."""
        return self.local_epoch, b""

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters that the inner optimizer moves; copies in host memory where it is offloaded."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def common_tensors(self) -> list[torch.Tensor]:
        """The tensors of a state that are the same for all peers of its step: weights first, then others."""
        return [*self.weights, *self.extra_tensors]

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[CompressionInfo]]:
        """Copy the state of one step for joiners.

        optim/state_averager.py:600 hands out the live tensors, which the next optimizer step changes
        while they are being sent, and `local_epoch`, which `step` raises before the weights follow. Nor are
        they handed over one by one: each would take two open files of this process. The lock is held for a
        copy to host memory and nothing else: meanwhile no step can be taken.

        Returns:
            Metadata, one buffer with all tensors as stored (see `snapshot.copy_into`), and their infos.
        """
        _, tensors, _ = self._live_state()
        flat = shared_bytes(buffer_bytes(tensors))
        with torch.no_grad(), self.lock_state:
            metadata, tensors, roles = self._live_state()
            copy_into(flat, tensors, self.lock_state.changes)
        infos = [
            CompressionInfo.from_tensor(tensor, key=name, role=role)
            for tensor, (name, role) in zip(tensors, roles, strict=True)
        ]
        return metadata, [flat], infos

    def _live_state(self) -> tuple[dict[str, Any], list[torch.Tensor], list[tuple[Any, TensorRole]]]:
        """Gather metadata and the tensors themselves, weights first, with their names and roles."""
        common = self.common_tensors()
        layout: list[dict[str, Any]] = []
        statistics: list[torch.Tensor] = []
        for value in nested_flatten(self.optimizer.state_dict()):
            if isinstance(value, torch.Tensor):
                layout.append({"type": "tensor", "index": len(statistics)})
                statistics.append(value)
            else:
                layout.append({"type": "value", "value": value})
        num_weights = len(self.parameter_names)
        roles = [(name, TensorRole.PARAMETER) for name in self.parameter_names]
        roles += [(index, TensorRole.UNSPECIFIED) for index in range(len(common) - num_weights)]
        roles += [(index, TensorRole.OPTIMIZER) for index in range(len(statistics))]
        metadata = {"rank": list(self.rank), "epoch": self.local_epoch, "optimizer_metadata": layout}
        return metadata, [*common, *statistics], roles

    def load_state_from_peers(
        self,
        *,
        donors: Sequence[str],
        rank: Rank,
        lowest: Rank,
        silence_s: float,
        report: Report = lambda *told: None,
    ) -> bool:
        """Download the state that most others offer and adopt it, whole or not at all.

        Args:
            donors: ids, base58, of peers that may have it.
            rank: that it shall have at least, if they can.
            lowest: that it must have.
            silence_s: the download fails if nothing comes for so long.
            report: told about progress.

        Returns:
            Whether a state was adopted; False if no peer offers one that is far enough, and believed.

        Raises:
            RoundFailed: nothing came for too long, or what came is not the state of this run; nothing was
                changed.
        """
        _, tensors, _ = self._live_state()
        limit_bytes = 2 * buffer_bytes(tensors) + FEW_BYTES  # codecs for many small tensors have headers
        wish = StateRequest(tuple(donors), rank, lowest, limit_bytes, silence_s)
        loaded = self.fetch_state(wish, report)
        if loaded is None:
            return False
        try:
            return self.adopt_state(*loaded, lowest)
        except RoundFailed:
            disbelieve(str(loaded[0].get("donor", "")), OF_NO_USE)
            raise

    def adopt_state(self, metadata: dict[str, Any], tensors: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Adopt a state, whole or not at all.

        optim/state_averager.py:630 loads the optimizer's state before it looks at the weights, takes a
        stream that broke off for a whole one, and does not say whether anything was loaded.

        Args:
            metadata: what `get_current_state` gave of it, and `donor`.
            tensors: weights, extra tensors and the optimizer's, on the CPU.
            lowest: rank that it must have.

        Returns:
            Whether it was adopted; False if it is not welcome.

        Raises:
            RoundFailed: it is not the state of this run; nothing was changed.
        """
        targets = self.common_tensors()
        weights, statistics = tensors[: len(targets)], tensors[len(targets) :]
        layout, step = metadata.get("optimizer_metadata"), metadata.get("epoch")
        if not isinstance(step, int) or not isinstance(layout, (list, tuple)):
            raise RoundFailed("A peer sent a state without a step or without its optimizer's layout.")
        if [t.shape for t in weights] != [t.shape for t in targets]:
            raise RoundFailed("The state that a peer sent has other shapes than this model, or broke off.")
        if not all(bool(tensor.isfinite().all()) for tensor in weights):
            raise RoundFailed("The weights that a peer sent are not finite.")
        if not self.is_welcome(metadata, weights, lowest):
            return False
        with torch.no_grad(), self.lock_state:
            try:
                adopt_optimizer_state(self.optimizer, layout, statistics)
            except ValueError as error:
                raise RoundFailed(f"A peer sent a state that is not whole, or not ours: {error}.") from error
            for target, tensor in zip(targets, weights, strict=True):
                target.copy_(tensor)
            self.local_epoch = step
            self.take_note(metadata)
            self._update_scheduler()
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        return True

    def is_welcome(self, metadata: dict[str, Any], common: Sequence[torch.Tensor], lowest: Rank) -> bool:
        """Whether a state is to be adopted.

        Args:
            metadata: what is small in it.
            common: its tensors that stand for `common_tensors`.
            lowest: rank that it must have.
        """
        del common
        return bool(metadata["epoch"] >= lowest[0])

    def take_note(self, metadata: dict[str, Any]) -> None:
        """Take note of what a state that was adopted says of itself; `lock_state` is held."""

    def _update_scheduler(self) -> None:
        """Move the learning-rate schedule to `local_epoch`."""
        self.move_schedule(self.local_epoch)

    def move_schedule(self, step: int) -> None:
        """Set the learning rates of a step.

        optim/state_averager.py:703 gets there one `scheduler.step()` at a time, which a donor that
        claims step 10^9 turns into a frozen process.
        """
        if self.scheduler is not None and self.scheduler._step_count != step + 1:
            self.scheduler.last_epoch = step - 1
            self.scheduler._step_count = step
            self.scheduler.step()


@torch.no_grad()
def adopt_optimizer_state(
    optimizer: torch.optim.Optimizer, layout: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> None:
    """Adopt what `dump_optimizer_state` gave, in the memory that the optimizer's state has already.

    optim/state_averager.py:732 has the state's tensors replaced: bitsandbytes' paged ones by others that stay
    on the GPU, bytes by floats in any other optimizer, and all of them are there twice meanwhile. It does
    not notice tensors that are of another dtype, or too many.

    Args:
        optimizer: its state is there (`assemble.initialize_state`); tensors keep dtype, device and memory.
        layout: says of each element whether it is a value or a tensor.
        tensors: those of the layout, on the CPU.

    Raises:
        ValueError: this is not the state of such an optimizer over such parameters; nothing was changed.
    """
    try:
        given = [tensors[e["index"]] if e["type"] == "tensor" else e["value"] for e in layout]
    except (LookupError, TypeError) as error:
        raise ValueError("parts of the optimizer's state are missing") from error
    own = list(nested_flatten(optimizer.state_dict()))
    kinds = [_kind(value) for value in own]
    num_tensors = sum(isinstance(value, torch.Tensor) for value in own)
    if [_kind(value) for value in given] != kinds or len(tensors) != num_tensors:
        raise ValueError("the optimizer's state has another layout, or tensors of other shapes or types")
    states = {param: _tensors_in(state) for param, state in optimizer.state.items()}
    groups = [_tensors_in(group) for group in optimizer.param_groups]
    values = [torch.empty(0) if isinstance(value, torch.Tensor) else value for value in given]
    optimizer.load_state_dict(nested_pack(values, structure=optimizer.state_dict()))
    for param, held in states.items():
        optimizer.state[param].update(held)
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group.update(held)
    for mine, theirs in zip(own, given, strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(theirs)


def _kind(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # What is no number is a setting, which all peers have alike.
    return ("a number", math.isfinite(value)) if is_number else (type(value), value)


def _tensors_in(holder: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in holder.items() if isinstance(value, torch.Tensor)}


def drain(*averagers: DecentralizedAverager, quiet_s: float = 0.7) -> None:
    """Let averagers fall silent before they are shut down.

    An averager that exits with a request under way leaves futures in the DHT process's pipe that can't
    be read any more (see `_TolerantPipe`).

    Args:
        averagers: those that are about to be shut down.
        quiet_s: how long their last requests may take; 0.7 s cost no hard end in 12 tries.
    """
    for averager in averagers:
        averager._allow_state_sharing.value = False  # the setter would send one more message
    time.sleep(quiet_s)


# -- module-wide ----------------------------------------------------------------------------------


async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
    """Receive a message of a stream; see `P2P`.

    p2p/p2p_daemon.py:378 takes as many bytes as the sender says that there are: one that says 10 TB has this
    process grow for as long as it sends.

    Raises:
        ConnectionError: the message is longer than `MAX_MESSAGE_BYTES`; none of it was read.
    """
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes, where {MAX_MESSAGE_BYTES} are the most")
    return await reader.readexactly(length)


async def receive_protobuf(kind: type[Any], reader: asyncio.StreamReader) -> tuple[Any, Any]:
    """Receive a message of a stream; see `P2P`.

    p2p/p2p_daemon.py:396 raises what protobuf raises of bytes that are no message. No caller expects that, so
    whoever sends such bytes would be asked again and again.

    Raises:
        ConnectionError: what came can't be read.
    """
    try:
        return await _receive_protobuf(kind, reader)
    except (DecodeError, TypeError) as error:
        raise ConnectionError(f"a message that can't be read: {error}") from error


_receive_protobuf = P2P.receive_protobuf


def pack_dictionary(dictionary: DictionaryDHTValue) -> bytes:
    """Pack the records under a key for a message: those first that have been there for longest.

    dht/storage.py:22 packs all of them, however many there are; see `CorrectedProtocol`.
    """
    items, left = [], MAX_ANSWER_BYTES - AROUND_RECORDS_BYTES
    for subkey, (value, expires) in dictionary.items():
        items.append([subkey, value, expires])
        left -= len(MSGPackSerializer.dumps(items[-1]))
        if left < 0:
            del items[-1]
            break
    content = [dictionary.maxsize, dictionary.latest_expiration_time, items]
    return bytes(MSGPackSerializer.dumps(content))


def apply() -> None:
    """Apply the corrections that nobody asks for by name. Call once, before the first fork.

    utils/timed_storage.py:13 takes the machine's clock for the swarm's, see `clock.py`.
    """
    P2P.receive_raw_data = staticmethod(receive_raw_data)
    P2P.receive_protobuf = staticmethod(receive_protobuf)
    DictionaryDHTValue.packb = pack_dictionary
    hivemind.dht.dht.DHTNode = CorrectedNode
    hivemind.dht.node.DHTProtocol = CorrectedProtocol
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # each stream is one, and 1,024 are usual
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and getattr(module, "get_dht_time", None) is time.time:
            vars(module)["get_dht_time"] = swarm_time
    atexit.register(close_event_loop)
    start_memory_manager()


def start_memory_manager() -> None:
    """Have torch start its process that keeps shared memory, out of Ctrl-C's reach.

    lib/libshm/core.cpp waits in a busy loop, without an end, for one that Ctrl-C ended while it started. It
    inherits that SIGINT is blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        shared_bytes(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close_event_loop() -> None:
    """Close the event loop of this thread, if it has one that does not run.

    utils/mpfuture.py:107 makes one in the main thread, and nobody closes it: at the interpreter's exit its
    sockets may go first, and then a traceback ends what a person sees ("Invalid file descriptor: -1").
    """
    with contextlib.suppress(RuntimeError):  # there is none, or it runs
        asyncio.get_event_loop().close()
