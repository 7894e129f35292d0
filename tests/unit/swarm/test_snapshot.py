"""A state as bytes: equal states give equal bytes, what contradicts itself is refused, little is kept."""

import asyncio

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim.codecs import Half
from trahiv_cli.swarm import shelf as shelf_module
from trahiv_cli.swarm.shelf import MAX_SNAPSHOTS, RESTS, SHARE_S, Shelf
from trahiv_cli.swarm.snapshot import (
    CHUNK_BYTES,
    KEEP_S,
    Manifest,
    buffer_bytes,
    build_snapshot,
    copy_into,
    digest_of_bytes,
    read_state,
    shared_bytes,
    views_of,
)

torch.set_num_threads(1)

TENSORS = {
    "float32": torch.arange(6.0).view(2, 3),
    "bfloat16": torch.arange(6.0).view(2, 3).bfloat16(),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "step count": torch.tensor(3, dtype=torch.int64),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "slice": torch.arange(6.0)[1:4],
    "column": torch.arange(12.0).view(3, 4)[:, ::2],
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "not finite": torch.tensor([torch.inf, torch.nan]),
}
PLAIN = compression.NoCompression()


def infos_of(tensors, role=TensorRole.OPTIMIZER):
    return [CompressionInfo.from_tensor(tensor, key=key, role=role) for key, tensor in enumerate(tensors)]


def build(tensors, codec=PLAIN, rank=(1, b""), role=TensorRole.OPTIMIZER, metadata=None):
    described = MSGPackSerializer.dumps({"epoch": 1} if metadata is None else metadata)
    return build_snapshot(rank, described, [t.detach() for t in tensors], infos_of(tensors, role), codec)


def read(taken):
    content = torch.frombuffer(bytearray(taken.content) + b"-", dtype=torch.uint8)[:-1]
    return read_state(Manifest.from_bytes(taken.described), content)


# -- between processes ----------------------------------------------------------------------------


def test_a_copy_is_equal_and_shares_nothing():
    tensors = [tensor.detach().clone() for tensor in TENSORS.values()]
    flat = shared_bytes(buffer_bytes(tensors))
    copy_into(flat, tensors)
    copies = views_of(flat, infos_of(tensors))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape
        assert torch.equal(copy.nan_to_num(), tensor.nan_to_num())
    before = [copy.tolist() for copy in copies[:3]]
    for tensor in tensors:
        tensor.zero_()
    assert [copy.tolist() for copy in copies[:3]] == before
    assert flat.is_shared()


# -- the bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was_stored(name):
    tensor = TENSORS[name]
    metadata, [read_again] = read(build([tensor], metadata={"epoch": 3, "layout": [1.5, None, "x"]}))
    assert metadata == {"epoch": 3, "layout": [1.5, None, "x"]}
    assert read_again.dtype == tensor.dtype and read_again.shape == tensor.shape
    assert torch.equal(read_again.nan_to_num(), tensor.nan_to_num())


def test_equal_states_have_equal_digests_and_others_do_not():
    first, same = build(list(TENSORS.values())), build([t.clone() for t in TENSORS.values()])
    assert first.digest == same.digest and first.content == same.content
    changed = [tensor.clone() for tensor in TENSORS.values()]
    with torch.no_grad():
        changed[0][0, 0] = 1e-30
    others = [build(changed), build(TENSORS.values(), rank=(2, b"")), build(TENSORS.values(), metadata={})]
    assert len({first.digest, *(other.digest for other in others)}) == 4


def test_a_state_is_cut_into_chunks_each_with_its_checksum():
    taken = build([torch.arange(CHUNK_BYTES, dtype=torch.float32), torch.zeros(5)])
    assert taken.manifest.num_bytes == 4 * CHUNK_BYTES + 20
    chunks = [taken.chunk(index) for index in range(5)]
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES] * 4 + [20]
    assert b"".join(chunks) == bytes(taken.content)
    assert tuple(map(digest_of_bytes, chunks)) == taken.manifest.checksums


