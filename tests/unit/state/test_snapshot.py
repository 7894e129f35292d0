"""Snapshots of a state, how few of them are kept, and their download from unreliable donors."""

import asyncio
import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.rounds.codecs import Half
from trahiv_cli.shared_memory import shared_bytes
from trahiv_cli.state import download, snapshot
from trahiv_cli.state.download import Downloader, NobodyHas, StateRequest
from trahiv_cli.state.host_copies import HostCopies
from trahiv_cli.state.snapshot import CHUNK_BYTES, Manifest, StateOffer, build_snapshot, read_state

torch.set_num_threads(1)

SIX, TWELVE = torch.arange(6.0), torch.arange(12.0)
TENSORS = [
    SIX.view(2, 3),
    SIX.view(2, 3).bfloat16(),
    SIX.view(2, 3).t(),
    SIX[1:4],
    SIX[:5].byte(),
    TWELVE.view(3, 4)[:, ::2],
    torch.tensor([True, False, True]),
    torch.tensor(3),
    torch.tensor(3.0),
    torch.zeros(0, 3),
    torch.nn.Parameter(torch.ones(2)),
    torch.tensor([torch.inf, torch.nan]),
]


@pytest.fixture(autouse=True)
def now(monkeypatch, loop):
    """The time of the event loop, for snapshots and downloads, too."""
    time = loop.get_loop().time
    for module in (download, snapshot):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time))
    return time


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


def require_equal(some, others):
    torch.testing.assert_close(list(some), others, rtol=0, atol=0, equal_nan=True)


def test_copy_is_independent_of_live_state():
    """Copies from a GPU are tested in `tests/gpu`."""
    live = [tensor.clone() for tensor in TENSORS]
    flat, copies = shared_bytes(snapshot.buffer_bytes(live)), HostCopies(live)
    snapshot.copy_into(flat, live)
    copies.begin(live)
    with torch.no_grad():
        for tensor in live:
            tensor.zero_()
    assert flat.is_shared()
    require_equal(snapshot.views_of(flat, infos_of(live)), TENSORS)
    before = copies.wait()
    require_equal(before, TENSORS)
    assert not any(copy.requires_grad for copy in before)
    places = [copy.data_ptr() for copy in before]
    copies.begin(live)
    after = copies.wait()
    require_equal(after, live)
    assert [copy.data_ptr() for copy in after] == places


def test_copy_into_small_buffer_is_refused():
    flat = shared_bytes(snapshot.buffer_bytes(TENSORS))
    with pytest.raises(ValueError, match="too few"):
        snapshot.copy_into(flat[:-1], TENSORS)


SAID = {"epoch": 3, "layout": [1.5, None, "x"]}
FIRST = build(TENSORS, metadata=SAID)


def test_snapshot_has_whole_state():
    metadata, tensors = read(FIRST)
    assert metadata == SAID
    require_equal(tensors, TENSORS)


def test_only_equal_states_share_digest():
    changed = [tensor.detach().clone() for tensor in TENSORS]
    same = build(changed, metadata=SAID)
    assert (same.digest, same.content) == (FIRST.digest, FIRST.content)
    changed[0][0, 0] = 1e-30
    others = [build(changed, metadata=SAID), build(TENSORS, rank=(2, b""), metadata=SAID), build(TENSORS)]
    assert len({one.digest for one in (FIRST, *others)}) == 4


def test_codec_applies_to_weights_only():
    codec = compression.RoleAdaptiveCompression(parameter=Half())
    tensors = [torch.linspace(-1, 1, 64), torch.linspace(0, 1, 64)]
    taken = build(tensors, roles=[TensorRole.PARAMETER, TensorRole.OPTIMIZER], codec=codec)
    assert [length for *_, length in taken.manifest.tensors] == [130, 256]
    assert torch.equal(read(taken)[1][1], tensors[1])


@pytest.mark.parametrize("poison", [torch.nan, -torch.inf])
def test_infinite_weights_are_not_given(poison):
    with pytest.raises(RoundFailed, match="not given to a joiner"):
        build([torch.tensor([1.0, poison])], roles=[TensorRole.PARAMETER])


