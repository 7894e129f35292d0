"""How members keep copies of each other's records despite failing links, nodes and neighbours."""

import asyncio

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import StoreRequest

from tests.simulation.network import Network, VirtualLoop
from tests.simulation.nodes import Member, Traffic, virtual_time
from trahiv_cli.progress.tracker import REPORT_EVERY_S, REPORT_EVERY_S_A_PEER
from trahiv_cli.swarm.copies import COMPARE_EVERY_S, ENDS_SOON_S

KEY, LIFE_S, DELAY_S = "key", 20.0, 0.05
REPORT = bytes(700)  # without signature and subkey: the size for a lone peer after several rounds


def play(scene, *args):
    """Run a scene on a network in which each message takes 50 ms, and return its result."""
    loop, network = VirtualLoop(), Network()
    network.delay_s = lambda sender, receiver: DELAY_S
    with virtual_time(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(scene(network, *args))


async def swarm(network, num_members, **options):
    """Return fully connected members, each of which has stored its number."""
    members = [await Member(network, "0").enter()]
    for number in range(1, num_members):
        members.append(await Member(network, f"{number}", **options).enter(members[0]))
    for number, one in enumerate(members):
        assert await one.put(KEY, number)
    await asyncio.sleep(2.0)  # so each has compared its copies with another member
    return members


def numbers(members):
    """Return the values that every member should read."""
    return {one.id: number for number, one in enumerate(members)}


def test_record_spreads_within_one_round_trip():
    async def scene(network):
        members, loop = await swarm(network, 8), asyncio.get_running_loop()
        began = loop.time()
        assert await members[3].put(KEY, "new")
        assert loop.time() - began < 2.5 * DELAY_S
        for one in members:
            assert (await one.read(KEY))[members[3].id] == "new"
        assert loop.time() - began < 2.5 * DELAY_S, "to read takes no time"

    play(scene)


def test_one_concurrent_writer_reads_both():
    async def scene(network):
        members = await swarm(network, 2)

        async def store_and_read(one):
            await one.put(KEY, "mine")
            return list((await one.read(KEY)).values()).count("mine")

        assert 2 in await asyncio.gather(*map(store_and_read, members))

    play(scene)


def test_nearest_silent_nodes_hide_nothing():
    """As many nodes as hivemind stores a record on have the ids nearest to the key, and answer nothing."""

    async def nothing(request, context):
        return StoreRequest()

    async def scene(network):
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
            for number, one in enumerate(members):
                await one.put(KEY, number)
            for one in members:
                assert await one.read(KEY) == numbers(members)
        new = await Member(network, "new").enter(members[0])
        assert await new.read(KEY) == numbers(members)

    play(scene)


def test_joiner_reads_records_at_once():
    async def scene(network, options):
        members = await swarm(network, 5)
        new = await Member(network, "new", **options).enter(members[0])
        assert await new.read(KEY) == numbers(members)
        await members[1].put(KEY, "changed")
        assert (await new.read(KEY))[members[1].id] == "changed"

    play(scene, {})
    play(scene, {"client_mode": True})


def test_client_receives_stored_records():
    async def scene(network):
        members = [await Member(network, "0").enter()]
        members.append(await Member(network, "1", client_mode=True).enter(members[0]))
        members.append(await Member(network, "2").enter(members[0]))
        for number, one in enumerate(members):
            await one.put(KEY, number)
        await asyncio.sleep(3.0)
        network.tamper = traffic = Traffic()
        await members[2].put(KEY, "new")
        assert (await members[1].read(KEY))[members[2].id] == "new" and traffic.calls[members[1].id] == 0

    play(scene)


def test_unconnected_members_sync_through_third():
    async def scene(network):
        members = await swarm(network, 3)
        apart = {members[1].id, members[2].id}
        network.are_connected = lambda one, other: {one, other} != apart
        await members[1].put(KEY, "new", lives_s=120.0)
        await asyncio.sleep(3 * COMPARE_EVERY_S)
        assert (await members[2].read(KEY))[members[1].id] == "new"

    play(scene)


def test_expired_record_is_dropped_after_asking_owner():
    async def scene(network):
        members = await swarm(network, 3)
        gone, stays = members[1], members[2]
        network.remove(gone.id)
        network.tamper = traffic = Traffic()
        await asyncio.sleep(LIFE_S - ENDS_SOON_S / 2)
        await stays.put(KEY, 2)
        assert gone.id in await stays.read(KEY)
        await asyncio.sleep(ENDS_SOON_S)
        assert gone.id not in await stays.read(KEY)
        assert traffic.calls[stays.id] > 0

    play(scene)


def test_suspended_member_finds_all_records():
    """The clock jumped: all other records expired while this machine could not fetch new ones."""

    async def scene(network):
        members = await swarm(network, 4)
        slept = members[3]
        await slept.read(KEY)
        asleep = True
        network.is_cut = lambda one, other: asleep and slept.id in (one, other)
        slept.node.protocol.copies.close()  # it is suspended
        for _ in range(6):
            await asyncio.sleep(LIFE_S / 2)
            for number, one in enumerate(members[:3]):
                await one.put(KEY, number)
        asleep = False
        assert (await slept.read(KEY)).keys() == {one.id for one in members[:3]}

    play(scene)


@pytest.mark.parametrize("seconds", [10.0, 40.0, 240.0])
def test_records_recover_soon_after_cut(seconds):
    async def scene(network):
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

    play(scene)


def test_silent_member_delays_no_record():
    async def scene(network):
        members, loop = await swarm(network, 5), asyncio.get_running_loop()
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

    play(scene)


def test_greedy_member_receives_less():
    async def scene(network):
        members = await swarm(network, 8)
        for one in members:
            for number in range(20):
                await one.put(f"{number}", bytes(3000), 600.0)
        giver, greedy = members[0].node.protocol.copies, PeerID(b"\x12\x20" + bytes(32))
        given = [giver.lacking(greedy, frozenset()) for _ in range(100)]
        assert len(given[0].keys) == 8 * 21
        assert all(len(answer.keys) == 21 for answer in given[1:]), "its own alone: else it would seem gone"

    play(scene)


def kilobytes_a_second(num_peers, seconds=30.0):
    """Return the kilobytes per second that each peer sends and receives while all report at full rate."""

    async def scene(network):
        members, loop = await swarm(network, num_peers), asyncio.get_running_loop()
        for one in members:
            await one.put("status", bytes(600), 120.0)
            await one.put("addresses", bytes(300), 600.0)
        await asyncio.sleep(num_peers + COMPARE_EVERY_S)
        network.tamper, began = Traffic(), loop.time()
        every_s = max(REPORT_EVERY_S, REPORT_EVERY_S_A_PEER * num_peers)

        async def report(one, number):
            await asyncio.sleep(every_s * number / num_peers)
            while (at := loop.time()) < began + seconds:
                await one.put(KEY, REPORT)
                await one.read(KEY)
                await asyncio.sleep(max(0.0, every_s - (loop.time() - at)))

        await asyncio.gather(*(report(one, number) for number, one in enumerate(members)))
        took, traffic = loop.time() - began, network.tamper
        for one in members:
            assert (await one.read(KEY)).keys() == numbers(members).keys()
        return [
            (traffic.sent[one.id] / took / 1000, traffic.received[one.id] / took / 1000) for one in members
        ]

    return play(scene)


@pytest.mark.parametrize("num_peers", [2, 8, 24, 64])
def test_report_traffic_fits_home_link(num_peers):
    assert max(max(ways) for ways in kilobytes_a_second(num_peers)) <= 55.0