def test_weights_go_by_the_codec_and_all_else_as_it_is(our_codecs):
    codec = compression.RoleAdaptiveCompression(parameter=Half())
    tensors = [torch.linspace(-1, 1, 64), torch.linspace(0, 1, 64)]
    infos = [*infos_of(tensors[:1], TensorRole.PARAMETER), *infos_of(tensors[1:])]
    taken = build_snapshot((1, b""), MSGPackSerializer.dumps({}), tensors, infos, codec)
    assert [length for *_, length in taken.manifest.tensors] == [130, 256]
    assert torch.equal(read(taken)[1][1], tensors[1])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_given_to_nobody(poison):
    with pytest.raises(RoundFailed, match="not given to a joiner"):
        build([torch.tensor([1.0, poison])], role=TensorRole.PARAMETER)


# -- what strangers say ---------------------------------------------------------------------------


def wire(**changes):
    whole = {"rank": [1, b""], "metadata": b"\x80", "chunk": CHUNK_BYTES}
    whole |= {"tensors": [["float32", [2], 0, 8]], "sums": bytes(16)}
    return MSGPackSerializer.dumps(list((whole | changes).values()))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        MSGPackSerializer.dumps({}),
        wire(rank=[1]),
        wire(rank=["1", b""]),
        wire(metadata=1),
        wire(chunk=1),
        wire(sums=bytes(32)),
        wire(sums=bytes(15)),
        wire(sums=b""),
        wire(tensors=[["float32", [2], 0, -8]]),
        wire(tensors=[["float32", [-2], 0, 8]]),
        wire(tensors=[["float32", 2, 0, 8]]),
        wire(tensors=[["float32", [2**62, 2, 0], 0, 8]]),
        wire(tensors=[["float32", [1] * 65, 0, 8]]),
        wire(tensors=[[]]),
        wire(tensors=None),
    ],
)
def test_what_is_no_manifest_is_refused(content):
    assert Manifest.from_bytes(wire()).num_bytes == 8
    with pytest.raises(ValueError):
        Manifest.from_bytes(content)


@pytest.mark.parametrize(
    "entry",
    [
        ("float32", (3,), 0, 8),
        ("float33", (2,), 0, 8),
        ("nn", (2,), 0, 8),
        ("load", (2,), 0, 8),
        ("bool", (8,), 0, 8),
        ("float32", (2,), 99, 8),
    ],
)
def test_bytes_that_are_not_what_the_manifest_says_are_refused(entry):
    manifest = Manifest((1, b""), MSGPackSerializer.dumps({}), (entry,), (bytes(16),))
    with pytest.raises(ValueError):
        read_state(manifest, torch.full((8,), 2, dtype=torch.uint8))


def test_metadata_that_is_none_is_refused():
    with pytest.raises(ValueError, match="metadata"):
        read(build([torch.zeros(1)], metadata=[1]))


# -- those that are kept --------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def on_a_shelf(story):
    """Run a story about a shelf whose peer takes a step whenever it says so."""
    clock, made, step = Clock(), [], [1]

    async def make():
        made.append(step[0])
        return build([torch.full((4,), float(step[0]))], rank=(step[0], b""))

    async def run():
        await story(Shelf(make, clock), step, clock, made)

    asyncio.run(run())
    return made


def test_those_who_ask_at_a_time_share_one_copy():
    async def story(shelf, step, clock, made):
        found = await asyncio.gather(*(shelf.find(b"", (1, b"")) for _ in range(5)))
        assert len({taken.digest for taken in found}) == 1

    assert on_a_shelf(story) == [1]


def test_a_snapshot_that_is_wanted_again_is_found_though_the_peer_has_moved_on():
    async def story(shelf, step, clock, made):
        first = await shelf.find(b"", (1, b""))
        step[0] = 7
        assert (await shelf.find(first.digest, (7, b""))) is first
        assert (await shelf.find(b"", (1, b""))) is first
        clock.now += SHARE_S
        assert (await shelf.find(b"", (7, b""))).manifest.rank == (7, b"")
        clock.now += KEEP_S - 1
        with shelf.opened(first.digest):
            clock.now += KEEP_S
            shelf.forget_unused()
        with shelf.opened(first.digest):
            pass

    assert on_a_shelf(story) == [1, 7]


