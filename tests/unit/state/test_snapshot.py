"""Snapshots of a state, how few of them are kept, and their download from unreliable donors."""

import asyncio
import contextlib
import functools
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.utils import MSGPackSerializer

from tests.simulation.network import VirtualLoop
from trahiv_cli.errors import RoundFailed
from trahiv_cli.rounds.codecs import Half
from trahiv_cli.shared_memory import shared_bytes
from trahiv_cli.state import snapshot
from trahiv_cli.state.download import Downloader, NobodyHas, Pauses, StateRequest
from trahiv_cli.state.host_copies import HostCopies
from trahiv_cli.state.snapshot import CHUNK_BYTES, Manifest, StateOffer, build_snapshot, read_state

torch.set_num_threads(1)

TENSORS = [
    *(torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).bfloat16(), torch.arange(5).byte()),
    *(torch.tensor([True, False, True]), torch.tensor(3), torch.arange(6.0).view(2, 3).t()),
    *(torch.arange(6.0)[1:4], torch.arange(12.0).view(3, 4)[:, ::2], torch.tensor(3.0), torch.zeros(0, 3)),
    *(torch.nn.Parameter(torch.ones(2)), torch.tensor([torch.inf, torch.nan])),
]


def in_a_loop(test):
    """Have an event loop run a test."""

    @functools.wraps(test)
    def run(*args, **keywords):
        asyncio.run(test(*args, **keywords))

    return run


def infos_of(tensors, roles=()):
    roles = roles or [TensorRole.OPTIMIZER] * len(tensors)
    pairs = enumerate(zip(tensors, roles, strict=True))
    return [CompressionInfo.from_tensor(tensor, key=key, role=role) for key, (tensor, role) in pairs]


def build(tensors, rank=(1, b""), roles=(), metadata=None, codec=None):
    described = MSGPackSerializer.dumps({"epoch": 1} if metadata is None else metadata)
    tensors, codec = [tensor.detach() for tensor in tensors], codec or compression.NoCompression()
    return build_snapshot(rank, described, tensors, infos_of(tensors, roles), codec)


def read(taken):
    content = torch.frombuffer(bytearray(b"".join(taken.content)) + b"-", dtype=torch.uint8)[:-1]
    return read_state(Manifest.from_bytes(taken.described), content)


def equal(some, others):
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(some, others, strict=True)
    )


def test_copy_is_independent_of_live_state():
    """Copies from a GPU are tested in `tests/gpu`."""
    live = [tensor.clone() for tensor in TENSORS]
    flat, copies = shared_bytes(snapshot.buffer_bytes(live)), HostCopies(live)
    snapshot.copy_into(flat, live)
    copies.begin(live)
    with pytest.raises(ValueError, match="too few"):
        snapshot.copy_into(flat[:-1], live)
    with torch.no_grad():
        for tensor in live:
            tensor.zero_()
    assert equal(snapshot.views_of(flat, infos_of(live)), TENSORS) and flat.is_shared()
    assert equal(before := copies.wait(), TENSORS) and not any(copy.requires_grad for copy in before)
    places = [copy.data_ptr() for copy in before]
    copies.begin(live)
    assert equal(after := copies.wait(), live) and [copy.data_ptr() for copy in after] == places


def test_only_equal_states_share_digest():
    said = {"epoch": 3, "layout": [1.5, None, "x"]}
    metadata, tensors = read(first := build(TENSORS, metadata=said))
    assert metadata == said and equal(tensors, TENSORS)
    same = build([tensor.clone() for tensor in TENSORS], metadata=said)
    assert first.digest == same.digest and first.content == same.content
    changed = [tensor.detach().clone() for tensor in TENSORS]
    changed[0][0, 0] = 1e-30
    others = [build(changed, metadata=said), build(TENSORS, rank=(2, b""), metadata=said), build(TENSORS)]
    assert len({first.digest, *(other.digest for other in others)}) == 4


def test_codec_applies_to_weights_only():
    codec = compression.RoleAdaptiveCompression(parameter=Half())
    tensors = [torch.linspace(-1, 1, 64), torch.linspace(0, 1, 64)]
    taken = build(tensors, roles=[TensorRole.PARAMETER, TensorRole.OPTIMIZER], codec=codec)
    assert [length for *_, length in taken.manifest.tensors] == [130, 256]
    assert torch.equal(read(taken)[1][1], tensors[1])
    for poison in (torch.nan, -torch.inf):
        with pytest.raises(RoundFailed, match="not given to a joiner"):
            build([torch.tensor([1.0, poison])], roles=[TensorRole.PARAMETER])


