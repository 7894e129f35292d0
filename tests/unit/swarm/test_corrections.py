"""Each correction does its work, and hivemind still needs it.

A test `..._upstream_still_...` runs hivemind's own code and expects its failure: when it fails, upstream
is fixed and the correction can go.
"""

import asyncio
import gc
import importlib.util
import inspect
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import socket
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import bitsandbytes
import hivemind
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.compression import TensorRole
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager, dump_optimizer_state, load_optimizer_state
from hivemind.p2p import P2P, PeerID
from hivemind.proto.dht_pb2 import (
    FOUND_DICTIONARY,
    NOT_FOUND,
    FindRequest,
    FindResponse,
    FindResult,
    NodeInfo,
    PingResponse,
    StoreResponse,
)
from hivemind.utils import MPFuture, MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.mpfuture import UpdateType
from transformers import get_scheduler

from tests.kit.states import state_of
from trahiv_cli.errors import RoundFailed, SetupError, SwarmError
from trahiv_cli.optim import assemble
from trahiv_cli.swarm import corrections, records
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.corrections import (
    MAX_ANSWER_BYTES,
    MAX_KEYS,
    NODES_ASKED,
    CorrectedAverager,
    CorrectedControl,
    CorrectedDHT,
    CorrectedGradientAverager,
    CorrectedNode,
    CorrectedProtocol,
    CorrectedStateAverager,
    Forked,
    RememberingValidator,
    _TolerantPipe,
    adopt_optimizer_state,
)
from trahiv_cli.swarm.door import Door
from trahiv_cli.swarm.download import StateExchange
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.swarm.membership import KEY_BYTES, Owner
from trahiv_cli.swarm.snapshot import Manifest, build_snapshot, read_state, views_of

torch.set_num_threads(1)

HALF_SENT = []
"""Pipes with half a message: open until the end, or hivemind's thread would complain."""

DEAD_PID = 2**22 + 1  # above the kernel's largest pid


def bare(cls, **attributes):
    """Make an instance without its constructor, which forks: the methods under test need none of that."""
    instance = object.__new__(cls)
    instance.__dict__.update(_parent_pid=-1, _closed=False, _popen=None, **attributes)
    return instance


@pytest.fixture
def _sigint_is_restored():
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


# -- the version ----------------------------------------------------------------------------------


def test_another_version_of_hivemind_is_refused_at_import(monkeypatch):
    monkeypatch.setattr(hivemind, "__version__", "1.1.13")
    spec = importlib.util.spec_from_file_location("corrections_again", corrections.__file__)
    with pytest.raises(SetupError, match=r"1\.1\.13") as refused:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert corrections.CORRECTED_VERSION in refused.value.hint


# -- module-wide ----------------------------------------------------------------------------------


# -- control pipes --------------------------------------------------------------------------------


def _fail(error):
    raise error


class Unreadable:
    """Pickles well; unpickling it raises."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _fail, (self.error,)


UNREADABLE = [EOFError(), FileNotFoundError(2, "no such socket"), ConnectionResetError(), RuntimeError()]


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
def test_a_message_that_cannot_be_read_is_skipped(error):
    reader, writer = multiprocessing.Pipe(duplex=False)
    pipe = _TolerantPipe(reader)
    writer.send(Unreadable(error))
    writer.send(("_shutdown", [1], {"wait": True}))
    assert pipe.poll() and pipe.fileno() == reader.fileno()
    assert pipe.recv() == ("_ignore", [], {})
    assert pipe.recv() == ("_shutdown", [1], {"wait": True})


@pytest.mark.parametrize("cls", [CorrectedDHT, CorrectedAverager])
def test_a_skipped_message_has_a_method_to_go_to(cls):
    assert asyncio.run(bare(cls)._ignore()) is None


@pytest.fixture
def serve(monkeypatch, _sigint_is_restored):
    """Run a DHT's process loop here, over a real pipe, with a node that has no network."""

    async def create(**_):
        return SimpleNamespace(protocol=SimpleNamespace(wait_timeout=0.01), shutdown=shut_down)

    async def shut_down():
        ended.append(True)

    ended = []
    monkeypatch.setattr(corrections, "_become_child", lambda parent: None)  # it would end pytest
    monkeypatch.setattr(
        asyncio.subprocess, "create_subprocess_exec", asyncio.subprocess.create_subprocess_exec
    )
    monkeypatch.setattr("hivemind.dht.dht.switch_to_uvloop", asyncio.new_event_loop)
    monkeypatch.setattr("hivemind.dht.dht.DHTNode", SimpleNamespace(create=create))
    monkeypatch.setattr("hivemind.dht.node.P2P", P2P)

    def run(cls, *messages):
        reader, writer = multiprocessing.Pipe(duplex=False)
        for message in messages:
            writer.send(message)
        ready = SimpleNamespace(set_result=lambda _: None, set_exception=_fail)
        fields = {"initial_peers": None, "num_workers": 1, "kwargs": {}}
        fields |= {"_record_validator": CompositeValidator(), "door": Door()}
        dht = bare(cls, _inner_pipe=reader, _ready=ready, _daemon_listen_maddr=None, **fields)
        dht.run()
        return ended == [True]

    return run


