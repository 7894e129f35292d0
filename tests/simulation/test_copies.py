"""How members keep copies of each other's records despite failing links, nodes and neighbours."""

import asyncio
from functools import wraps

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import StoreRequest

from tests.simulation.network import Network, VirtualLoop
from tests.simulation.nodes import Member, Traffic, virtual_time
from trahiv_cli.progress.tracker import REPORT_EVERY_S_A_PEER
from trahiv_cli.swarm.copies import COMPARE_EVERY_S, ENDS_SOON_S, NEW_S

KEY = "key"
LIFE_S = 20.0
DELAY_S = 0.05
REPORT = bytes(700)  # without signature and subkey: the size for a lone peer after several rounds


@pytest.fixture
def network():
    network = Network()
    network.delay_s = lambda sender, receiver: DELAY_S
    return network


def simulated(scene):
    """Run a coroutine as a test, on a clock that jumps."""

    @wraps(scene)
    def test(**given):
        loop = VirtualLoop()
        with virtual_time(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(scene(**given))

    return test


async def swarm(network, num_members, **options):
    """Return fully connected members, each of which has stored its number."""
    members = [await Member(network, "0").enter()]
    for number in range(1, num_members):
        members.append(await Member(network, f"{number}", **options).enter(members[0]))
    await put_numbers(members)
    await asyncio.sleep(2.0)  # so each has compared its copies with another member
    return members


async def put_numbers(members):
    for number, one in enumerate(members):
        assert await one.put(KEY, number)


def numbers(members):
    """Return the values that every member should read."""
    return {one.id: number for number, one in enumerate(members)}


@simulated
async def test_record_spreads_within_one_round_trip(network):
    members = await swarm(network, 8)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await members[3].put(KEY, "new")
    assert loop.time() - began < 2.5 * DELAY_S
    for one in members:
        assert (await one.read(KEY))[members[3].id] == "new"
    assert loop.time() - began < 2.5 * DELAY_S, "to read takes no time"


@simulated
async def test_one_concurrent_writer_reads_both(network):
    members = await swarm(network, 2)

    async def store_and_read(one):
        await one.put(KEY, "mine")
        return list((await one.read(KEY)).values()).count("mine")

    assert 2 in await asyncio.gather(*map(store_and_read, members))


@simulated
async def test_nearest_silent_nodes_hide_nothing(network):
    """As many nodes as hivemind stores a record on have the ids nearest to the key, and answer nothing."""

    async def nothing(request, context):
        return StoreRequest()

    members = await swarm(network, 6)
    nearest = DHTID.generate(source=KEY)
    for number in range(5):
        liar = Member(network, f"liar {number}", node_id=DHTID(nearest ^ (number + 1)))
        await liar.enter(*members)
        liar.node.protocol.rpc_compare = liar.node.protocol.rpc_find = nothing
        for one in members:
            await liar.node.protocol.call_ping(one.id, strict=False)
    for _ in range(10):
        await asyncio.sleep(LIFE_S / 2)
        await put_numbers(members)
        for one in members:
            assert await one.read(KEY) == numbers(members)
    new = await Member(network, "new").enter(members[0])
    assert await new.read(KEY) == numbers(members)


@pytest.mark.parametrize("options", [{}, {"client_mode": True}])
@simulated
async def test_joiner_reads_records_at_once(network, options):
    members = await swarm(network, 5)
    new = await Member(network, "new", **options).enter(members[0])
    assert await new.read(KEY) == numbers(members)
    await members[1].put(KEY, "changed")
    assert (await new.read(KEY))[members[1].id] == "changed"


@simulated
async def test_client_receives_stored_records(network):
    members = [await Member(network, "0").enter()]
    members.append(await Member(network, "1", client_mode=True).enter(members[0]))
    members.append(await Member(network, "2").enter(members[0]))
    await put_numbers(members)
    await asyncio.sleep(NEW_S)
    network.tamper = traffic = Traffic()
    await members[2].put(KEY, "new")
    assert (await members[1].read(KEY))[members[2].id] == "new"
    assert traffic.calls[members[1].id] == 0


@simulated
async def test_unconnected_members_sync_through_third(network):
    members = await swarm(network, 3)
    apart = {members[1].id, members[2].id}
    network.are_connected = lambda one, other: {one, other} != apart
    await members[1].put(KEY, "new", lives_s=120.0)
    await asyncio.sleep(3 * COMPARE_EVERY_S)
    assert (await members[2].read(KEY))[members[1].id] == "new"


@simulated
async def test_new_member_soon_learns_of_unconnected_one(network):
    members = await swarm(network, 6)
    apart = {members[1].id, members[2].id}
    network.are_connected = lambda one, other: {one, other} != apart
    await asyncio.sleep(NEW_S / 2)
    await members[1].put(KEY, "new", lives_s=120.0)
    await asyncio.sleep(2.5)
    assert (await members[2].read(KEY))[members[1].id] == "new"


@simulated
async def test_expired_record_is_dropped_after_asking_owner(network):
    members = await swarm(network, 3)
    gone = members[1]
    stays = members[2]
    network.remove(gone.id)
    network.tamper = traffic = Traffic()
    await asyncio.sleep(LIFE_S - ENDS_SOON_S / 2)
    await stays.put(KEY, 2)
    assert gone.id in await stays.read(KEY)
    await asyncio.sleep(ENDS_SOON_S)
    assert gone.id not in await stays.read(KEY)
    assert traffic.calls[stays.id] > 0


@simulated
async def test_suspended_member_finds_all_records(network):
    """The clock jumped: all other records expired while this machine could not fetch new ones."""
    members = await swarm(network, 4)
    slept = members[3]
    await slept.read(KEY)
    asleep = True
    network.is_cut = lambda one, other: asleep and slept.id in (one, other)
    slept.node.protocol.copies.close()  # it is suspended
    for _ in range(6):
        await asyncio.sleep(LIFE_S / 2)
        await put_numbers(members[:3])
    asleep = False
    assert (await slept.read(KEY)).keys() == {one.id for one in members[:3]}


@pytest.mark.parametrize("seconds", [10.0, 40.0, 240.0])
@simulated
async def test_records_recover_soon_after_cut(network, seconds):
    members = await swarm(network, 4)
    sides = [{one.id for one in members[:2]}, {one.id for one in members[2:]}]
    network.is_cut = lambda one, other: any({one, other} == {a, b} for a in sides[0] for b in sides[1])

    async def report():
        while True:
            await asyncio.gather(*(one.put(KEY, number) for number, one in enumerate(members)))
            await asyncio.sleep(1.0)

    reporting = asyncio.create_task(report())
    await asyncio.sleep(seconds)
    network.is_cut = lambda one, other: False
    await asyncio.sleep(15.0)
    for one in members:
        assert await one.read(KEY) == numbers(members)
    reporting.cancel()


@simulated
async def test_silent_member_delays_no_record(network):
    members = await swarm(network, 5)
    loop = asyncio.get_running_loop()
    silent = members[4].id
    network.tamper = lambda message: [] if message.sender == silent else [message.content]
    slowest = 0.0
    for number in range(40):
        began = loop.time()
        await members[0].put(KEY, number)
        slowest += (loop.time() - began) / 40
        assert (await members[1].read(KEY))[members[0].id] == number
        await asyncio.sleep(1.0)
    assert slowest < 0.3, "it is sent nothing more until it answers"


@simulated
async def test_greedy_member_receives_less(network):
    members = await swarm(network, 8)
    for one in members:
        for number in range(20):
            await one.put(f"{number}", bytes(3000), 600.0)
    giver = members[0].node.protocol.copies
    greedy = PeerID(b"\x12\x20" + bytes(32))
    given = [giver.lacking(greedy, frozenset()) for _ in range(100)]
    assert len(given[0].keys) == 8 * 21
    assert all(len(answer.keys) == 21 for answer in given[1:]), "its own alone: else it would seem gone"


@pytest.mark.parametrize("num_peers", [2, 8, 24, 64])
@simulated
async def test_report_traffic_fits_home_link(network, num_peers):
    """All report at full rate for half a minute."""
    members = await swarm(network, num_peers)
    loop = asyncio.get_running_loop()
    for one in members:
        await one.put("status", bytes(600), 120.0)
        await one.put("addresses", bytes(300), 600.0)
    await asyncio.sleep(num_peers + COMPARE_EVERY_S)
    network.tamper = traffic = Traffic()
    began = loop.time()
    every_s = max(0.25, REPORT_EVERY_S_A_PEER * num_peers)

    async def report(one, number):
        await asyncio.sleep(every_s * number / num_peers)
        while (at := loop.time()) < began + 30.0:
            await one.put(KEY, REPORT)
            await one.read(KEY)
            await asyncio.sleep(max(0.0, every_s - (loop.time() - at)))

    await asyncio.gather(*(report(one, number) for number, one in enumerate(members)))
    most_bytes = max([*traffic.sent.values(), *traffic.received.values()])
    assert most_bytes / (loop.time() - began) <= 55_000.0
    for one in members:
        assert (await one.read(KEY)).keys() == numbers(members).keys()
