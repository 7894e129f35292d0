"""How long a round's members wait for one another, and for the DHT's process."""

import pytest
import torch

from tests.kit.averagers import gradient_averager
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim import averager as averaging
from trahiv_cli.optim.auto import Measured
from trahiv_cli.optim.averager import patience_s
from trahiv_cli.optim.pace import RoundRules
from trahiv_cli.optim.rounds import Exchange, Round
from trahiv_cli.optim.soundness import Claim
from trahiv_cli.recipe.schema import SwarmSection

MIB = 2**20
QUICK, ENDLESS = Measured(10.0, 1.5, MIB, MIB, 0.0), Measured(10.0, 3e6, MIB, MIB, 0.0)
SMALL, TRIPS = Measured(10.0, 0.1, 2**15, 2**15, 0.0), Measured(10.0, 0.01, 22, 22, 0.0)
MANY = [Measured(10.0, 10.5, round(rate * 1.25e6), 0, 0.0) for rate in (*[100] * 15, 5)]  # Mbit/s


@pytest.mark.parametrize(
    ("members", "part_bytes", "all_bytes", "low", "high"),
    [
        ([Measured()] * 2, MIB, 2**30, 0.0, 0.0),
        ([QUICK] * 3, MIB, 2**30, 10.0, 15.0),
        ([ENDLESS] * 2, MIB, 2**30, 60.0, 60.0),  # all together: for a minute
        ([QUICK, ENDLESS, QUICK], MIB, 2**30, 30.0, 30.0),  # one alone: for half of one
        ([SMALL] * 2, 2**19, 2**15, 0.01, 1.0),  # parts of an adapter are never as large as they may be
        ([TRIPS] * 2, 2**19, 40 * 2**10, 0.0, 0.0),  # it says nothing of the link
        (MANY, 2**19, 2**30, 15 * 2**19 / (5 * 1.25e5), 30.0),  # the slow one needs as long for all others
    ],
)
def test_a_part_is_waited_for_as_long_as_links_take_within_bounds(members, part_bytes, all_bytes, low, high):
    claims = {str(number): Claim(measured=measured) for number, measured in enumerate(members)}
    assert low <= patience_s(claims, part_bytes, all_bytes) <= high


def test_an_averager_that_does_not_answer_fails_the_round_and_does_not_hold_it_up(monkeypatch):
    monkeypatch.setattr(averaging, "ANSWER_S", 0.05)
    averager = gradient_averager([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(RoundFailed, match="did not answer"):
        averager.start_round(Claim(samples=3), 5.0, Exchange(range(1)))
    assert averager.traffic == (0, 0)


def test_a_group_includes_who_was_left_out_and_the_rules_of_a_script_are_those_of_a_recipe():
    assert Round({"QmA": 4}, 1.0, 0, 0, True, left_out={"QmB": "too large"}).group == ("QmA", "QmB")
    section = SwarmSection()
    assert RoundRules() == RoundRules(section.solo_after_s, section.norm_limit, section.robust_mean)