def test_a_dht_outlives_an_unreadable_message(serve):
    assert serve(CorrectedDHT, Unreadable(EOFError()), ("_shutdown", [], {}))


def test_upstream_still_lets_an_unreadable_message_end_the_dht(serve):
    with pytest.raises(EOFError):
        serve(hivemind.DHT, Unreadable(EOFError()), ("_shutdown", [], {}))


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "as upstream leaves them"])
def test_a_task_that_nobody_refers_to_ends_all_the_same(is_kept):
    create = corrections.keep_tasks(asyncio.create_task) if is_kept else asyncio.create_task

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


class Counting(RecordValidatorBase):
    """Finds all records valid that are no lies, and counts."""

    judged = 0

    def validate(self, record):
        self.judged += 1
        return record.value != b"lie"


@pytest.mark.parametrize(("value", "is_valid"), [(b"truth", True), (b"lie", False)])
def test_a_record_that_comes_again_is_not_judged_again(value, is_valid):
    counting = Counting()
    validator = RememberingValidator([counting])
    record = DHTRecord(b"key", b"subkey", value, 1.0)
    assert [validator.validate(record), validator.validate(replace(record))] == [is_valid, is_valid]
    assert counting.judged == 1
    assert validator.validate(replace(record, expiration_time=2.0)) == is_valid
    assert counting.judged == 2, "another record"


def test_a_new_validator_judges_what_was_found_valid_before():
    validator = RememberingValidator()
    record = DHTRecord(b"key", b"subkey", b"lie", 1.0)
    assert validator.validate(record)
    validator.extend([Counting()])
    assert not validator.validate(record)


def test_upstream_still_judges_a_record_each_time_that_it_comes():
    counting = Counting()
    validator = CompositeValidator([counting])
    for _ in range(2):
        validator.validate(DHTRecord(b"key", b"subkey", b"truth", 1.0))
    assert counting.judged == 2


# -- how much a message of the DHT carries ----------------------------------------------------------


LONG = bytes(3600)


@pytest.fixture
def _packed_in_part(monkeypatch):
    monkeypatch.setattr(DictionaryDHTValue, "packb", corrections.pack_dictionary)


def stored(num_records, num_keys=1):
    """A node's part of the DHT that holds long records under each of some keys."""
    protocol = CorrectedProtocol(_initialized_with_create=True)
    protocol.node_id, protocol.node_info, protocol.bucket_size = DHTID.generate(), NodeInfo(), 20
    protocol.record_validator, protocol.rpc_ping = None, ignored
    protocol.storage, protocol.cache = DHTLocalStorage(), DHTLocalStorage()
    protocol.routing_table = RoutingTable(protocol.node_id, bucket_size=20, depth_modulo=5)
    keys, expires = [DHTID.generate() for _ in range(num_keys)], get_dht_time() + 60
    for key in keys:
        for number in range(num_records):
            protocol.storage.store_subkey(key, f"{number}".encode(), LONG, expires)
    return protocol, keys


async def ignored(request, context):
    """Take no note of who asks."""


def looked_up(protocol, keys):
    request = FindRequest(keys=[key.to_bytes() for key in keys], peer=NodeInfo(node_id=bytes(20)))
    return asyncio.run(protocol.rpc_find(request, None))


@pytest.mark.usefixtures("_packed_in_part")
@pytest.mark.parametrize("num_records", [3, 426, 2000])
def test_an_answer_has_the_records_that_fit_and_of_these_the_oldest(num_records):
    protocol, keys = stored(num_records)
    [result] = (response := looked_up(protocol, keys)).results
    held = [subkey for subkey, _ in MSGPackSerializer.loads(result.value).items()]
    assert held == [f"{number}".encode() for number in range(len(held))]
    assert len(held) == min(num_records, (MAX_ANSWER_BYTES - 64) // (len(LONG) + 18))
    assert response.ByteSize() < MAX_ANSWER_BYTES + 1000


def test_an_answer_about_many_keys_is_no_longer():
    protocol, keys = stored(200, num_keys=MAX_KEYS + 1)
    response = looked_up(protocol, keys)
    assert response.ByteSize() < MAX_ANSWER_BYTES + 1000 * MAX_KEYS
    types = [result.type for result in response.results]
    assert types == [FOUND_DICTIONARY] * 2 + [NOT_FOUND] * (MAX_KEYS - 2)


def test_a_new_node_is_handed_the_keys_that_fit():
    protocol, keys = stored(200, num_keys=4)
    sent = []

    async def rpc_store(request, timeout):
        sent.append(request)
        return StoreResponse(store_ok=[True] * len(request.keys))

    protocol.rpc_semaphore, protocol.wait_timeout = asyncio.Semaphore(), 3.0
    protocol.get_stub = lambda peer: SimpleNamespace(rpc_store=rpc_store)
    values, expires = zip(*(protocol.storage.get(key) for key in keys), strict=True)
    assert asyncio.run(protocol.call_store(None, keys, values, expires, in_cache=False)) == [True] * 2
    assert sent[0].keys == [key.to_bytes() for key in keys[:2]] and sent[0].ByteSize() < MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    ("ids", "is_taken"),
    [
        ([b"\x12\x20" + bytes(32)] * 20, True),
        ([bytes(34)] * 21, False),
        ([bytes(65)], False),
        ([bytes(2**22)], False),
    ],
    ids=["a bucket", "too many", "too long", "as long as a message"],
)
def test_a_node_that_answers_with_ids_without_an_end_has_not_answered(monkeypatch, ids, is_taken):
    protocol, [key] = stored(0)
    answer = FindResponse(results=[FindResult(type=NOT_FOUND, nearest_peer_ids=ids)])
    answer.results[0].nearest_node_ids.extend(DHTID.generate().to_bytes() for _ in ids)

    async def rpc_find(request, timeout):
        return answer

    plain = SimpleNamespace(rpc_find=rpc_find, rpc_store=None, rpc_ping=None)
    monkeypatch.setattr(hivemind.dht.protocol.DHTProtocol, "get_stub", lambda self, peer: plain)
    protocol.rpc_semaphore, protocol.wait_timeout = asyncio.Semaphore(), 3.0
    found = asyncio.run(protocol.call_find(PeerID(bytes(34)), [key]))
    assert (found is not None) == is_taken


