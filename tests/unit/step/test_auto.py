"""Which pace a swarm adopts given its members' measurements, and what a pace means."""

import itertools
from dataclasses import replace

import pytest

from tests.kit.stepping import commits, of_one_weight, with_b
from trahiv_cli.progress.pace import Pace, divide
from trahiv_cli.rounds.claims import Measured, Outcome, usual_rate
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.step.auto import DISTURBED_AT_MOST, LADDER, START_CODEC, Adaptation, idle_members

START = Pace(mode="overlap", codec=START_CODEC)
LIGHTEST = replace(START, codec="blockwise4")
VALUES = 8_000_000
TARGET = 100
BYTES_A_VALUE = {"float16": 2.0, "uniform8": 1.004, "blockwise4": 0.531}


def link(mbit, pace=START, samples_per_second=5.0, num_peers=2):
    """Return the measurement of a peer whose exchanges are as fast as a link of `mbit` Mbit/s allows."""
    each_way = 2 * (num_peers - 1) / num_peers * VALUES / pace.num_fragments
    sent = round(each_way * BYTES_A_VALUE[pace.codec])
    rate = mbit * 1e6 / 8
    return Measured(samples_per_second, 0.5 + sent / rate, sent, sent, lowest_rate=rate)


def chosen(*measured, present=START, samples=None):
    """Return the choice for these measurements of peers that brought their due samples, or `samples`."""
    said = {f"Qm{number}": one for number, one in enumerate(measured)}
    speeds = {peer: one.samples_per_second for peer, one in said.items()}
    due = TARGET * present.steps_per_round / (sum(speeds.values()) or 1.0)
    brought = dict(zip(said, samples or [round(due * speed) for speed in speeds.values()], strict=True))
    outcome = Outcome(brought, tuple(said), {}, {}, proof=b"", reason="", measured=said)
    return Adaptation(0.05, JoinerActivity(), VALUES, TARGET).choose(present, outcome)


def after(pace, *mbits):
    """Return the pace chosen after `pace` was measured on links of these speeds."""
    return chosen(*(link(mbit, pace, num_peers=len(mbits)) for mbit in mbits), present=pace)[0]


# A step of two peers takes 10 s: 100 samples at 5 per second each.
@pytest.mark.parametrize(
    ("mbit", "start", "mode", "codec"),
    [
        (100, START, "overlap", "float16"),
        (20, START, "overlap", "uniform8"),
        (5, START, "overlap", "blockwise4"),
        (2, START, "streaming", "uniform8"),
        (100, Pace("overlap", "float16", keeps_codec=True), "overlap", "float16"),
        (5, Pace("overlap", "float16", keeps_codec=True), "streaming", "float16"),
    ],
)
def test_swarm_settles_on_least_harmful_pace(mbit, start, mode, codec):
    pace = start
    for _ in range(3):
        pace = after(pace, mbit, mbit)
    assert (pace.mode, pace.codec, pace.keeps_codec) == (mode, codec, start.keeps_codec)
    assert after(pace, mbit, mbit) == pace, "and stays there"


SLOW = Measured(samples_per_second=0.02)  # with no samples, it can't keep up


@pytest.mark.parametrize(
    ("speeds", "samples", "is_local"),
    [([5.0, 5.0], [50, 50, 0], True), ([4.0, 3.0, 3.0], [40, 30, 30, 0], False)],
    ids=["one of three", "one of four"],
)
def test_slow_peers_call_for_local_steps(speeds, samples, is_local):
    fast = [link(100, samples_per_second=speed, num_peers=3) for speed in speeds]
    pace, _ = chosen(*fast, SLOW, samples=samples)
    assert pace.has_local_steps is is_local
    assert not is_local or pace.steps_per_round * 10.0 >= 2 / SLOW.samples_per_second, "a step takes 10 s"


def test_downloading_member_is_not_slow():
    rates = {"A": 5.0, "B": 5.0, "C": 4.0, "D": 0.5}
    measured = {peer: Measured(samples_per_second=rate) for peer, rate in rates.items()}
    samples = {"A": 50, "B": 50, "C": 0, "D": 0}
    assert idle_members(Outcome(samples, tuple(rates), {}, {}, proof=b"", measured=measured)) == {"D"}


def test_peer_without_steps_keeps_round_length():
    pace = Pace("streaming", "uniform8", local_steps=10)
    fast = [link(100, pace, num_peers=3)] * 2
    assert chosen(*fast, SLOW, present=pace, samples=[150, 150, 0])[0].local_steps == 10


def test_negligible_exchange_time_chooses_sync():
    for each in (Measured(5.0, 0.1, VALUES, VALUES, VALUES / 0.1), link(1000, samples_per_second=0.1)):
        assert chosen(each, each)[0] == replace(START, mode="sync", codec="float16")


@pytest.mark.parametrize(
    "lie",
    [
        replace(link(20), exchange_s=3e6, bytes_sent=1, bytes_received=1),
        replace(link(20), exchange_s=1e-9, bytes_sent=10**14, lowest_rate=9e14),
        replace(link(20), lowest_rate=0.0),
        replace(link(20), samples_per_second=9e14),
        replace(link(20), samples_per_second=1e-9),
        Measured(),
    ],
)
@pytest.mark.parametrize("samples", [1, 25, 8 * TARGET])
@pytest.mark.parametrize(
    "pace", [START, Pace("overlap", "float16"), LIGHTEST, Pace("streaming", "uniform8", 50)]
)
def test_single_liar_leaves_choice_unchanged(lie, samples, pace):
    honest = [link(20, pace, samples_per_second=2.5, num_peers=4)] * 3
    due = TARGET // 4 * pace.steps_per_round
    truth, _ = chosen(*honest, honest[0], present=pace, samples=[due] * 4)
    choice, reason = chosen(*honest, lie, present=pace, samples=[due] * 3 + [samples])
    assert reason
    assert choice.has_local_steps == truth.has_local_steps
    assert samples > due or choice == truth
    assert usual_rate([honest[0], lie, honest[0]]) == honest[0].rate
    assert usual_rate([Measured()]) == 0.0


