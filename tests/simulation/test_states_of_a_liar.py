"""Whatever state one member offers, a joiner adopts the state that the others hold, or keeps its own."""

import asyncio
import contextlib
import json

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo
from hivemind.utils import MSGPackSerializer

from tests.kit.lies import lies
from tests.kit.states import Giving, giving_state, state_of
from tests.kit.stepping import reported
from tests.simulation.board import id_of
from trahiv_cli.errors import RoundFailed
from trahiv_cli.members.records import ignore_peer
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Ledger
from trahiv_cli.progress.pace import Pace
from trahiv_cli.progress.reports import CommitPath
from trahiv_cli.progress.trust import SwarmView
from trahiv_cli.state.download import Downloader, NobodyHas, Pauses, StateRequest
from trahiv_cli.state.snapshot import (
    Manifest,
    StateOffer,
    build_snapshot,
    read_state,
)
from trahiv_cli.wire import digest_of_bytes, unpacked

torch.set_num_threads(1)

BEGUN = History().extend(samples=10, proof=b"first")
HISTORY = BEGUN.extend(samples=10, proof=b"second")
LIAR = id_of("D")
HONEST = [id_of(name) for name in "ABC"]


def state_at(history, *, has_local_steps):
    return giving_state(history, fill=float(history.step), has_local_steps=has_local_steps)


@pytest.mark.parametrize("has_local_steps", [False, True], ids=["common gradients", "local steps"])
def test_false_state_metadata_is_refused(caplog, has_local_steps):
    """Only the liar gives the joiner a state; honest peers have reported the digest of theirs."""
    donor = state_at(HISTORY, has_local_steps=has_local_steps)
    past = CommitPath()
    past.go_on(BEGUN)
    past.go_on(HISTORY)
    (metadata, tensors), expected = state_of(donor), donor.own_metadata()
    past.attest(HISTORY, donor.copy()[-1], is_given=True)
    witness = reported("A", HISTORY, **past.to_wire())
    older, _ = state_of(state_at(BEGUN, has_local_steps=has_local_steps))
    credentials = SwarmView(own=History(), witnesses=[witness] * 4)
    for what, lie in lies(unpacked(MSGPackSerializer.dumps(metadata)), older):
        if not isinstance(lie, dict):
            continue  # refused by `read_state`
        caplog.clear()
        ignore_peer.cache_clear()
        joiner = state_at(History(), has_local_steps=has_local_steps)
        before = joiner.own_metadata(), joiner.main_parameters[0].tolist()
        given = lie | {"donor": LIAR}, [tensor.clone() for tensor in tensors]
        try:
            is_adopted = Giving(joiner, given).load(
                donors=[LIAR],
                rank=HISTORY.rank,
                lowest=History().rank,
                silence_s=1.0,
                is_believed=lambda history, common, peer: (
                    credentials.believes(history) and credentials.holds(history, common) is True
                ),
                is_wanted=lambda: True,
                set_pace=lambda pace, joiner=joiner: joiner.committed.change(pace=pace),
            )
        except RoundFailed:
            is_adopted = False
            assert LIAR in caplog.text, what
        if is_adopted:
            assert joiner.own_metadata() == expected, what
            assert joiner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3), what
            if not what.startswith("optimizer_metadata"):  # changed numbers are not covered: docs/security.md
                joiner.main_parameters[0].grad = torch.ones(3)
                joiner.optimizer.step()
            state_of(joiner)
        else:
            assert (joiner.own_metadata(), joiner.main_parameters[0].tolist()) == before, what
        now = joiner.committed.now
        wire = json.loads(json.dumps([now.ledger.to_wire(), now.pace.to_wire()]))
        assert [Ledger.from_wire(wire[0]), Pace.from_wire(wire[1])] == [now.ledger, now.pace], what


def snapshot():
    tensor = torch.arange(1000, dtype=torch.float32)
    packed = MSGPackSerializer.dumps({})
    infos = [CompressionInfo.from_tensor(tensor)]
    return build_snapshot(HISTORY.rank, packed, [tensor], infos, compression.NoCompression())


class Donors:
    """Answers of donors: a snapshot from honest ones, the given lies from the liar."""

    def __init__(self, given, offer=None, described=None, chunk=None):
        self.given = given
        self.offer = offer
        self.described = described
        self.chunk = chunk

    async def ask(self, donor, digest, rank, own):
        if donor == LIAR and self.offer is not None:
            return StateOffer.from_wire(unpacked(self.offer))
        return StateOffer(self.given.manifest.rank, self.given.digest)

    async def fetch(self, donor, digest, start, stop):
        lie = self.chunk if stop else self.described
        if donor == LIAR and lie is not None:
            yield lie
        elif donor == LIAR or digest == self.given.digest:
            for index in range(start, stop):
                yield self.given.chunk(index)
            if stop == 0:
                yield self.given.described

    def get(self, *donors):
        async def own():
            return snapshot()

        wish = StateRequest(donors, HISTORY.rank, History().rank, 10**6, 5.0)
        pauses = Pauses(others_s=0.001, broken_s=0.001, idle_s=0.001)
        return asyncio.run(Downloader(self, own, lambda *news: None, pauses).fetch(wish))


@pytest.fixture
def given():
    return snapshot()


def check(donors, what, caplog, *, is_refused=True):
    """Require a joiner to get the honest state, and from the liar alone that state or none."""
    caplog.clear()
    ignore_peer.cache_clear()
    assert bytes(donors.get(LIAR, *HONEST).content.numpy()) == b"".join(donors.given.content), what
    try:
        found = donors.get(LIAR)
        with contextlib.suppress(ValueError):
            read_state(found.manifest, found.content)
    except (NobodyHas, RoundFailed):
        assert not is_refused or LIAR in caplog.text, what
    assert not any(peer in caplog.text for peer in HONEST), what


def test_false_offers_leave_download_intact(given, caplog):
    offer = StateOffer(HISTORY.rank, given.digest).to_wire()
    for what, lie in lies(offer, StateOffer(BEGUN.rank, bytes(16)).to_wire()):
        packed = MSGPackSerializer.dumps(lie)
        is_refused = True
        with contextlib.suppress(ValueError):
            StateOffer.from_wire(unpacked(packed))
            is_refused = False
        check(Donors(given, packed), what, caplog, is_refused=is_refused)


def test_false_manifests_and_chunks_are_refused(given, caplog):
    """Each manifest matches its digest, and is offered under it."""
    for what, lie in lies(unpacked(given.described)):
        described = MSGPackSerializer.dumps(lie)
        offer = StateOffer(HISTORY.rank, digest_of_bytes(described)).to_wire()
        check(Donors(given, MSGPackSerializer.dumps(offer), described), what, caplog)
    assert Manifest.from_bytes(given.described).num_bytes == 4000
    for chunk in (b"", b"x", bytes(4000), bytes(300_000)):
        check(Donors(given, chunk=chunk), f"a chunk of {len(chunk)}", caplog)
