"""Local steps of a peer that stops before their round: they count in the next round after it is back."""

from types import SimpleNamespace

import pytest
import torch

from tests.kit import stepping
from tests.kit.stepping import commits, sgd
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Spans
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace
from trahiv_cli.rounds.claims import Outcome
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints

DILOCO = Pace("diloco", local_steps=4)
STREAMING = Pace("streaming", local_steps=8, fragments=2)


class Peer(stepping.Peer):
    """A peer of two weights of two values in a module, which leases its positions."""

    def __init__(self, pace=DILOCO):
        self.model = torch.nn.ParameterDict({name: torch.zeros(2) for name in "ab"})
        super().__init__([*self.model.values()], sgd, end=commits(), pace=pace)
        self.resumed = []
        leases = stepping.Positions(self)
        leases.resume = self.resumed.append

    @property
    def values(self):
        return torch.cat([*self.model.values()]).tolist()

    @property
    def optimizer(self):
        """The parts of the swarm's optimizer that a checkpoint reads and writes."""
        state = self.state
        now = state.committed.now
        return SimpleNamespace(
            opt=state.optimizer,
            state_averager=state,
            position=self.position,
            agreed_values=dict(zip(self.model.values(), state.agreed or (), strict=False)),
            own_steps=self.position.method.own_steps,
            history=now.history,
            ledger=now.ledger,
            pace=now.pace,
        )

    def save(self, folder):
        Checkpoints(folder).save(CheckpointData.of(self.model, self.optimizer))


def trained(pace=DILOCO):
    """Make a peer that has trained one batch."""
    peer = Peer(pace)
    peer.train(positions=range(8))
    return peer


def resumed(folder, pace=DILOCO):
    """Make a peer that goes on from the newest checkpoint."""
    peer = Peer(pace)
    newest = Checkpoints(folder).newest()
    newest.load_weights(peer.model)
    if (outer := peer.state.outer) is not None:
        for anchor, weight in zip(outer.anchor, peer.model.values(), strict=True):
            anchor.copy_(weight.detach())
        newest.load_outer(outer)
    newest.load_own_steps(peer.optimizer)
    peer.position.enter(newest.state.history, newest.state.ledger)
    return peer


@pytest.mark.parametrize("pace", [DILOCO, STREAMING], ids=["diloco", "streaming"])
def test_short_lives_add_up_to_round(tmp_path, pace):
    stayed = Peer(pace)
    stayed.save(tmp_path)
    for life in range(3):
        peer = resumed(tmp_path, pace)
        for one in (peer, stayed):
            one.train(positions=range(8 * life, 8 * life + 8))
        assert peer.values == stayed.values
        assert peer.tracker.samples == 8 * (life + 1)
        peer.save(tmp_path)
    again = resumed(tmp_path, pace)
    for one in (again, stayed):
        assert one.history == History()
        one.train(positions=range(24, 32))
        assert one.history.samples == 32
        assert list(one.state.committed.now.ledger.covered) == list(range(32))
    assert again.values == stayed.values
    assert again.resumed == [Spans(((0, 24),))]


def test_own_steps_of_running_round_are_saved(tmp_path):
    peer = trained(STREAMING)
    peer.position.method.set_aside(goes_on=True)
    peer.train(positions=range(8, 16))
    peer.save(tmp_path)
    own = resumed(tmp_path, STREAMING).position.method.own_steps
    assert (own.samples, list(own.positions)) == (16, list(range(16)))


@pytest.mark.parametrize("pace", [DEFAULT_PACE, STREAMING], ids=["sync", "other fragments"])
def test_other_mode_drops_own_steps(tmp_path, pace):
    trained().save(tmp_path)
    other = resumed(tmp_path, pace)
    assert other.values == [0.0] * 4
    assert not other.position.method.own_steps


@pytest.mark.parametrize(("members", "left"), [(("QmMe", "QmB"), 0), (("QmB", "QmC"), 8)])
def test_followed_round_takes_its_own_steps(members, left):
    peer = trained()
    with peer.gradients.averages.locked() as averages:
        for average in averages:
            average.fill_(0.25)
    outcome = Outcome(dict.fromkeys(members, 8), members, left_out={}, states={}, proof=b"", trained=())
    peer.position.follow(peer.position.after(16, b""), outcome)
    assert peer.position.method.own_steps.samples == left
    assert (peer.values == torch.cat([*peer.state.agreed]).tolist()) is not bool(left)


def test_newer_state_replaces_own_steps(tmp_path):
    trained().save(tmp_path)
    again = resumed(tmp_path)
    again.position.adopt()
    assert not again.position.method.own_steps
    assert again.work.leases.returned == list(range(8))