@pytest.mark.parametrize(
    "entry", [("float32", (3,), 0, 8), ("load", (2,), 0, 8), ("bool", (8,), 0, 8), ("float32", (2,), 99, 8)]
)
def test_bytes_contradicting_manifest_are_refused(entry):
    manifest = Manifest((1, b""), MSGPackSerializer.dumps({}), (entry,), (bytes(16),))
    with pytest.raises(ValueError):
        read_state(manifest, torch.full((8,), 2, dtype=torch.uint8))


KEEP_S = 45.0
SHARE_S = 5.0
RESTS = 10


class Giver:
    """A peer that gives its state at `step` of its run; a copy takes `takes_s` seconds."""

    step, takes_s = 1, 0.0

    def __init__(self):
        self.made = []
        self.cache = snapshot.SnapshotCache(self.make, keep_s=KEEP_S)

    async def make(self):
        await asyncio.sleep(self.takes_s)
        if self.step < 0:
            raise RoundFailed("not finite")
        self.made.append(build([torch.full((4,), float(self.step))], rank=(self.step, b"")))
        return self.made[-1]

    async def find(self, step, digest=b""):
        return await self.cache.find(digest, (step, b""))

    def keeps(self, taken):
        return b"".join(self.cache.pieces(taken.digest, 0, 0)) == taken.described

    @contextlib.contextmanager
    def sending(self, taken):
        with contextlib.closing(self.cache.pieces(taken.digest, 0, 9)) as pieces:
            assert next(pieces) == b"".join(taken.content)
            yield


@pytest.fixture
def giver():
    return Giver()


async def test_joiners_share_young_snapshot(giver):
    first = await giver.find(1)
    giver.step = 7
    assert await giver.find(1) is first
    assert await giver.find(7, first.digest) is first
    assert (await giver.find(7)).manifest.rank == (7, b"")


async def test_snapshot_is_kept_while_fetched(giver):
    first = await giver.find(1)
    await asyncio.sleep(KEEP_S - 1)
    with giver.sending(first):
        await asyncio.sleep(KEEP_S + 2)
    assert giver.keeps(first)
    await asyncio.sleep(KEEP_S + 2)
    assert not giver.keeps(first), "nobody has fetched from it"


async def test_old_snapshot_is_made_again(giver):
    first = await giver.find(1)
    await asyncio.sleep(SHARE_S + 1)
    assert await giver.find(1) is first, "nothing has changed"
    assert len(giver.made) == 2
    giver.step = 8
    await asyncio.sleep(SHARE_S + 1)
    newest = await giver.find(1)
    assert newest.manifest.rank == (8, b""), "who does not know how far it is gets it, too"


async def test_peer_rests_between_snapshots(giver, now):
    """Meanwhile, a request for an existing snapshot does not wait."""
    giver.takes_s = 0.5
    rest_s = RESTS * giver.takes_s
    for giver.step in range(1, 4):
        assert (await giver.find(2**61)).manifest.rank == (giver.step, b""), "as far as it is"
        assert now() == pytest.approx(giver.step * giver.takes_s + (giver.step - 1) * rest_s)
    await asyncio.sleep(rest_s / 2)
    asking = [asyncio.create_task(giver.find(2**61)) for _ in range(50)]
    at = now()
    for step, digest in ((1, b""), (9, giver.made[2].digest)):
        assert (await giver.find(step, digest)).manifest.rank == (3, b"")
    assert now() == pytest.approx(at)
    assert len(set(await asyncio.gather(*asking))) == 1
    assert now() == pytest.approx(4 * giver.takes_s + 3 * rest_s)
    assert len(giver.made) == 4


@pytest.mark.parametrize("step", [1, -1], ids=["made", "failed"])
async def test_abandoned_snapshot_is_forgotten(giver, step):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    giver.step = step
    asking = asyncio.create_task(giver.find(1))
    await asyncio.sleep(0)  # the request arrives
    asking.cancel()
    await asyncio.sleep(KEEP_S + 2)
    assert len(giver.made) == (step > 0)
    assert not any(map(giver.keeps, giver.made))
    giver.cache = None
    gc.collect()
    assert not errors


