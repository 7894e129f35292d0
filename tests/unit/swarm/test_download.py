"""Which chunks are fetched from whom, whatever donors do: they are async functions here."""

import asyncio

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo
from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.swarm import download
from trahiv_cli.swarm.download import Downloader, NobodyHas, StateOffer, StateRequest
from trahiv_cli.swarm.snapshot import CHUNK_BYTES, build_snapshot, read_state

torch.set_num_threads(1)

CHUNKS = 12
STEP_0, STEP_1, STEP_2 = (0, b""), (1, b""), (2, b"")


def build(seed=0, rank=STEP_1, chunks=CHUNKS):
    torch.manual_seed(seed)
    tensor = torch.randint(256, (chunks * CHUNK_BYTES - 100,), dtype=torch.uint8)
    infos = [CompressionInfo.from_tensor(tensor)]
    return build_snapshot(rank, MSGPackSerializer.dumps({}), [tensor], infos, compression.NoCompression())


GIVEN = build()


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch):
    for name in ("OTHERS_S", "PAUSE_S", "IDLE_S"):
        monkeypatch.setattr(download, name, 0.005)


class Donor:
    """Gives its snapshots, or does not answer; `fails_at` says at which chunk of a stream what happens."""

    def __init__(self, *snapshots, fails_at=None, how="breaks off", pace_s=0.0, answers=True):
        self.snapshots, self.fails_at, self.how, self.pace_s = list(snapshots), fails_at, how, pace_s
        self.answers, self.sent, self.asked = answers, 0, 0

    def find(self, digest):
        return next((taken for taken in self.snapshots if taken.digest == digest), None)


class Donors:
    """Donors by name, and who fetches from them, and tells how far it is."""

    def __init__(self, donors, own=None):
        async def own_snapshot():
            return own or build(seed=9, rank=STEP_0)

        self.donors, self.told = donors, []
        self.downloader = Downloader(self, own_snapshot, lambda *news: self.told.append(news))

    async def download(self, own_rank=STEP_0, rank=STEP_1, silence_s=0.2, limit_bytes=2**30):
        wanted = StateRequest(tuple(self.donors), rank, own_rank, limit_bytes, silence_s)
        return await self.downloader.fetch(wanted)

    async def ask(self, name, digest, rank, own):
        donor = self.donors[name]
        donor.asked += 1
        if not donor.answers:
            raise ConnectionError(name)
        taken = donor.find(digest) or (donor.snapshots and donor.snapshots[-1])
        return StateOffer(taken.manifest.rank, taken.digest) if taken else None

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


def equal(fetched, snapshot):
    return bytes(fetched.content.numpy()) == b"".join(snapshot.content)


def test_the_furthest_state_is_fetched_from_all_that_have_it_but_no_more_than_four():
    donors = {name: Donor(GIVEN, pace_s=0.001) for name in "ABCDEF"}
    donors["B"] = Donor(build(rank=STEP_0))
    fetched = asyncio.run((swarm := Donors(donors)).download())
    assert equal(fetched, GIVEN) and fetched.manifest == GIVEN.manifest and fetched.donor in "ACD"
    assert read_state(fetched.manifest, fetched.content)[0] == {}
    sent = {name: donor.sent for name, donor in donors.items()}
    assert sent["B"] == sent["E"] == sent["F"] == donors["E"].asked == 0
    assert min(sent[name] for name in "ACD") >= 2 and sum(sent.values()) <= CHUNKS + 3
    done, totals, active = zip(*swarm.told, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[-1] == GIVEN.manifest.num_bytes
    assert max(active) == 3


def test_what_most_offer_is_fetched_and_before_it_what_is_as_far_as_was_wished():
    further = build(seed=9, rank=STEP_2)
    for rank, expected in ((STEP_1, GIVEN), (STEP_2, further)):
        donors = {"L": Donor(further), "A": Donor(GIVEN), "B": Donor(GIVEN)}
        assert equal(fetch(donors, rank=rank), expected)
        assert (donors["L"].sent == 0) == (expected is GIVEN)


@pytest.mark.parametrize("how", ["breaks off", "dies", "hangs", "damages", "lies"])
@pytest.mark.parametrize("fails_at", [1, 7, CHUNKS - 1])
def test_what_one_donor_fails_to_give_comes_from_another(how, fails_at, monkeypatch):
    monkeypatch.setattr(download, "QUIET_S", 0.05)
    donors = {"A": Donor(GIVEN, fails_at=fails_at, how=how), "B": Donor(GIVEN, pace_s=0.001)}
    assert equal(fetch(donors, silence_s=2.0), GIVEN)
    assert donors["A"].sent + donors["B"].sent <= 1.3 * CHUNKS
    if how == "damages":
        assert donors["A"].sent == 1, "it is not asked again"


def test_who_is_done_takes_over_half_of_what_a_slow_one_owes():
    donors = {"A": Donor(GIVEN, pace_s=0.2), "B": Donor(GIVEN)}
    assert equal(fetch(donors, silence_s=5.0), GIVEN) and donors["A"].sent <= CHUNKS // 3


def test_a_stream_that_broke_off_goes_on_at_the_missing_chunk_as_long_as_a_donor_keeps_it():
    newer, donor = build(seed=2, rank=STEP_2), Donor(GIVEN, fails_at=5)

    async def run():
        swarm = Donors({"A": donor})
        with pytest.raises(RoundFailed, match="nothing came"):
            await swarm.download()
        assert donor.sent == 5
        donor.fails_at, donor.snapshots = None, [GIVEN, newer]  # it has moved on
        assert equal(await swarm.download(rank=STEP_2), GIVEN) and donor.sent == CHUNKS
        donor.fails_at, donor.snapshots = 5, [GIVEN]
        with pytest.raises(RoundFailed):
            await swarm.download()
        donor.fails_at, donor.snapshots = None, [newer]  # and keeps the older one no more
        assert equal(await swarm.download(rank=STEP_2), newer)

    asyncio.run(run())


def test_at_the_beginning_of_a_run_only_what_differs_is_fetched_and_a_slow_donor_is_given_time():
    theirs, donor = build(rank=STEP_0), Donor(build(rank=STEP_0))
    assert equal(fetch({"A": donor}, own=theirs), theirs) and donor.sent == 0
    assert fetch({"A": Donor(GIVEN, pace_s=0.03)}, silence_s=0.2).manifest == GIVEN.manifest  # 0.36 s


@pytest.mark.parametrize(
    ("donor", "error", "limit_bytes"),
    [
        *((one, NobodyHas, 2**30) for one in (None, Donor(answers=False), Donor())),
        (Donor(build(rank=STEP_0, chunks=1)), NobodyHas, 2**30),
        (Donor(build(rank=STEP_2, chunks=1), how="lies"), NobodyHas, 2**30),
        (Donor(GIVEN), RoundFailed, GIVEN.manifest.num_bytes - 1),
    ],
    ids=["nobody", "gone", "gives none", "older", "another manifest", "larger than this model's"],
)
def test_nobody_has_a_state_of_use(donor, error, limit_bytes):
    with pytest.raises(error):
        fetch({"A": donor} if donor else {}, own_rank=STEP_1, limit_bytes=limit_bytes)
    assert donor is None or donor.sent == 0
