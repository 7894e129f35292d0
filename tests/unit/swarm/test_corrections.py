"""Each correction does its work, and hivemind still needs it.

A test `..._upstream_still_...` runs hivemind's own code and expects its failure: when it fails, upstream
is fixed and the correction can go.
"""

import asyncio
import importlib.util
import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import bitsandbytes
import hivemind
import numpy as np
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.compression import CompressionInfo, deserialize_torch_tensor, quantization
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager, dump_optimizer_state, load_optimizer_state
from hivemind.p2p import P2P
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming
from transformers import get_scheduler

from trahiv_cli.errors import RoundFailed, SetupError
from trahiv_cli.optim import assemble
from trahiv_cli.swarm import corrections
from trahiv_cli.swarm.corrections import (
    CorrectedAverager,
    CorrectedDHT,
    CorrectedGradientAverager,
    CorrectedStateAverager,
    _copy_alone,
    _TolerantPipe,
    adopt_optimizer_state,
)

torch.set_num_threads(1)

CODECS = {
    "uniform8": (quantization.Uniform8BitQuantization, 0.02),
    "quantile8": (quantization.Quantile8BitQuantization, 0.05),
    "blockwise8": (quantization.BlockwiseQuantization, 0.02),
}
DEAD_PID = 2**22 + 1  # above the kernel's largest pid


def bare(cls, **attributes):
    """Make an instance without its constructor, which forks: the methods under test need none of that."""
    instance = object.__new__(cls)
    instance.__dict__.update(_parent_pid=-1, _closed=False, _popen=None, **attributes)
    return instance


@pytest.fixture
def _applied(monkeypatch):
    monkeypatch.setattr(quantization, "np", np)
    monkeypatch.setattr(GroupKeyManager, "get_averagers", GroupKeyManager.get_averagers)
    corrections.apply()


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


# -- 8-bit codecs ---------------------------------------------------------------------------------


