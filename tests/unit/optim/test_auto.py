"""Which pace a swarm goes over to, from what its members measured: the same for all, and founded."""

from dataclasses import replace

import pytest

from trahiv_cli.optim.auto import LADDER, ROUND_TRIPS_S, START_CODEC, Measured, choose, start, usual_rate
from trahiv_cli.optim.pace import Pace

START = Pace(mode="overlap", codec=START_CODEC)
VALUES, TARGET = 8_000_000, 100
BYTES_A_VALUE = {"float16": 2.0, "uniform8": 1.004, "blockwise4": 0.531}


def link(mbit, pace=START, samples_per_second=5.0, num_peers=2):
    """What a peer measures whose exchanges go as fast as a link of so many Mbit/s allows."""
    each_way = 2 * (num_peers - 1) / num_peers * VALUES / pace.num_fragments
    sent = round(each_way * BYTES_A_VALUE[pace.codec])
    seconds = ROUND_TRIPS_S + 8 * sent / (mbit * 1e6)
    return Measured(samples_per_second, seconds, sent, sent, lowest_rate=mbit * 1e6 / 8)


def chosen(*measured, present=START, samples=None):
    """What follows from these claims of peers that trained until they had what was due, or brought that."""
    said = {f"Qm{number}": one for number, one in enumerate(measured)}
    speeds = {peer: one.samples_per_second for peer, one in said.items()}
    due = TARGET * present.steps_per_round / (sum(speeds.values()) or 1.0)
    brought = dict(zip(said, samples or [round(due * speed) for speed in speeds.values()], strict=True))
    return choose(present, said, brought, num_values=VALUES, target_batch_size=TARGET, share=0.05)


def after(pace, *mbits):
    """The pace that follows one that was measured on these links."""
    return chosen(*(link(mbit, pace, num_peers=len(mbits)) for mbit in mbits), present=pace).pace


# A step of two peers takes 10 s: 100 samples, at 5 a second each.


@pytest.mark.parametrize(
    ("mbit", "mode", "codec"),
    [
        (100, "overlap", "float16"),
        (20, "overlap", "uniform8"),
        (10, "overlap", "uniform8"),
        (5, "overlap", "blockwise4"),
        (2, "streaming", "uniform8"),
    ],
)
def test_a_swarm_comes_to_the_least_harmful_pace_that_its_link_carries(mbit, mode, codec):
    pace = START
    for _ in range(3):
        pace = after(pace, mbit, mbit)
    assert (pace.mode, pace.codec) == (mode, codec)
    assert after(pace, mbit, mbit) == pace, "and stays there"


def test_two_on_one_desk_wait_for_each_other():
    at_once = Measured(5.0, 0.1, VALUES, VALUES, lowest_rate=VALUES / 0.1)
    assert chosen(at_once, at_once).pace == replace(START, mode="sync", codec="float16")


def test_where_a_step_takes_minutes_all_peers_may_as_well_wait():
    slow = [link(1000, samples_per_second=0.1)] * 2
    assert chosen(*slow).pace == replace(START, mode="sync", codec="float16")


def test_of_two_links_the_slower_one_decides():
    assert after(START, 1000, 5) == after(START, 5, 5) == after(START, 5, 1000)