@pytest.mark.parametrize("node_id", [b"", bytes(20), bytes(19), bytes(2**20)], ids=len)
def test_a_node_that_answers_a_ping_with_no_id_of_a_node_has_not_answered(monkeypatch, node_id):
    protocol, _ = stored(0)

    async def rpc_ping(request, timeout):
        return PingResponse(peer=NodeInfo(node_id=node_id), dht_time=swarm_time())

    plain = SimpleNamespace(rpc_find=None, rpc_store=None, rpc_ping=rpc_ping)
    monkeypatch.setattr(hivemind.dht.protocol.DHTProtocol, "get_stub", lambda self, peer: plain)
    protocol.rpc_semaphore, protocol.wait_timeout, protocol.node_info = asyncio.Semaphore(), 3.0, NodeInfo()
    protocol.routing_table.uid_to_peer_id[protocol.node_id] = PeerID(bytes(34))  # it is not alone
    found = asyncio.run(hivemind.dht.protocol.DHTProtocol.call_ping(protocol, PeerID(bytes(34))))
    assert found == (DHTID(0) if node_id == bytes(20) else None)


def test_of_a_dictionary_of_forged_records_no_more_are_judged_than_it_takes_to_know_it():
    protocol, [key] = stored(0)
    judged, keys = [], [RSAPrivateKey() for _ in range(3)]
    protocol.record_validator = SimpleNamespace(
        validate=lambda record: judged.append(record) or record.value == b"good",
        strip_value=lambda record: record.value,
    )
    protocol.__dict__["_quota"] = SimpleNamespace(
        has_room=lambda record: record.value != b"no room", count=lambda record: None
    )
    values = [b"no room"] * 100 + [b"good"] * len(keys) + [b"forged"] * 100
    answer = DictionaryDHTValue()
    for number, value in enumerate(values):
        answer.store(b"%d" % number, value, get_dht_time() + 60)
    assert protocol._validate_dictionary(key.to_bytes(), answer)
    assert [value for _, (value, _) in answer.items()] == [b"good"] * len(keys)
    assert len(judged) == len(keys) + corrections.MOST_FORGED


def test_a_process_may_have_as_many_open_files_as_the_machine_allows():
    corrections.apply()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


def test_what_others_answer_counts_like_what_they_store(monkeypatch):
    monkeypatch.setattr(records, "MAX_OWNERS", 2)
    protocol, [key] = stored(0)
    answer, invitation = DictionaryDHTValue(), Owner(bytes(KEY_BYTES)).invite()
    places = [place_by(invitation) for _ in range(3)]
    for place in places:
        answer.store(place, b"value", get_dht_time() + 60)
    assert protocol._validate_dictionary(key.to_bytes(), answer)
    assert [place for place, _ in answer.items()] == places[:2]
    record = (key.to_bytes(), MSGPackSerializer.dumps(places[2]), b"value", get_dht_time() + 60)
    assert not protocol._validate_record(*record), "it may store none either"


def place_by(invitation):
    """The place of a new peer that came by an invitation."""
    key = RSAPrivateKey()
    peer = PeerID.from_base58(records.owner_of(records.own_place(key)))
    return records.own_place(key, invitation.certify(peer.to_bytes()))


def test_upstream_still_sends_whatever_is_stored():
    source = inspect.getsource(importlib.import_module("hivemind.dht.storage"))
    assert "for key, (value, expiration_time) in self.items()]" in source
    protocol = inspect.getsource(importlib.import_module("hivemind.dht.protocol"))
    assert "self.call_store(peer_id, *zip(*data_to_send), in_cache=False)" in protocol