@pytest.mark.parametrize(
    "entry", [("float32", (3,), 0, 8), ("load", (2,), 0, 8), ("bool", (8,), 0, 8), ("float32", (2,), 99, 8)]
)
def test_bytes_contradicting_manifest_are_refused(entry):
    manifest = Manifest((1, b""), MSGPackSerializer.dumps({}), (entry,), (bytes(16),))
    with pytest.raises(ValueError):
        read_state(manifest, torch.full((8,), 2, dtype=torch.uint8))


KEEP_S, SHARE_S, RESTS = 45.0, 5.0, 10


class Giver:
    """A peer that gives its state at `step` of its run; a copy takes `takes_s` seconds."""

    def __init__(self, clock):
        self.clock, self.step, self.takes_s, self.made = clock, 1, 0.0, []
        self.cache = snapshot.SnapshotCache(self.make, keep_s=KEEP_S)

    async def make(self):
        self.clock.now += self.takes_s
        if self.step < 0:
            raise RoundFailed("not finite")
        self.made.append(build([torch.full((4,), float(self.step))], rank=(self.step, b"")))
        return self.made[-1]

    async def find(self, step, digest=b"", later_s=0.0):
        self.clock.now += later_s
        return await self.cache.find(digest, (step, b""))

    def keeps(self, taken):
        return b"".join(self.cache.pieces(taken.digest, 0, 0)) == taken.described

    @contextlib.contextmanager
    def sending(self, taken):
        with contextlib.closing(self.cache.pieces(taken.digest, 0, 9)) as pieces:
            assert next(pieces) == b"".join(taken.content)
            yield


@pytest.fixture
def giver(monkeypatch, clock):
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=clock))
    return Giver(clock)


@in_a_loop
async def test_snapshot_is_kept_while_fetched(clock, giver):
    first = await giver.find(1)
    giver.step = 7
    assert await giver.find(7, first.digest) is await giver.find(1) is first
    assert (await giver.find(7, later_s=SHARE_S)).manifest.rank == (7, b"")
    clock.now += KEEP_S - 1
    with giver.sending(first):
        clock.now += KEEP_S
        giver.cache.forget_unused()
    assert giver.keeps(first)
    clock.now += KEEP_S + 1
    giver.cache.forget_unused()
    assert not giver.keeps(first), "nobody has fetched from it"
    same = await giver.find(7)
    assert (await giver.find(1, later_s=SHARE_S + 1)) is same, "nothing has changed"
    assert len(giver.made) == 4
    giver.step = 8
    newest = await giver.find(1, later_s=SHARE_S + 1)
    assert newest.manifest.rank == (8, b""), "who does not know how far it is gets it, too"


@in_a_loop
async def test_peer_rests_between_snapshots(clock, giver, monkeypatch):
    """Meanwhile, a request for an existing snapshot does not wait."""
    sleep, took = asyncio.sleep, 0.5

    async def rest(seconds):
        for _ in range(2):
            await sleep(0)  # all requests of this moment have arrived
        clock.now += max(0.0, seconds)

    monkeypatch.setattr(snapshot.asyncio, "sleep", rest)
    giver.takes_s = took
    for giver.step in range(1, 4):
        assert (await giver.find(2**61)).manifest.rank == (giver.step, b""), "as far as it is"
        assert clock.now == giver.step * took + (giver.step - 1) * RESTS * took
    clock.now += (since := RESTS * took / 2)
    asking = [asyncio.create_task(giver.find(2**61)) for _ in range(50)]
    await sleep(0)
    for step, digest in ((1, b""), (9, (await giver.find(3)).digest)):
        assert (await giver.find(step, digest)).manifest.rank == (3, b"")
    assert clock.now == 3 * took + 2 * RESTS * took + since
    assert len({(await one).digest for one in asking}) == 1
    assert clock.now == 4 * took + 3 * RESTS * took and len(giver.made) == 4


@pytest.mark.parametrize("step", [1, -1], ids=["made", "failed"])
@in_a_loop
async def test_abandoned_snapshot_is_forgotten(giver, step):
    errors = []
    giver.cache = snapshot.SnapshotCache(giver.make, keep_s=-1.0)
    giver.step = step
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    asking = asyncio.create_task(giver.find(1))
    await asyncio.sleep(0)  # the request arrives
    asking.cancel()
    for _ in range(9):
        await asyncio.sleep(0)
    assert len(giver.made) == (step > 0) and not any(map(giver.keeps, giver.made))
    giver.cache = None
    gc.collect()
    assert not errors