LIES = {
    "a link that carries nothing": replace(link(20), exchange_s=3e6, bytes_sent=1, bytes_received=1),
    "an endless link": replace(link(20), exchange_s=1e-9, bytes_sent=10**14, lowest_rate=9e14),
    "a link that carried nothing once": replace(link(20), lowest_rate=0.0),
    "an endless speed": replace(link(20), samples_per_second=9e14),
    "no speed to speak of": replace(link(20), samples_per_second=1e-9),
    "nothing": Measured(),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("samples", [1, 25, 8 * TARGET])
@pytest.mark.parametrize(
    "pace",
    [START, Pace("overlap", "float16"), Pace("overlap", "blockwise4"), Pace("streaming", "uniform8", 50)],
)
def test_one_of_four_does_not_choose_for_the_others(lie, samples, pace):
    honest = [link(20, pace, samples_per_second=2.5, num_peers=4)] * 3
    due = TARGET // 4 * pace.steps_per_round
    truth = chosen(*honest, honest[0], present=pace, samples=[due] * 4)
    choice = chosen(*honest, LIES[lie], present=pace, samples=[due] * 3 + [samples])
    assert choice.is_founded and choice.pace.has_local_steps == truth.pace.has_local_steps
    if samples <= due:
        assert choice.pace == truth.pace


def test_peers_of_unlike_speed_that_trained_for_as_long_come_to_the_true_time_of_a_step():
    unlike = [link(20, samples_per_second=speed, num_peers=3) for speed in (10.0, 1.0, 0.5)]
    assert "A step of 100 samples takes 8.7 s" in chosen(*unlike).reason


def test_a_round_that_came_late_does_not_make_steps_look_long():
    late = chosen(link(5), link(5), samples=[100, 100])
    assert late.pace == chosen(link(5), link(5)).pace and "takes 10.0 s" in late.reason


def test_local_steps_come_only_after_the_lightest_pace_without_was_measured():
    assert after(START, 1, 1) == after(Pace("sync", "float16"), 1, 1) == Pace("overlap", "blockwise4")
    assert after(Pace("overlap", "blockwise4"), 1, 1).mode == "streaming"


def test_a_link_that_falls_is_answered_with_the_next_round():
    fast = after(START, 100, 100)
    assert (fast.mode, fast.codec) == ("overlap", "float16")
    fallen = after(fast, 5, 100)
    assert (fallen.mode, fallen.codec) == ("overlap", "blockwise4")


def test_a_link_that_rises_is_trusted_only_with_room_to_spare():
    pace = Pace("overlap", "blockwise4")
    assert after(pace, 7, 7) == pace
    assert after(pace, 100, 100).codec == "float16"


@pytest.mark.parametrize("lowest_mbit", [0, 7])
def test_a_link_that_rises_is_trusted_after_several_exchanges(lowest_mbit):
    pace = Pace("overlap", "blockwise4")
    risen = replace(link(100, pace), lowest_rate=lowest_mbit * 1e6 / 8)
    assert chosen(link(100, pace), risen, present=pace).pace == pace


def test_a_link_that_falls_is_believed_at_once():
    fallen = replace(link(5), lowest_rate=link(100).rate)
    assert chosen(fallen, link(100)).pace.codec == "blockwise4"


@pytest.mark.parametrize("mbit", [1, 5, 1000])
def test_from_local_steps_there_is_no_way_back_to_common_ones(mbit):
    pace = Pace("streaming", "blockwise4", local_steps=100)
    assert after(pace, mbit, mbit).mode == "streaming"


def test_local_steps_follow_the_link():
    pace = Pace("streaming", "blockwise4", local_steps=50)
    assert after(pace, 100, 100).local_steps == LADDER[0]
    assert after(pace, 0.05, 0.05).local_steps > 50


def test_the_slowest_link_of_all_gets_the_most_local_steps():
    pace = Pace("streaming", "blockwise4", local_steps=LADDER[-1])
    assert after(pace, 1e-5, 1e-5) == pace


@pytest.mark.parametrize(
    "measured",
    [
        [Measured(), Measured()],
        [link(5), Measured()],
        [link(5), replace(link(5), samples_per_second=0.0)],
        [link(5), replace(link(5), exchange_s=0.0)],
        [link(5), replace(link(5), bytes_sent=0, bytes_received=0)],
        [link(5)],
        [link(5), link(5), Measured(), Measured()],
    ],
)
def test_nothing_changes_before_most_members_have_figures(measured):
    choice = chosen(*measured)
    assert choice.pace == START and not choice.is_founded


@pytest.mark.parametrize(("mbit", "mode"), [(100, "overlap"), (20, "overlap"), (5, "streaming")])
def test_a_codec_that_the_recipe_names_stays(mbit, mode):
    pace = start(Pace(), "float16")
    for _ in range(3):
        pace = after(pace, mbit, mbit)
    assert (pace.mode, pace.codec, pace.keeps_codec) == (mode, "float16", True)
    assert after(pace, mbit, mbit) == pace


def test_the_reason_has_the_figures():
    choice = chosen(link(5), link(100))
    assert choice.is_founded
    assert "A step of 100 samples takes 10.0 s" in choice.reason
    assert "5.0 Mbit/s" in choice.reason and "Mode overlap, codec blockwise4" in choice.reason


def test_whatever_is_not_what_is_chosen_is_kept():
    pace = replace(START, outer_learning_rate=0.3, outer_momentum=0.1, fragments=2)
    found = chosen(link(1), link(1), present=pace).pace
    assert (found.codec, found.fragments) == ("blockwise4", 2)
    assert (found.outer_learning_rate, found.outer_momentum) == (0.3, 0.1)


@pytest.mark.parametrize("measured", [Measured(), link(5), Measured(1.5, 0.25, 3, 4, 2.5)])
def test_a_measurement_arrives_as_it_was(measured):
    assert Measured.from_wire(measured.to_wire()) == measured


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, -1.0, 1.0],
        [float("nan"), 1.0, 1.0, 1.0, 1.0],
        [1.0, float("inf"), 1.0, 1.0, 1.0],
        [1.0, 1.0, 1e300, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0, -1.0],
        ["1", 1.0, 1.0, 1.0, 1.0],
    ],
)
def test_what_is_not_a_measurement_is_refused(data):
    with pytest.raises(ValueError, match="not a measurement"):
        Measured.from_wire(data)


@pytest.mark.parametrize("pace", [Pace(), START, Pace("streaming", "none", 100, 3, 0.5, 0.25, True)])
def test_a_pace_arrives_as_it_was(pace):
    assert Pace.from_wire(pace.to_wire()) == pace


@pytest.mark.parametrize(
    "change", [{"mode": "fast"}, {"local_steps": 0}, {"fragments": 2.5}, {"codec": 8}, {"keeps_codec": 1}]
)
def test_what_is_not_a_pace_is_refused(change):
    with pytest.raises(ValueError, match="not a pace"):
        Pace.from_wire(START.to_wire() | change)


def test_one_of_three_does_not_set_how_fast_an_exchange_is_taken_to_be():
    slow = Measured(1.0, 3e6, 1, 1)
    assert usual_rate([link(20), slow, link(20)]) == usual_rate([link(20), Measured(), link(20)])
    assert usual_rate([Measured()]) == usual_rate([]) == 0.0


def test_in_a_group_of_three_nothing_changes_while_one_has_no_figures():
    lie = Measured(5.0, 1e6, 1, 1)
    assert not chosen(link(20, num_peers=3), lie, Measured()).is_founded
    assert chosen(link(20, num_peers=3), lie, link(20, num_peers=3)).pace == after(START, 20, 20, 20)


def test_local_steps_come_only_after_a_round_was_measured_in_the_lightest_codec():
    lightest = replace(START, codec="blockwise4")
    before = [link(1, START)] * 2  # of the round in which the codec was changed
    assert chosen(*before, present=lightest).pace == lightest
    assert after(lightest, 1, 1).mode == "streaming"