async def test_at_most_two_snapshots_are_kept(giver):
    for giver.step in (1, 2, 3):
        await giver.find(giver.step)
    assert list(map(giver.keeps, giver.made)) == [False, True, True]
    giver.step = 4
    with giver.sending(giver.made[1]), giver.sending(giver.made[2]):
        assert await giver.find(4) is giver.made[2], "the furthest that there is"
    assert (await giver.find(4)).manifest.rank == (4, b"")


async def test_failed_snapshot_is_tried_again(giver):
    giver.step = -1
    for _ in range(2):
        with pytest.raises(RoundFailed):
            await giver.find(1)
    giver.step = 1
    assert await giver.find(1) is giver.made[0]


CHUNKS = 12
STEP_0, STEP_1, STEP_2 = (0, b""), (1, b""), (2, b"")


def noise(seed=0, rank=STEP_1, chunks=CHUNKS):
    torch.manual_seed(seed)
    return build([torch.randint(256, (chunks * CHUNK_BYTES - 100,), dtype=torch.uint8)], rank, metadata={})


GIVEN = noise()
OLDER, FURTHER = noise(seed=9, rank=STEP_0), noise(seed=2, rank=STEP_2)


class Donor:
    """Gives its snapshots, the last unless another is asked for.

    At chunk `fails_at` of a stream it fails as `how` says; a first copy of its state takes `takes_s`.
    """

    fails_at = CHUNKS
    how = "breaks off"
    pace_s = takes_s = 0.0
    answers = True
    sent = 0

    def __init__(self, *snapshots, **options):
        self.snapshots = snapshots
        self.asked = []
        self.change(**options)

    def change(self, **options):
        vars(self).update(options)

    def find(self, digest):
        return next((taken for taken in self.snapshots if taken.digest == digest), None)


class Swarm:
    """Donors by name, the downloader that fetches from them, and its reports of progress."""

    def __init__(self, own=OLDER, **donors):
        async def own_snapshot():
            return own

        self.donors, self.told = donors, []
        self.downloader = Downloader(self, own_snapshot, lambda *news: self.told.append(news))

    async def download(self, rank=STEP_1, own_rank=STEP_0, limit_bytes=2**30):
        wanted = StateRequest(tuple(self.donors), rank, own_rank, limit_bytes, silence_s=20.0)
        return await self.downloader.fetch(wanted)

    async def require(self, taken, rank=STEP_1):
        """Require that a download brings this snapshot."""
        fetched = await self.download(rank)
        assert bytes(fetched.content.numpy()) == b"".join(taken.content)
        assert fetched.manifest == taken.manifest
        return fetched

    async def ask(self, name, digest, rank, own):
        donor = self.donors[name]
        donor.asked.append(rank)
        await asyncio.sleep(donor.takes_s if len(donor.asked) == 1 else 0)
        if not donor.answers:
            raise ConnectionError(name)
        if not donor.snapshots:
            return None
        taken = donor.find(digest) or donor.snapshots[-1]
        return StateOffer.from_wire(StateOffer(taken.manifest.rank, taken.digest).to_wire())

    async def fetch(self, name, digest, start, stop):
        donor = self.donors[name]
        taken = donor.find(digest)
        if taken is None:
            return
        if stop == 0:
            yield b"?" if donor.how == "lies" else taken.described
        for index in range(start, stop):
            if index >= donor.fails_at and donor.how == "breaks off":
                return
            if index >= donor.fails_at and donor.how == "dies":
                donor.change(answers=False, snapshots=())
                raise ConnectionError(name)
            if index >= donor.fails_at and donor.how == "hangs":
                await asyncio.sleep(6000)
            await asyncio.sleep(donor.pace_s)
            donor.sent += 1
            yield bytes(CHUNK_BYTES) if donor.how == "damages" else taken.chunk(index)


async def test_furthest_state_is_fetched_in_parallel():
    swarm = Swarm(**{name: Donor(GIVEN, pace_s=0.1) for name in "ABCDEF"})
    swarm.donors["B"] = Donor(OLDER)
    fetched = await swarm.require(GIVEN)
    assert read_state(fetched.manifest, fetched.content)[0] == {}
    sent = {name: donor.sent for name, donor in swarm.donors.items()}
    helpers = {name for name in sent if sent[name] >= 2}
    assert fetched.donor in helpers == set("ACD")
    assert sent["B"] == sent["E"] == sent["F"] == 0
    assert swarm.donors["E"].asked == []
    assert sum(sent.values()) <= CHUNKS + 3
    done, totals, active = zip(*swarm.told, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] == GIVEN.manifest.num_bytes
    assert max(active) == 3