def round_trip(name, tensor):
    codec = CODECS[name][0]()
    return codec.extract(codec.compress(tensor, CompressionInfo.from_tensor(tensor)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.searchsorted")
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "tensor",
    [torch.linspace(-3, 5, 4100).view(41, 100), torch.linspace(-1, 1, 64).bfloat16(), torch.zeros(9)],
    ids=["float32", "bfloat16", "zeros"],
)
@pytest.mark.usefixtures("_applied")
def test_an_8_bit_codec_gives_back_what_it_took(name, tensor):
    back = round_trip(name, tensor)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    error = (back.float() - tensor.float()).norm()
    assert error <= CODECS[name][1] * tensor.float().norm()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", CODECS)
def test_upstream_still_cannot_read_an_8_bit_tensor_under_this_numpy(name, monkeypatch):
    monkeypatch.setattr(quantization, "np", np)
    with pytest.raises(TypeError, match="0-dimensional"):
        round_trip(name, torch.linspace(-3, 5, 300))


def test_numpy_keeps_its_other_ways_for_the_codecs():
    numpy = corrections._NumpyWithScalarHeaders()
    two = np.array([3, 4], dtype=np.int64).tobytes()
    assert numpy.frombuffer(two, count=1, dtype=np.int64) == 3
    assert numpy.frombuffer(two, count=1, dtype=np.int64).shape == ()
    assert numpy.frombuffer(two, count=2, dtype=np.int64).tolist() == [3, 4]
    assert numpy.frombuffer(two, dtype=np.uint8).shape == (16,)
    assert numpy.float32 is np.float32


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

    def run(cls, *messages):
        reader, writer = multiprocessing.Pipe(duplex=False)
        for message in messages:
            writer.send(message)
        ready = SimpleNamespace(set_result=lambda _: None, set_exception=_fail)
        fields = {"initial_peers": None, "num_workers": 1, "kwargs": {}, "_record_validator": None}
        dht = bare(cls, _inner_pipe=reader, _ready=ready, _daemon_listen_maddr=None, **fields)
        dht.run()
        return ended == [True]

    return run


def test_a_dht_outlives_an_unreadable_message(serve):
    assert serve(CorrectedDHT, Unreadable(EOFError()), ("_shutdown", [], {}))


def test_upstream_still_lets_an_unreadable_message_end_the_dht(serve):
    with pytest.raises(EOFError):
        serve(hivemind.DHT, Unreadable(EOFError()), ("_shutdown", [], {}))


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
        assert folder.name.startswith(f"trahiv-{os.getpid()}-")
        assert P2P._UNIX_SOCKET_PREFIX == f"/unix{folder}/"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(f"{folder}/p2pclient-0123456789abcdef0123456789abcdef.sock".encode()) <= 107
    finally:
        folder.rmdir()


def test_only_folders_of_processes_that_are_gone_are_swept(folder_of):
    dead, alive, named = folder_of(DEAD_PID), folder_of(os.getppid()), folder_of("scout")
    corrections.private_sockets().rmdir()
    assert not dead.exists() and alive.exists() and named.exists()


def test_upstream_still_puts_its_sockets_into_one_shared_folder(folder_of):
    # This process may have moved them already, so the source is asked.
    spec = importlib.util.find_spec("hivemind.p2p.p2p_daemon")
    assert '_UNIX_SOCKET_PREFIX = "/unix/tmp/hivemind-"' in spec.loader.get_source(spec.name)


# -- starting an averager -------------------------------------------------------------------------


@pytest.fixture
def _averagers_do_not_start(monkeypatch, _sigint_is_restored):
    monkeypatch.setattr(DecentralizedAverager, "start", lambda self: None)
    monkeypatch.setattr(DecentralizedAverager, "wait_until_ready", lambda self, timeout=None: None)


@pytest.mark.usefixtures("_averagers_do_not_start")
def test_starting_an_averager_leaves_ctrl_c_alone():
    before = signal.getsignal(signal.SIGINT)
    bare(CorrectedAverager).run_in_background()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("_averagers_do_not_start")
def test_ctrl_c_is_given_back_when_an_averager_fails_to_start(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(DecentralizedAverager, "start", lambda self: _fail(OSError()))
    with pytest.raises(OSError):
        bare(CorrectedAverager).run_in_background()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("_averagers_do_not_start")
def test_upstream_still_ignores_ctrl_c_once_an_averager_runs():
    DecentralizedAverager.run_in_background(bare(DecentralizedAverager))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_averager_is_refused_outside_of_the_main_thread():
    caught = []

    def start():
        try:
            bare(CorrectedAverager).run_in_background()
        except SetupError as error:
            caught.append(error.message)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


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


# -- groups ---------------------------------------------------------------------------------------


class FakeMatchmaking:
    """Matchmaking that has some followers and counts the groups it assembled."""

    def __init__(self, followers, looking=True, done=False):
        self.current_followers, self.is_looking_for_group = dict.fromkeys(range(followers)), looking
        self.assembled_group = SimpleNamespace(done=lambda: done)
        self.lock_request_join_group = asyncio.Lock()
        self.target_group_size, self.schema_hash, self.assembled = None, b"", 0

    async def leader_assemble_group(self):
        self.assembled += 1


def expect_group(matchmaking, size, step):
    sent = []
    averager = bare(CorrectedAverager, schema_hash=b"schema", _matchmaking=matchmaking)
    averager._outer_pipe = SimpleNamespace(send=sent.append)
    averager.set_group(size, step.to_bytes(8, "big"))
    [(method, args, keywords)] = sent
    asyncio.run(getattr(averager, method)(*args, **keywords))
    return matchmaking


def test_a_group_is_expected_in_one_size_and_at_one_step():
    here, there = (expect_group(FakeMatchmaking(followers=0), size=3, step=step) for step in (7, 8))
    assert here.target_group_size == there.target_group_size == 3
    assert here.schema_hash != there.schema_hash and here.schema_hash.startswith(b"schema")
    assert here.assembled == 0


@pytest.mark.parametrize(
    ("matchmaking", "size", "assembled"),
    [
        (FakeMatchmaking(followers=2), 3, 1),
        (FakeMatchmaking(followers=2), 2, 1),
        (FakeMatchmaking(followers=2), 4, 0),
        (FakeMatchmaking(followers=0), 1, 0),
        (FakeMatchmaking(followers=2, looking=False), 3, 0),
        (FakeMatchmaking(followers=2, done=True), 3, 0),
    ],
    ids=["complete", "more than complete", "one missing", "alone", "not looking", "assembled already"],
)
def test_a_group_that_is_complete_starts_at_once(matchmaking, size, assembled):
    assert expect_group(matchmaking, size, step=1).assembled == assembled


@pytest.mark.usefixtures("_applied")
def test_a_lone_peer_asks_for_leaders_ten_times_a_second(monkeypatch):
    async def answer(self, group_key, only_active):
        clock[0] += 0.04
        return [group_key, only_active]

    async def sleep(seconds):
        slept.append(round(seconds, 6))
        clock[0] += seconds

    clock, slept = [100.0], []
    monkeypatch.setattr(corrections, "_get_averagers", answer)
    monkeypatch.setattr(corrections, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(corrections, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    manager = object.__new__(GroupKeyManager)
    for _ in range(3):
        assert asyncio.run(manager.get_averagers("key", only_active=True)) == ["key", True]
    assert slept == [0.0, 0.06, 0.06]


# -- gradients ------------------------------------------------------------------------------------


def averager_after(cls, batches):
    """Accumulate (batch size, gradient) pairs as hivemind does; return what would be averaged."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    averager = bare(
        cls,
        parameters=(parameter,),
        warn=False,
        reuse_grad_buffers=False,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=(torch.full((2,), 9.0),),
        _local_accumulators=(torch.zeros(2),),
        _accumulators_used_in_step=False,
        _anchor_batch_size=None,
        local_samples_accumulated=0,
        local_times_accumulated=0,
    )
    for size, gradient in batches:
        parameter.grad = torch.full((2,), gradient)
        averager.accumulate_grads_(batch_size=size)
    averager.load_accumulators_into_averager_()
    return averager._averaged_tensors[0].tolist()


def test_unequal_batches_count_by_their_samples():
    assert averager_after(CorrectedGradientAverager, [(1, 1.0), (3, 5.0)]) == [4.0, 4.0]
    assert averager_after(CorrectedGradientAverager, [(4, 1.0), (4, 5.0)]) == [3.0, 3.0]


def test_no_batch_at_all_is_a_gradient_of_zero():
    assert averager_after(CorrectedGradientAverager, []) == [0.0, 0.0]


def test_upstream_still_divides_by_the_number_of_batches():
    assert averager_after(GradientAverager, [(1, 1.0), (3, 5.0)]) == [8.0, 8.0]


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
        lock_state=threading.RLock(),
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


@pytest.fixture
def download(monkeypatch):
    """Adopt what a donor gives (metadata and tensors) as if it had come over the network."""

    def adopt(averager, given):
        monkeypatch.setattr(DecentralizedAverager, "load_state_from_peers", lambda self, timeout: given)
        return averager.load_state_from_peers(timeout=1)

    return adopt


def test_a_joiner_becomes_what_the_donor_is(download):
    donor, joiner = state_averager(step=5, fill=1.0, lr=0.3), state_averager()
    assert download(joiner, donor.get_current_state()[:2]) is True
    assert everything(joiner) == everything(donor)


def test_the_state_that_is_given_away_does_not_change_any_more():
    donor = state_averager()
    _, tensors, infos = donor.get_current_state()
    before = [tensor.tolist() for tensor in tensors]
    donor.optimizer.step()
    donor.extra_tensors[0].add_(1)
    assert [tensor.tolist() for tensor in tensors] == before
    assert len(infos) == len(tensors)


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
    assert download(joiner, state_averager(step=5, fill=1.0).get_current_state()[:2]) is False
    assert everything(joiner) == before


BROKEN = {
    "another model": lambda meta, tensors: state_averager(width=4).get_current_state()[:2],
    "a stream that broke off": lambda meta, tensors: (meta, tensors[:-1]),
    "one tensor too many": lambda meta, tensors: (meta, [*tensors, torch.zeros(1)]),
    "no tensors": lambda meta, tensors: (meta, []),
    "no step": lambda meta, tensors: ({k: v for k, v in meta.items() if k != "epoch"}, tensors),
    "a step that is no number": lambda meta, tensors: (meta | {"epoch": "5"}, tensors),
    "no layout": lambda meta, tensors: (meta | {"optimizer_metadata": None}, tensors),
    "a shorter layout": lambda meta, t: (meta | {"optimizer_metadata": meta["optimizer_metadata"][1:]}, t),
    "a layout of something else": lambda meta, t: (meta | {"optimizer_metadata": ["?"] * 99}, t),
    "another optimizer": lambda meta, tensors: state_averager(
        step=5, optimizer_cls=torch.optim.Adagrad
    ).get_current_state()[:2],
    "statistics of another type": lambda meta, t: (meta, [*t[:2], *(s.double() for s in t[2:])]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_state_of_something_else_is_refused_and_nothing_changes(download, broken):
    joiner = state_averager()
    before = everything(joiner)
    given = BROKEN[broken](*state_averager(step=5, fill=1.0).get_current_state()[:2])
    with pytest.raises(RoundFailed):
        download(joiner, given)
    assert everything(joiner) == before


def test_upstream_still_takes_half_of_a_state(download):
    joiner = state_averager(cls=TrainingStateAverager)
    *_, statistics = everything(joiner)
    metadata, tensors = state_averager(step=5, fill=1.0, width=4).get_current_state()[:2]
    with pytest.raises(RuntimeError, match="size"):
        download(joiner, (metadata, tensors))
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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.searchsorted")
@pytest.mark.parametrize("name", assemble.CODECS)
@pytest.mark.usefixtures("_applied")
def test_a_codec_of_state_downloads_leaves_the_optimizer_s_state_alone(download, name):
    (donor, given), (joiner, own) = (with_an_8_bit_optimizer(seed) for seed in (5, 0))
    codec = assemble._of_weights_alone(assemble.CODECS[name]())
    metadata, tensors, infos = donor.get_current_state()
    streamed = [
        list(split_for_streaming(codec.compress(tensor, info), 1024))
        for tensor, info in zip(tensors, infos, strict=True)
    ]
    received = [deserialize_torch_tensor(combine_from_streaming(parts)) for parts in streamed]
    assert download(joiner, (metadata, received)) is True
    assert statistics_of(joiner.optimizer) == statistics_of(donor.optimizer)
    for mine, theirs in zip(own, given, strict=True):
        assert (mine - theirs).norm() <= (0 if name == "none" else 0.05) * theirs.norm()
    used = [parts[0].compression for parts in streamed]
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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).bfloat16(),
        torch.arange(6, dtype=torch.uint8),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[1:4],
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.tensor(3.0),
        torch.zeros(0),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["float32", "bfloat16", "uint8", "transposed", "slice", "column", "scalar", "empty", "parameter"],
)
def test_a_copy_is_equal_and_shares_nothing(tensor):
    copy = _copy_alone(tensor)
    assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    before = copy.tolist()
    with torch.no_grad():
        tensor.zero_()
    assert copy.tolist() == before


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
