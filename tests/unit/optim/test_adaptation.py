"""What a peer takes for its speed and its link."""

import pytest

from tests.kit.stepping import commits, of_one_weight, with_b
from trahiv_cli.optim.auto import DISTURBED_AT_MOST


def measured_rounds(peer, disturb, num_rounds):
    """Numbers of the rounds whose exchange was noted; before each one somebody disturbs."""
    numbers = []
    for number in range(num_rounds):
        disturb()
        end = commits(exchange_s=number + 5.0, parts_sent=100, parts_received=100)
        outcome = end(peer.gradients)
        peer.parts.adaptation.measure(outcome)
        if peer.parts.adaptation.measured.exchange_s == outcome.exchange_s:
            numbers.append(number)
    return numbers


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_an_exchange_beside_a_download_is_no_measure_of_the_link(is_disturbed):
    peer, _ = of_one_weight(with_b(), commits(exchange_s=2.0, parts_sent=100, parts_received=100))
    peer.train()
    peer.gradients.end = commits(exchange_s=5.0, parts_sent=100, parts_received=100, proof=b"next")
    if is_disturbed:
        peer.parts.interest.note()
    peer.train()
    assert peer.parts.adaptation.measured.exchange_s == (2.0 if is_disturbed else 5.0)


def test_who_asks_for_a_state_and_fetches_none_disturbs_no_measure():
    peer, _ = of_one_weight(with_b())
    assert measured_rounds(peer, lambda: peer.parts.interest.note_asker(0), 3) == [0, 1, 2]
    assert peer.parts.interest.is_there


def test_downloads_that_never_end_are_what_the_link_is_like():
    peer, _ = of_one_weight(with_b())
    most = DISTURBED_AT_MOST
    assert measured_rounds(peer, peer.parts.interest.note, 2 * most + 2) == [most, 2 * most + 1]