@pytest.mark.parametrize("rank, expected", [(STEP_1, GIVEN), (STEP_2, FURTHER)])
async def test_majority_state_wins_unless_too_old(rank, expected):
    lone = Donor(FURTHER)
    await Swarm(L=lone, A=Donor(GIVEN), B=Donor(GIVEN)).require(expected, rank)
    assert (lone.sent == 0) is (expected is GIVEN)


async def test_late_donor_is_asked_again_and_helps():
    donors = [Donor(noise(seed=1)), Donor(GIVEN, takes_s=0.9), Donor(GIVEN, takes_s=0.6)]
    donors.append(Donor(GIVEN, FURTHER, takes_s=1.2))  # it has moved on
    fetched = await Swarm(**dict(zip("LABC", donors, strict=True))).require(GIVEN, STEP_2)
    assert fetched.donor == "A", "the first of those that were named"
    asked_again = [STEP_2, STEP_1]  # so that it copies no other state than the others'
    assert [donor.asked for donor in donors] == [asked_again, [STEP_2], [STEP_2], asked_again]
    assert donors[0].sent == 0 < donors[3].sent


@pytest.mark.parametrize("how", ["breaks off", "dies", "hangs", "damages", "lies"])
@pytest.mark.parametrize("fails_at", [1, 7, CHUNKS - 1])
async def test_failing_donor_is_replaced(how, fails_at):
    failing, other = Donor(GIVEN, fails_at=fails_at, how=how), Donor(GIVEN, pace_s=0.1)
    swarm = Swarm(A=failing, B=other)
    await swarm.require(GIVEN)
    assert failing.sent + other.sent <= 1.3 * CHUNKS
    if how == "damages":
        assert failing.sent == swarm.told[-1][2] == 1, "it is not asked again, nor counted"


async def test_fast_donor_relieves_slow_one():
    slow = Donor(GIVEN, pace_s=4.0)
    await Swarm(A=slow, B=Donor(GIVEN)).require(GIVEN)
    assert slow.sent <= CHUNKS // 3


@pytest.mark.parametrize(
    "kept, resumed, sent", [((GIVEN, FURTHER), GIVEN, CHUNKS), ((FURTHER,), FURTHER, 5 + CHUNKS)]
)
async def test_broken_download_resumes_at_missing_chunk(kept, resumed, sent):
    """Unless the donor, which has moved on, no longer keeps the older state."""
    donor = Donor(GIVEN, fails_at=5)
    swarm = Swarm(A=donor)
    with pytest.raises(RoundFailed, match="nothing came"):
        await swarm.download()
    assert donor.sent == 5
    donor.change(fails_at=CHUNKS, snapshots=kept)
    await swarm.require(resumed, STEP_2)
    assert donor.sent == sent


async def test_equal_initial_state_is_not_fetched():
    donor = Donor(OLDER)
    await Swarm(A=donor).require(OLDER)
    assert donor.sent == 0


async def test_slow_download_has_no_time_limit():
    await Swarm(A=Donor(GIVEN, pace_s=15.0)).require(GIVEN)


@pytest.mark.parametrize(
    "donors, error, limit_bytes",
    [
        ({}, NobodyHas, 2**30),
        ({"A": Donor(answers=False)}, NobodyHas, 2**30),
        ({"A": Donor()}, NobodyHas, 2**30),
        ({"A": Donor(OLDER)}, NobodyHas, 2**30),
        ({"A": Donor(FURTHER, how="lies")}, NobodyHas, 2**30),
        ({"A": Donor(GIVEN)}, RoundFailed, GIVEN.manifest.num_bytes - 1),
    ],
    ids=["nobody", "gone", "gives none", "older", "another manifest", "larger than this model's"],
)
async def test_useless_donors_fail_download(donors, error, limit_bytes):
    with pytest.raises(error):
        await Swarm(**donors).download(own_rank=STEP_1, limit_bytes=limit_bytes)
    assert not any(donor.sent for donor in donors.values())