@in_a_loop
async def test_at_most_two_snapshots_are_kept(giver):
    taken, giver.step = [], -1
    for _ in range(2):
        with pytest.raises(RoundFailed):
            await giver.find(1)
    for giver.step in (1, 2, 3):
        taken.append(await giver.find(giver.step, later_s=SHARE_S))
    assert [giver.keeps(one) for one in taken] == [False, True, True]
    with giver.sending(taken[1]), giver.sending(taken[2]):
        giver.step = 4
        assert await giver.find(4, later_s=SHARE_S) is taken[2], "the furthest that there is"
    assert (await giver.find(4)).manifest.rank == (4, b"")


CHUNKS = 12
STEP_0, STEP_1, STEP_2 = (0, b""), (1, b""), (2, b"")


def noise(seed=0, rank=STEP_1, chunks=CHUNKS):
    torch.manual_seed(seed)
    return build([torch.randint(256, (chunks * CHUNK_BYTES - 100,), dtype=torch.uint8)], rank, metadata={})


GIVEN = noise()


SHORT = Pauses(others_s=0.005, broken_s=0.005, idle_s=0.005)


class Donor:
    """Gives its snapshots, or does not answer; at chunk `fails_at` of a stream it fails as `how` says."""

    def __init__(self, *snapshots, fails_at=None, how="breaks off", pace_s=0.0, answers=True, takes_s=0):
        self.snapshots, self.fails_at, self.how, self.pace_s = list(snapshots), fails_at, how, pace_s
        self.takes_s, self.answers, self.sent, self.asked = takes_s, answers, 0, []

    def find(self, digest):
        return next((taken for taken in self.snapshots if taken.digest == digest), None)


class Donors:
    """Donors by name, the downloader that fetches from them, and its reports of progress."""

    def __init__(self, donors, own=None, pauses=SHORT):
        async def own_snapshot():
            return own or noise(seed=9, rank=STEP_0)

        self.donors, self.told = donors, []
        self.downloader = Downloader(self, own_snapshot, lambda *news: self.told.append(news), pauses)

    async def download(self, own_rank=STEP_0, rank=STEP_1, silence_s=0.2, limit_bytes=2**30):
        wanted = StateRequest(tuple(self.donors), rank, own_rank, limit_bytes, silence_s)
        return await self.downloader.fetch(wanted)

    async def ask(self, name, digest, rank, own):
        donor = self.donors[name]
        donor.asked.append(rank)
        await asyncio.sleep(donor.takes_s if len(donor.asked) == 1 else 0)  # meanwhile its state is copied
        if not donor.answers:
            raise ConnectionError(name)
        taken = donor.find(digest) or (donor.snapshots and donor.snapshots[-1])
        offer = taken and StateOffer(taken.manifest.rank, taken.digest)
        return StateOffer.from_wire(offer.to_wire()) if offer else None

    async def fetch(self, name, digest, start, stop):
        donor = self.donors[name]
        if (taken := donor.find(digest)) and stop == 0:
            yield b"?" if donor.how == "lies" else taken.described
        for index in range(start, stop if taken else 0):
            if donor.fails_at is not None and index >= donor.fails_at:
                if donor.how == "breaks off":
                    return
                if donor.how == "dies":
                    donor.answers, donor.snapshots = False, []
                    raise ConnectionError(name)
                if donor.how == "hangs":
                    await asyncio.sleep(60)
            await asyncio.sleep(donor.pace_s)
            donor.sent += 1
            yield bytes(CHUNK_BYTES) if donor.how == "damages" else taken.chunk(index)


def fetch(donors, own=None, **changes):
    return asyncio.run(Donors(donors, own).download(**changes))


def is_whole(fetched, taken):
    return bytes(fetched.content.numpy()) == b"".join(taken.content)


