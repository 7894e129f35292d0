"""A failure that ends training leaves a checkpoint of the last step, and is explained."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.conftest import refused
from trahiv_cli.errors import NotFinite, OutOfMemory, PeerBroken, RoundFailed, TrahivError
from trahiv_cli.progress.committed import StateLock
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.failing import explaining_the_data, leaving_a_checkpoint


class Trainer:
    """A trainer in its swarm, and its parts; it counts its checkpoints, which fail with `failure`."""

    has_entered = True
    saved = 0
    finished = 0

    def __init__(self, failure=None):
        self.lock_state = StateLock()
        self.failure = failure
        self.swarm_optimizer = self.state_averager = self.swarm_callback = self.checkpoints = self

    def save_checkpoint(self):
        if self.failure is not None:
            raise self.failure
        self.saved += 1

    def finish(self):
        self.finished += 1
        return "step-7" if self.saved else None

    def fail(self, failure):
        with pytest.raises(type(failure)) as caught, leaving_a_checkpoint(self, Events()):
            raise failure
        assert caught.value is failure
        return failure.__notes__[-1]


@pytest.fixture
def trainer():
    return Trainer()


@pytest.mark.parametrize(
    "failure",
    [RoundFailed("nobody gave its state"), KeyError("a callback"), torch.OutOfMemoryError("a step")],
)
def test_any_failure_leaves_checkpoint(trainer, failure):
    assert "resumes from step-7" in trainer.fail(failure)
    assert trainer.saved == 1


def test_torn_state_is_not_saved_until_replaced(trainer):
    with pytest.raises(MemoryError), trainer.lock_state.changing():
        raise MemoryError
    trainer.fail(MemoryError())
    assert trainer.saved == 0
    with trainer.lock_state.changing():
        trainer.lock_state.changes = {}
    trainer.fail(MemoryError())
    assert trainer.saved == 1


def test_refused_state_tears_nothing():
    lock = StateLock()
    with pytest.raises(RoundFailed), lock.changing():
        raise RoundFailed("it is another model's; nothing was changed")
    assert not lock.is_torn


@pytest.mark.parametrize("copy_fails", [MemoryError(), torch.OutOfMemoryError("again")])
def test_failing_save_keeps_original_error(copy_fails):
    assert "earlier ones are untouched" in Trainer(copy_fails).fail(IndexError("a row"))


def test_diverged_weights_are_not_saved(trainer):
    trainer.fail(NotFinite("weights are NaN"))
    assert trainer.saved == 0


def test_failure_before_entry_saves_nothing(trainer):
    trainer.has_entered = False
    assert trainer.fail(OSError("no node")) == "Nothing was trained."
    assert (trainer.saved, trainer.finished) == (0, 0)


@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid 7) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 7, 8) exited unexpectedly",
        "DataLoader timed out after 600 seconds",
    ],
)
def test_lost_worker_is_explained(trainer, events, told, said):
    with refused("A worker process of the data loader was killed", "/dev/shm", PeerBroken) as error:
        with leaving_a_checkpoint(trainer, events):
            raise RuntimeError(said)
    assert error.value.exit_code == 1
    assert trainer.saved == 1
    assert [one["code"] for one in told] == ["worker"]


def read(failure):
    """Read data whose collator fails."""

    def fail(_):
        raise failure

    with explaining_the_data():
        list(DataLoader([0], collate_fn=fail))


@pytest.mark.parametrize("failure", [IndexError("row 1 has no text"), ValueError("line 3: not JSON")])
def test_data_error_is_explained(failure):
    with pytest.raises(TrahivError, match=f"could not be read further: {failure}") as error:
        read(failure)
    assert error.value.exit_code == 1
    assert error.value.__cause__ is failure


@pytest.mark.parametrize("failure", [OutOfMemory("no room"), MemoryError("no room")])
def test_other_failures_while_reading_pass(failure):
    with pytest.raises(type(failure)):
        read(failure)


def test_failures_elsewhere_pass():
    with pytest.raises(KeyError), explaining_the_data():
        raise KeyError("elsewhere")