class Neighbourhood:
    """A node that knows 16 others, none of which holds anything; `asked` are those that it asks.

    Args:
        cls: of the node.
    """

    def __init__(self, cls):
        self.asked = []
        self.others = {DHTID.generate(): number for number in range(16)}
        self.node = cls(_initialized_with_create=True)
        self.node.node_id, self.node.peer_id, self.node.num_workers = DHTID.generate(), None, 4
        table = SimpleNamespace(get_nearest_neighbors=self.nearest)
        size = inspect.signature(DHTNode.create).parameters["bucket_size"].default
        storage = SimpleNamespace(get=lambda key: None, store=lambda *_, **__: True)
        self.node.protocol = SimpleNamespace(
            bucket_size=size, routing_table=table, storage=storage, cache=storage,
            serializer=MSGPackSerializer, record_validator=None, call_store=self.stored,
        )  # fmt: skip
        self.node.num_replicas, self.node.chunk_size = 5, 16
        self.node.cache_on_store = self.node.cache_locally = self.node.reuse_get_requests = False
        self.node.cache_nearest = 0
        self.node._call_find_with_blacklist = self.answer
        self.stored_at = []

    def nearest(self, key, size, exclude):
        """List the others as a routing table does."""
        return sorted(self.others.items(), key=lambda item: key.xor_distance(item[0]))[:size]

    async def answer(self, peer, queries):
        """Answer for another node: it knows of nothing and nobody."""
        self.asked.append(peer)
        return {query: (None, {}) for query in queries}

    async def stored(self, peer, keys, **_):
        """Store for another node."""
        self.stored_at.append(peer)
        return [True] * len(keys)

    def nearest_five(self, key):
        """Return who should hold a key."""
        distance = DHTID.generate(source=key).xor_distance
        return sorted(
            map(self.others.get, sorted([*self.others, self.node.node_id], key=distance)[:5]), key=str
        )


@pytest.mark.parametrize(("cls", "num_asked"), [(CorrectedNode, 0), (DHTNode, 16)])
def test_a_record_is_stored_where_upstream_still_asks_everybody_first(cls, num_asked):
    around = Neighbourhood(cls)
    assert asyncio.run(around.node.store("key", 1, get_dht_time() + 60, subkey="own"))
    assert len(around.asked) == num_asked
    here = [None] if len(around.stored_at) == 4 else []
    assert sorted([*around.stored_at, *here], key=str) == around.nearest_five("key")


def test_few_nodes_are_asked_for_a_record_where_upstream_still_asks_everybody():
    sent = []
    bare(CorrectedDHT, _outer_pipe=SimpleNamespace(send=sent.append)).get("key", return_future=True)
    [(_, _, keywords)] = sent
    for options, num_asked in (({"beam_size": keywords["beam_size"]}, NODES_ASKED), ({}, 16)):
        around = Neighbourhood(DHTNode)
        assert asyncio.run(around.node.get("key", latest=True, **options)) is None
        assert len(around.asked) == num_asked


def test_upstream_still_drops_its_tasks():
    for serve in (hivemind.DHT.run, DecentralizedAverager._run_internal):
        source = inspect.getsource(serve)
        assert source.count("task = asyncio.create_task(getattr(self, method)") == 1
        assert ".add(task)" not in source


# -- sockets --------------------------------------------------------------------------------------


@pytest.fixture
def folder_of(monkeypatch):
    """Make a socket folder as a process with that pid would, and remove it at the end."""
    monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", P2P._UNIX_SOCKET_PREFIX)
    made = []

    def make(pid):
        made.append(corrections.Path(f"/tmp/trahiv-{pid}-test{os.getpid()}"))
        made[-1].mkdir()
        (made[-1] / "p2pd.sock").touch()
        return made[-1]

    yield make
    for folder in made:
        corrections.shutil.rmtree(folder, ignore_errors=True)


def test_sockets_get_a_folder_of_this_process_that_fits_into_a_socket_path(folder_of):
    folder = corrections.private_sockets()
    try:
        assert folder.parent.name.startswith(f"trahiv-{os.getpid()}-")
        assert P2P._UNIX_SOCKET_PREFIX == f"/unix{folder}/"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(f"{folder}/p2pclient-0123456789abcdef0123456789abcdef.sock".encode()) <= 107
    finally:
        corrections.remove_sockets(folder)


def test_a_program_that_goes_on_without_a_swarm_has_hivemind_s_own_place_for_sockets(folder_of):
    first, second = corrections.private_sockets(), corrections.private_sockets()
    corrections.remove_sockets(first)
    assert P2P._UNIX_SOCKET_PREFIX == f"/unix{second}/", "of the node that is still there"
    corrections.remove_sockets(second)
    assert P2P._UNIX_SOCKET_PREFIX == corrections.UPSTREAM_SOCKETS == "/unix/tmp/hivemind-"


@pytest.fixture
def memory_of():
    made = []

    def make(pid):
        made.append(corrections.Path(f"/dev/shm/torch_{pid}_{os.getpid()}_0"))
        made[-1].touch()
        return made[-1]

    yield make
    for memory in made:
        memory.unlink(missing_ok=True)


@pytest.fixture
def end_new_process(monkeypatch):
    """Without a private folder as yet; what it does at its end is done."""
    at_its_end = []
    monkeypatch.setattr(corrections, "_folders", {})
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(
        corrections.multiprocessing.util,
        "Finalize",
        lambda _, call, args, exitpriority: at_its_end.append(partial(call, *args)),
    )
    yield lambda: at_its_end.pop()()
    while at_its_end:
        at_its_end.pop()()