def test_furthest_state_is_fetched_in_parallel():
    donors = {name: Donor(GIVEN, pace_s=0.001) for name in "ABCDEF"}
    donors["B"] = Donor(noise(rank=STEP_0))
    fetched = asyncio.run((swarm := Donors(donors)).download())
    assert is_whole(fetched, GIVEN) and fetched.manifest == GIVEN.manifest and fetched.donor in "ACD"
    assert read_state(fetched.manifest, fetched.content)[0] == {}
    sent = {name: donor.sent for name, donor in donors.items()}
    assert sent["B"] == sent["E"] == sent["F"] == len(donors["E"].asked) == 0
    assert min(sent[name] for name in "ACD") >= 2 and sum(sent.values()) <= CHUNKS + 3
    done, totals, active = zip(*swarm.told, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[-1] == GIVEN.manifest.num_bytes
    assert max(active) == 3


def test_majority_state_wins_unless_too_old():
    further = noise(seed=9, rank=STEP_2)
    for rank, expected in ((STEP_1, GIVEN), (STEP_2, further)):
        donors = {"L": Donor(further), "A": Donor(GIVEN), "B": Donor(GIVEN)}
        assert is_whole(fetch(donors, rank=rank), expected)
        assert (donors["L"].sent == 0) == (expected is GIVEN)


def test_late_donor_is_asked_again_and_helps():
    pauses = replace(SHORT, others_s=1.0)
    other, further = (noise(seed=seed, rank=(seed, b"")) for seed in (1, 2))
    donors = {"L": Donor(other), "A": Donor(GIVEN, takes_s=0.9), "B": Donor(GIVEN, takes_s=0.6)}
    donors["C"] = Donor(GIVEN, further, takes_s=1.2)  # it has moved on
    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        fetched = loop.run(Donors(donors, pauses=pauses).download(rank=STEP_2, silence_s=9.0))
    assert is_whole(fetched, GIVEN) and fetched.donor == "A", "the first of those that were named"
    asked_again = [STEP_2, STEP_1]  # so that it copies no other state than the others'
    assert [donor.asked for donor in donors.values()] == [asked_again, [STEP_2], [STEP_2], asked_again]
    assert donors["L"].sent == 0 < donors["C"].sent


@pytest.mark.parametrize("how", ["breaks off", "dies", "hangs", "damages", "lies"])
@pytest.mark.parametrize("fails_at", [1, 7, CHUNKS - 1])
def test_failing_donor_is_replaced(how, fails_at):
    pauses = replace(SHORT, quiet_s=0.05)
    donors = {"A": Donor(GIVEN, fails_at=fails_at, how=how), "B": Donor(GIVEN, pace_s=0.001)}
    assert is_whole(asyncio.run((swarm := Donors(donors, pauses=pauses)).download(silence_s=2.0)), GIVEN)
    assert donors["A"].sent + donors["B"].sent <= 1.3 * CHUNKS
    if how == "damages":
        assert donors["A"].sent == swarm.told[-1][2] == 1, "it is not asked again, nor counted"


def test_fast_donor_relieves_slow_one():
    donors = {"A": Donor(GIVEN, pace_s=0.2), "B": Donor(GIVEN)}
    assert is_whole(fetch(donors, silence_s=5.0), GIVEN) and donors["A"].sent <= CHUNKS // 3


@in_a_loop
async def test_broken_download_resumes_at_missing_chunk():
    newer, donor = noise(seed=2, rank=STEP_2), Donor(GIVEN, fails_at=5)
    swarm = Donors({"A": donor})
    with pytest.raises(RoundFailed, match="nothing came"):
        await swarm.download()
    assert donor.sent == 5
    donor.fails_at, donor.snapshots = None, [GIVEN, newer]  # it has moved on
    assert is_whole(await swarm.download(rank=STEP_2), GIVEN) and donor.sent == CHUNKS
    donor.fails_at, donor.snapshots = 5, [GIVEN]
    with pytest.raises(RoundFailed):
        await swarm.download()
    donor.fails_at, donor.snapshots = None, [newer]  # and no longer keeps the older one
    assert is_whole(await swarm.download(rank=STEP_2), newer)


def test_equal_initial_state_is_not_fetched():
    theirs, donor = noise(rank=STEP_0), Donor(noise(rank=STEP_0))
    assert is_whole(fetch({"A": donor}, own=theirs), theirs) and donor.sent == 0
    assert fetch({"A": Donor(GIVEN, pace_s=0.03)}, silence_s=0.2).manifest == GIVEN.manifest  # 0.36 s


@pytest.mark.parametrize(
    ("donor", "error", "limit_bytes"),
    [
        *((one, NobodyHas, 2**30) for one in (None, Donor(answers=False), Donor())),
        (Donor(noise(rank=STEP_0, chunks=1)), NobodyHas, 2**30),
        (Donor(noise(rank=STEP_2, chunks=1), how="lies"), NobodyHas, 2**30),
        (Donor(GIVEN), RoundFailed, GIVEN.manifest.num_bytes - 1),
    ],
    ids=["nobody", "gone", "gives none", "older", "another manifest", "larger than this model's"],
)
def test_useless_donors_fail_download(donor, error, limit_bytes):
    with pytest.raises(error):
        fetch({"A": donor} if donor else {}, own_rank=STEP_1, limit_bytes=limit_bytes)
    assert donor is None or donor.sent == 0