def test_who_does_not_know_how_far_the_peer_is_gets_its_present_state_all_the_same():
    async def story(shelf, step, clock, made):
        first = await shelf.find(b"", (1, b""))
        clock.now += SHARE_S + 1
        assert (await shelf.find(b"", (1, b""))) is first, "nothing has changed"
        step[0] = 7
        clock.now += SHARE_S + 1
        assert (await shelf.find(b"", (1, b""))).manifest.rank == (7, b"")

    assert on_a_shelf(story) == [1, 1, 7]


def test_however_far_a_state_is_asked_for_the_peer_is_left_in_peace_between_two_copies(monkeypatch):
    async def story(shelf, step, clock, made):
        sleep = asyncio.sleep

        async def rest(seconds):
            await sleep(0)  # all that ask at this time have asked
            clock.now += max(0.0, seconds)

        make, took = shelf._make, 0.5

        async def copy():
            clock.now += took
            return await make()

        shelf._make = copy
        monkeypatch.setattr(shelf_module.asyncio, "sleep", rest)
        for number in range(1, 4):
            step[0] = number
            assert (await shelf.find(b"", (2**61, b""))).manifest.rank == (number, b""), "as far as it is"
            assert clock.now == number * took + (number - 1) * RESTS * took
        clock.now += RESTS * took / 2
        found = await asyncio.gather(*(shelf.find(b"", (2**61, b"")) for _ in range(50)))
        assert clock.now == 4 * took + 3 * RESTS * took and len({taken.digest for taken in found}) == 1

    assert on_a_shelf(story) == [1, 2, 3, 3]


def test_who_wants_what_is_there_does_not_wait_for_one_who_wants_more(monkeypatch):
    async def story(shelf, step, clock, made):
        async def rest(seconds):
            await asyncio.Event().wait()

        first = await shelf.find(b"", (1, b""))
        monkeypatch.setattr(shelf_module.asyncio, "sleep", rest)
        waiting = asyncio.create_task(shelf.find(b"", (2, b"")))
        async with asyncio.timeout(5):
            while not shelf._is_making.locked():
                await asyncio.wait([waiting], timeout=0.001)
            assert await shelf.find(b"", (1, b"")) is first
            assert await shelf.find(first.digest, (2, b"")) is first
        waiting.cancel()

    assert on_a_shelf(story) == [1]


def test_what_nobody_fetches_from_is_dropped():
    async def story(shelf, step, clock, made):
        first = await shelf.find(b"", (1, b""))
        clock.now += KEEP_S + 1
        shelf.forget_unused()
        with pytest.raises(KeyError), shelf.opened(first.digest):
            pass
        assert (await shelf.find(first.digest, (1, b""))).digest == first.digest

    assert on_a_shelf(story) == [1, 1]


def test_no_more_than_two_are_kept_and_none_is_dropped_that_is_being_sent():
    async def story(shelf, step, clock, made):
        taken = []
        for step[0] in (1, 2, 3):
            taken.append(await shelf.find(b"", (step[0], b"")))
            clock.now += SHARE_S
        with pytest.raises(KeyError), shelf.opened(taken[0].digest):
            pass
        with shelf.opened(taken[1].digest), shelf.opened(taken[2].digest):
            step[0] = 4
            assert await shelf.find(b"", (4, b"")) is taken[2], "the furthest that there is"
        assert len(shelf._kept) == MAX_SNAPSHOTS
        assert (await shelf.find(b"", (4, b""))).manifest.rank == (4, b"")

    assert on_a_shelf(story) == [1, 2, 3, 4]


def test_a_copy_that_failed_leaves_room_for_the_next():
    async def run():
        async def make():
            raise RoundFailed("not finite")

        shelf = Shelf(make)
        for _ in range(2):
            with pytest.raises(RoundFailed):
                await shelf.find(b"", (1, b""))

    asyncio.run(run())