def test_step_time_accounts_for_unlike_speeds():
    unlike = [link(20, samples_per_second=speed, num_peers=3) for speed in (10.0, 1.0, 0.5)]
    assert "A step of 100 samples takes 8.7 s" in chosen(*unlike)[1]
    late, reason = chosen(link(5), link(100), samples=[100, 100])
    assert late == LIGHTEST
    assert "takes 10.0 s" in reason
    assert "5.0 Mbit/s" in reason
    assert "Mode overlap, codec blockwise4" in reason


def test_local_steps_follow_lightest_pace():
    assert after(START, 1, 1) == after(Pace("sync", "float16"), 1, 1) == LIGHTEST
    # Measured in the round that changed the codec:
    assert chosen(link(1), link(1), present=LIGHTEST)[0] == LIGHTEST
    own = replace(LIGHTEST, outer_learning_rate=0.3, outer_momentum=0.1, fragments=2)
    local = after(own, 1, 1)
    assert local == replace(own, mode="streaming", codec=local.codec, local_steps=local.local_steps)
    pace = Pace("streaming", "blockwise4", local_steps=50)
    assert after(pace, 100, 100).local_steps == LADDER[0]
    assert after(pace, 0.05, 0.05).local_steps > 50
    slowest = replace(pace, local_steps=LADDER[-1])
    assert after(slowest, 1e-5, 1e-5) == slowest


def test_pace_falls_at_once_and_rises_slowly():
    fast = after(START, 100, 100)
    assert fast.codec == "float16"
    assert after(fast, 5, 100) == after(fast, 100, 5) == LIGHTEST
    assert chosen(replace(link(5), lowest_rate=link(100).rate), link(100))[0] == LIGHTEST
    assert after(LIGHTEST, 7, 7) == LIGHTEST
    assert after(LIGHTEST, 100, 100).codec == "float16"
    for lowest_mbit in (0, 7):
        risen = replace(link(100, LIGHTEST), lowest_rate=lowest_mbit * 1e6 / 8)
        assert chosen(link(100, LIGHTEST), risen, present=LIGHTEST)[0] == LIGHTEST


@pytest.mark.parametrize(
    "measured",
    [
        [Measured(), Measured()],
        [link(5), replace(link(5), samples_per_second=0.0)],
        [link(5), replace(link(5), exchange_s=0.0)],
        [link(5), replace(link(5), bytes_sent=0, bytes_received=0)],
        [link(5)],
        [link(5), link(5), Measured(), Measured()],
        [link(20, num_peers=3), Measured(5.0, 1e6, 1, 1), Measured()],
    ],
)
def test_pace_waits_for_majority_of_measurements(measured):
    assert chosen(*measured) == (START, "")


def test_pace_change_is_announced_and_applied():
    peer, _ = of_one_weight(with_b(), pace=Pace("sync", "float16"), auto_share=0.05)
    slow = Measured(1.0, 1000.0, 10, 10, lowest_rate=0.01)
    peer.rounds.end = commits(measured={"QmMe": slow, "QmB": slow})
    peer.train()
    assert peer.position.pace == LIGHTEST
    [said] = peer.said("pace")
    assert said["mode"] == "overlap"
    assert said["message"].startswith("From step 1 on: A step of 8 samples")


def test_exchange_during_download_is_not_measured():
    peer, _ = of_one_weight(with_b())
    adaptation = peer.adaptation
    noted = []
    adaptation.begin_batch()
    for number in range(2 * DISTURBED_AT_MOST + 3):
        if number:
            peer.activity.note()
        end = commits(exchange_s=number + 5.0, parts_sent=100, parts_received=100)
        adaptation.end_batch(8)
        adaptation.measure(end(peer.rounds))
        if adaptation.measured.exchange_s == number + 5.0:
            noted.append(number)
    assert noted == [0, DISTURBED_AT_MOST + 1, 2 * DISTURBED_AT_MOST + 2]
    assert adaptation.measured.lowest_rate == adaptation.measured.rate, "the last of three was the slowest"


SIZES = [
    [10] * 8,
    [512, *([64, 64, 4096, 256, 16384, 256] * 6), 512],  # like a small transformer
    *([1000, 1, 1, 1, 1], [1, 1, 1, 1, 1000], [0, 0, 0, 0], [7]),
]


@pytest.mark.parametrize("num_fragments", range(1, 8))
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} tensors")
def test_fragments_divide_tensors_evenly(sizes, num_fragments):
    fragments = divide(sizes, num_fragments)
    assert len(fragments) == min(num_fragments, len(sizes))
    assert all(fragments)
    assert list(itertools.chain(*fragments)) == list(range(len(sizes))), "in order, each once"
    most = sum(sizes) / len(fragments) + max(sizes)
    assert all(sum(sizes[place] for place in fragment) <= most for fragment in fragments)
    assert divide([10] * 8, 4) == (range(2), range(2, 4), range(4, 6), range(6, 8))