@pytest.mark.usefixtures("end_new_process")
def test_what_processes_that_are_gone_left_is_swept_and_nothing_else(folder_of, memory_of):
    dead, alive, named = folder_of(DEAD_PID), folder_of(os.getppid()), folder_of("scout")
    (dead / "children").mkdir()
    (dead / "children" / str(DEAD_PID + 1)).touch()
    memory = [memory_of(pid) for pid in (DEAD_PID, DEAD_PID + 1, DEAD_PID + 2)]
    corrections.private_folder()
    assert not dead.exists() and alive.exists() and named.exists()
    assert [one.exists() for one in memory] == [False, False, True]


@pytest.mark.usefixtures("end_new_process")
def test_torch_s_sockets_are_swept_where_nobody_listens(monkeypatch, tmp_path):
    monkeypatch.setattr(corrections.tempfile, "gettempdir", lambda: str(tmp_path))
    sockets = []
    for name in ("dead", "alive"):
        (tmp_path / f"torch-shm-dir-{name}").mkdir()
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(str(tmp_path / f"torch-shm-dir-{name}" / "manager.sock"))
    sockets[0].close()
    with sockets[1]:
        sockets[1].listen()
        corrections.private_folder()
    assert [path.name for path in tmp_path.iterdir()] == ["torch-shm-dir-alive"]


@pytest.mark.usefixtures("end_new_process")
def test_the_folder_is_one_for_all_that_a_process_needs():
    folder = corrections.private_folder()
    assert corrections.private_folder() == folder
    assert multiprocessing.util.get_temp_dir() == str(folder)


def test_a_process_whose_memory_nobody_keeps_any_more_leaves_nothing(end_new_process, memory_of):
    folder = corrections.private_folder()
    (folder / "children").mkdir()
    (folder / "children" / str(DEAD_PID)).touch()
    memory = [memory_of(os.getpid()), memory_of(DEAD_PID)]
    end_new_process()
    assert not folder.exists() and not any(one.exists() for one in memory)


def test_upstream_still_puts_its_sockets_into_one_shared_folder(folder_of):
    # This process may have moved them already, so the source is asked.
    spec = importlib.util.find_spec("hivemind.p2p.p2p_daemon")
    assert '_UNIX_SOCKET_PREFIX = "/unix/tmp/hivemind-"' in spec.loader.get_source(spec.name)


# -- starting an averager -------------------------------------------------------------------------


class Host:
    """A DHT whose process serves averagers, as an averager sees it."""

    pid = 4321

    def __init__(self, is_running=True):
        self.served, self.is_running = [], is_running

    def host(self, averager):
        self.served.append(averager)

    def is_alive(self):
        return self.is_running


def test_starting_an_averager_leaves_ctrl_c_alone_and_forks_nothing():
    before, children = signal.getsignal(signal.SIGINT), multiprocessing.active_children()
    averager = bare(CorrectedAverager, dht=Host())
    averager.run_in_background(await_ready=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert averager.dht.served == [averager] and multiprocessing.active_children() == children
    assert averager.is_alive() and averager.pids() == [Host.pid]


def test_an_averager_that_is_served_no_more_is_not_alive():
    averager = bare(CorrectedAverager, dht=Host())
    averager.run_in_background(await_ready=False)
    averager._ended.set_result(None)
    averager.join(timeout=5.0)
    assert not averager.is_alive()


@pytest.mark.parametrize(("is_running", "timeout"), [(True, 0.1), (False, None)])
def test_an_averager_that_nobody_takes_over_is_not_waited_for(is_running, timeout):
    averager = bare(CorrectedAverager, dht=Host(is_running), _ready=MPFuture())
    with pytest.raises(SwarmError, match="took over an averager"):
        averager.run_in_background(timeout=timeout)


def test_upstream_still_forks_and_ignores_ctrl_c_once_an_averager_runs(monkeypatch, _sigint_is_restored):
    assert issubclass(DecentralizedAverager, multiprocessing.Process)
    monkeypatch.setattr(DecentralizedAverager, "start", lambda self: None)
    monkeypatch.setattr(DecentralizedAverager, "wait_until_ready", lambda self, timeout=None: None)
    DecentralizedAverager.run_in_background(bare(DecentralizedAverager))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_what_serves_an_averager_gets_what_it_needs_of_it_alone():
    class Averager(CorrectedAverager):
        SERVED = ("own",)

    needed = {name: name for name in CorrectedAverager.SERVED}
    averager = bare(Averager, own=1, model="not to be sent")
    vars(averager).update(needed)
    assert averager.__getstate__() == needed | {"own": 1}


def test_corrected_averagers_serve_their_own_handlers(monkeypatch):
    for cls in (DecentralizedAverager, GradientAverager, CorrectedGradientAverager):
        monkeypatch.setattr(cls, "_rpc_handlers", cls.__dict__.get("_rpc_handlers"), raising=False)
        monkeypatch.setattr(cls, "_stub_type", None, raising=False)
    DecentralizedAverager._collect_rpc_handlers()
    CorrectedGradientAverager._collect_rpc_handlers()
    assert CorrectedGradientAverager._rpc_handlers is not DecentralizedAverager._rpc_handlers
    assert CorrectedGradientAverager._stub_type.__name__ == "CorrectedGradientAveragerStub"


def test_draining_stops_the_sharing_of_states():
    averagers = [bare(CorrectedAverager, _allow_state_sharing=SimpleNamespace(value=True)) for _ in range(2)]
    corrections.drain(*averagers, quiet_s=0)
    assert not any(averager._allow_state_sharing.value for averager in averagers)


def test_a_forked_process_s_collector_leaves_alone_what_it_inherits():
    class Process:
        def start(self):
            self.num_left_alone = gc.get_freeze_count()

    class Child(Forked, Process):
        pass

    child, before = Child(), gc.get_freeze_count()
    child.start()
    assert child.num_left_alone > before == gc.get_freeze_count()


# -- the state ------------------------------------------------------------------------------------


def state_averager(
    cls=CorrectedStateAverager, step=0, fill=0.0, width=3, lr=0.1, optimizer_cls=torch.optim.AdamW
):
    parameter = torch.nn.Parameter(torch.full((2, width), fill))
    optimizer = optimizer_cls([parameter], lr=lr)
    parameter.grad = torch.full_like(parameter, fill + 0.5)
    optimizer.step()
    return bare(
        cls,
        optimizer=optimizer,
        scheduler=None,
        extra_tensors=(torch.full((4,), fill),),
        parameter_names=("weight",),
        local_epoch=step,
        offload_optimizer=False,
        reuse_tensors=True,
        lock_state=StateLock(),
        lock_averaged_tensors=threading.Lock(),
        get_group_bits=lambda: "0",
    )


def everything(averager):
    """All that a state is, as one comparable value."""
    [group] = averager.optimizer.param_groups
    [parameter] = group["params"]
    statistics = averager.optimizer.state[parameter]
    named = {name: torch.as_tensor(value).tolist() for name, value in statistics.items()}
    return averager.local_epoch, group["lr"], parameter.tolist(), averager.extra_tensors[0].tolist(), named


def test_a_joiner_becomes_what_the_donor_is(download):
    donor, joiner = state_averager(step=5, fill=1.0, lr=0.3), state_averager()
    assert download(joiner, state_of(donor)) is True
    assert everything(joiner) == everything(donor)


def test_the_state_that_is_given_away_does_not_change_any_more():
    donor = state_averager()
    metadata, [flat], infos = donor.get_current_state()
    tensors = views_of(flat, infos)
    before = [tensor.tolist() for tensor in tensors]
    donor.optimizer.step()
    donor.extra_tensors[0].add_(1)
    assert [tensor.tolist() for tensor in tensors] == before
    assert flat.is_shared() and metadata["rank"] == [0, b""]
    roles = [info.role for info in infos]
    assert roles == [TensorRole.PARAMETER, TensorRole.UNSPECIFIED, *[TensorRole.OPTIMIZER] * 3]


def test_no_step_is_taken_while_a_state_is_copied(monkeypatch):
    donor = state_averager()
    held = []

    def copy(*_):
        lock = donor.lock_state._lock
        taken = threading.Thread(target=lambda: held.append(not lock.acquire(blocking=False)))
        taken.start()
        taken.join()

    monkeypatch.setattr(corrections, "copy_into", copy)
    donor.get_current_state()
    assert held == [True]


def test_upstream_s_download_is_not_served():
    for cls in (CorrectedGradientAverager, CorrectedStateAverager):
        cls._collect_rpc_handlers()
        served = {handler.method_name: handler.stream_output for handler in cls._rpc_handlers}
        assert "rpc_download_state" not in served
        ours = {name: streams for name, streams in served.items() if name.endswith("_state")}
        gives = issubclass(cls, StateExchange)
        assert ours == ({"rpc_offer_state": False, "rpc_send_state": True} if gives else {})


def test_upstream_still_gives_away_live_tensors():
    donor = state_averager(cls=TrainingStateAverager)
    _, tensors, _ = donor.get_current_state()
    before = [tensor.tolist() for tensor in tensors]
    donor.optimizer.step()
    assert [tensor.tolist() for tensor in tensors] != before


def test_nothing_is_adopted_without_an_offer(download):
    joiner = state_averager()
    before = everything(joiner)
    assert download(joiner, None) is False
    assert everything(joiner) == before


def test_an_older_state_is_not_adopted(download):
    joiner = state_averager(step=6)
    before = everything(joiner)
    assert download(joiner, state_of(state_averager(step=5, fill=1.0))) is False
    assert everything(joiner) == before


BROKEN = {
    "another model": lambda meta, tensors: state_of(state_averager(width=4)),
    "a stream that broke off": lambda meta, tensors: (meta, tensors[:-1]),
    "one tensor too many": lambda meta, tensors: (meta, [*tensors, torch.zeros(1)]),
    "no tensors": lambda meta, tensors: (meta, []),
    "no step": lambda meta, tensors: ({k: v for k, v in meta.items() if k != "epoch"}, tensors),
    "a step that is no number": lambda meta, tensors: (meta | {"epoch": "5"}, tensors),
    "no layout": lambda meta, tensors: (meta | {"optimizer_metadata": None}, tensors),
    "a shorter layout": lambda meta, t: (meta | {"optimizer_metadata": meta["optimizer_metadata"][1:]}, t),
    "a layout of something else": lambda meta, t: (meta | {"optimizer_metadata": ["?"] * 99}, t),
    "another optimizer": lambda meta, tensors: state_of(
        state_averager(step=5, optimizer_cls=torch.optim.Adagrad)
    ),
    "statistics of another type": lambda meta, t: (meta, [*t[:2], *(s.double() for s in t[2:])]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_state_of_something_else_is_refused_and_nothing_changes(download, broken):
    joiner = state_averager()
    before = everything(joiner)
    given = BROKEN[broken](*state_of(state_averager(step=5, fill=1.0)))
    with pytest.raises(RoundFailed):
        download(joiner, given)
    assert everything(joiner) == before


def test_upstream_still_takes_half_of_a_state(monkeypatch):
    joiner = state_averager(cls=TrainingStateAverager)
    *_, statistics = everything(joiner)
    given = state_of(state_averager(step=5, fill=1.0, width=4))
    monkeypatch.setattr(DecentralizedAverager, "load_state_from_peers", lambda self: given)
    with pytest.raises(RuntimeError, match="size"):
        joiner.load_state_from_peers()
    assert everything(joiner)[-1] != statistics  # the optimizer is the stranger's already


def with_an_8_bit_optimizer(seed):
    """An averager whose optimizer's state is bytes, codebooks, float32 and step counts."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((96, 96), (7,))]
    optimizer = bitsandbytes.optim.AdamW8bit(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
    averager = state_averager(step=seed)
    averager.optimizer, averager.parameter_names = optimizer, ("matrix", "bias")
    return averager, weights


def statistics_of(optimizer):
    layout, tensors = dump_optimizer_state(optimizer)
    return layout, [(tensor.dtype, tensor.tolist()) for tensor in tensors]


@pytest.mark.parametrize("name", assemble.CODECS)
def test_a_codec_of_state_downloads_leaves_the_optimizer_s_state_alone(download, our_codecs, name):
    (donor, given), (joiner, own) = (with_an_8_bit_optimizer(seed) for seed in (5, 0))
    codec = assemble._of_weights_alone(assemble.CODECS[name]())
    metadata, [flat], infos = donor.get_current_state()
    described = MSGPackSerializer.dumps(metadata)
    snapshot = build_snapshot(donor.rank, described, views_of(flat, infos), infos, codec)
    content = torch.frombuffer(snapshot.content, dtype=torch.uint8)
    assert download(joiner, read_state(Manifest.from_bytes(snapshot.described), content)) is True
    assert statistics_of(joiner.optimizer) == statistics_of(donor.optimizer)
    for mine, theirs in zip(own, given, strict=True):
        assert (mine - theirs).norm() <= {"none": 0, "blockwise4": 0.12}.get(name, 0.05) * theirs.norm()
    used = [codec for _, _, codec, _ in snapshot.manifest.tensors]
    assert used[:2] == [assemble.CODECS[name].compression_type] * 2 and not any(used[2:])


def test_adopted_state_lies_where_the_optimizer_s_state_was():
    (donor, [given, _]), (heir, [own, _]) = with_an_8_bit_optimizer(5), with_an_8_bit_optimizer(0)
    held = dict(heir.optimizer.state[own])
    adopt_optimizer_state(heir.optimizer, *dump_optimizer_state(donor.optimizer))
    adopted = heir.optimizer.state[own]
    assert adopted.keys() == held.keys()
    for name in held.keys() - {"step"}:
        assert adopted[name] is held[name]
        assert torch.equal(adopted[name], donor.optimizer.state[given][name])


def test_upstream_still_replaces_the_tensors_of_the_state():
    (donor, _), (heir, [own, _]) = with_an_8_bit_optimizer(5), with_an_8_bit_optimizer(0)
    held = heir.optimizer.state[own]["state1"]
    load_optimizer_state(heir.optimizer, *dump_optimizer_state(donor.optimizer))
    assert heir.optimizer.state[own]["state1"] is not held


# -- copies ---------------------------------------------------------------------------------------


# -- the learning rate's schedule -----------------------------------------------------------------

SCHEDULES = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {},
    "polynomial": {},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr": 0.01},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


def scheduled(cls, name, step):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=3, num_training_steps=12, scheduler_specific_kwargs=SCHEDULES[name]
    )
    averager = bare(cls, scheduler=schedule, local_epoch=step)
    averager._update_scheduler()
    return averager


def place(averager):
    schedule = averager.scheduler
    rates = [group["lr"] for group in schedule.optimizer.param_groups]
    return rates, schedule.get_last_lr(), schedule.last_epoch, schedule._step_count


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_moved_to_where_single_steps_lead(name):
    for step in range(14):
        assert place(scheduled(CorrectedStateAverager, name, step)) == place(
            scheduled(TrainingStateAverager, name, step)
        )


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_goes_on_from_where_it_was_moved_to():
    jumped, walked = (scheduled(cls, "cosine", 5) for cls in (CorrectedStateAverager, TrainingStateAverager))
    for averager in (jumped, walked):
        averager.local_epoch = 7
        averager._update_scheduler()
        averager._update_scheduler()  # there already
    assert place(jumped) == place(walked)


def scheduler_steps(cls, step):
    taken = []
    schedule = SimpleNamespace(_step_count=1, last_epoch=0)
    schedule.step = lambda: taken.append(True) or setattr(schedule, "_step_count", schedule._step_count + 1)
    bare(cls, scheduler=schedule, local_epoch=step)._update_scheduler()
    return len(taken)


def test_a_claimed_step_of_a_billion_takes_one_step_of_the_schedule():
    assert scheduler_steps(CorrectedStateAverager, 10**9) == 1
    assert place(scheduled(CorrectedStateAverager, "linear", 10**9))[0] == [0.0]


def test_upstream_still_takes_every_step_of_the_schedule():
    assert scheduler_steps(TrainingStateAverager, 1000) == 1000


def test_no_schedule_needs_no_move():
    bare(CorrectedStateAverager, scheduler=None, local_epoch=3)._update_scheduler()


# -- at the end -----------------------------------------------------------------------------------


@pytest.fixture
def _no_loop_yet():
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    yield
    corrections.close_event_loop()
    asyncio.set_event_loop_policy(before)


@pytest.mark.usefixtures("_no_loop_yet")
def test_the_event_loop_that_a_future_made_is_closed():
    loop = MPFuture()._loop
    corrections.close_event_loop()
    assert loop.is_closed()


@pytest.mark.usefixtures("_no_loop_yet")
def test_upstream_still_makes_an_event_loop_in_the_main_thread():
    assert not MPFuture()._loop.is_closed()


# -- steps that are cancelled ----------------------------------------------------------------------


def state_when_told(cls):
    """Whether a control of a class is cancelled by the time that its averager is told of it."""
    control = cls(0.0, deadline=1.0, allow_retries=False, weight=1.0, data_for_gather=b"")
    told, trigger = [], MPFuture()
    trigger.set_result(None)
    control.attach(trigger, SimpleNamespace(set_result=lambda _: told.append(control.cancelled())))
    assert control.cancel()
    assert control.cancelled()
    return told


def test_a_step_is_cancelled_before_its_averager_looks():
    assert state_when_told(CorrectedControl) == [True]


def test_upstream_still_wakes_its_averager_before_the_step_is_cancelled():
    assert state_when_told(StepControl) == [False]


# -- futures whose processes were killed -----------------------------------------------------------


@pytest.fixture
def answer_in_another_process():
    """Have a future answered as another process does it, from a thread; its result, within 1 s."""

    def answer(value):
        future = MPFuture()
        thread = threading.Thread(target=future._send_update, args=(UpdateType.RESULT, value), daemon=True)
        thread.start()
        return future.result(timeout=1.0)

    yield answer
    corrections.forget_futures()


@pytest.fixture
def _a_child_was_killed_within_an_answer():
    MPFuture()
    MPFuture._update_lock.acquire()
    HALF_SENT.append(MPFuture._global_sender_pipe)
    os.write(HALF_SENT[-1].fileno(), b"\x00\x00")


@pytest.mark.usefixtures("_a_child_was_killed_within_an_answer")
def test_futures_work_again_after_a_child_was_killed_within_an_answer(answer_in_another_process):
    corrections.forget_futures()
    assert answer_in_another_process("value") == "value"


@pytest.mark.usefixtures("_a_child_was_killed_within_an_answer")
def test_upstream_still_answers_nobody_after_a_child_was_killed_within_an_answer(answer_in_another_process):
    with pytest.raises(TimeoutError):
        answer_in_another_process("value")


@pytest.mark.parametrize(
    ("reset", "is_apart"), [(corrections.forget_futures, False), (MPFuture.reset_backend, True)]
)
def test_a_subclass_of_futures_has_no_backend_apart_as_upstream_s_still_has(reset, is_apart):
    class Subclass(MPFuture):
        pass

    reset()
    Subclass()
    assert ("_global_sender_pipe" in vars(Subclass)) == is_apart
    corrections.forget_futures()


# -- a DHT that does not start ---------------------------------------------------------------------


def test_upstream_still_waits_forever_for_a_dht_that_does_not_start():
    waited = []
    hivemind.DHT.wait_until_ready(
        SimpleNamespace(_ready=SimpleNamespace(result=lambda timeout: waited.append(timeout)))
    )
    assert waited == [None]


# -- messages of streams ----------------------------------------------------------------------------


def received(receive, content):
    """What is made of the bytes of a stream; `ValueError` says how much of them was read."""

    async def run():
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return await receive(reader)

    return asyncio.run(run())


def with_header(length, content):
    return length.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content


@pytest.mark.parametrize("length", [0, 1, corrections.MAX_MESSAGE_BYTES])
def test_a_message_of_a_stream_is_received(length):
    assert received(corrections.receive_raw_data, with_header(length, b"x" * length)) == b"x" * length


def test_a_message_that_claims_to_be_endless_is_refused_before_it_is_read():
    claimed = with_header(10**13, b"x" * 100)
    with pytest.raises(ConnectionError, match="10000000000000 bytes"):
        received(corrections.receive_raw_data, claimed)


def test_upstream_still_believes_whatever_length_a_message_claims():
    source = inspect.getsource(importlib.import_module("hivemind.p2p.p2p_daemon"))
    assert "data = await reader.readexactly(content_length)" in source
