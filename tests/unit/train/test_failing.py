"""A failure that ends training leaves a checkpoint of the last step, and is explained."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from trahiv_cli.errors import NotFinite, OutOfMemory, PeerBroken, RoundFailed, TrahivError
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.failing import explaining_the_data, leaving_a_checkpoint


class Trainer:
    """A trainer that has entered its swarm, or not, and counts its checkpoints."""

    def __init__(self, *, has_entered=True, failure=None):
        self.lock, self.saved, self.finished, self._failure = StateLock(), 0, 0, failure
        self.has_entered = has_entered
        self.swarm_optimizer = SimpleNamespace(state_averager=SimpleNamespace(lock_state=self.lock))
        self.swarm_callback = SimpleNamespace(save_checkpoint=self._save, checkpoints=self)

    def _save(self):
        if self._failure is not None:
            raise self._failure
        self.saved += 1

    def finish(self):
        self.finished += 1
        return "step-7" if self.saved else None

    def fail(self, failure):
        with pytest.raises(type(failure)) as caught, leaving_a_checkpoint(self, Events()):
            raise failure
        assert caught.value is failure
        return getattr(failure, "__notes__", [""])[-1]


@pytest.mark.parametrize(
    "failure",
    [
        RoundFailed("nobody gave its state"),
        IndexError("a row"),
        ValueError("a collator"),
        KeyError("a callback"),
        torch.OutOfMemoryError("in a step"),
    ],
)
def test_any_failure_leaves_checkpoint(failure):
    trainer = Trainer()
    assert "resumes from step-7" in trainer.fail(failure)
    assert trainer.saved == 1


def test_torn_state_is_not_saved():
    torn, later = Trainer(), Trainer()
    for trainer in (torn, later):
        with pytest.raises(MemoryError), trainer.lock.changing():
            raise MemoryError
    with later.lock.changing():
        later.lock.changes = {}
    for trainer, is_saved in ((torn, 0), (later, 1)):
        trainer.fail(MemoryError())
        assert trainer.saved == is_saved
    refused = Trainer()
    with pytest.raises(RoundFailed), refused.lock.changing():
        raise RoundFailed("it is another model's; nothing was changed")
    assert not refused.lock.is_torn


@pytest.mark.parametrize("copy_fails", [MemoryError(), torch.OutOfMemoryError("again")])
def test_failing_save_keeps_original_error(copy_fails):
    assert "earlier ones are untouched" in Trainer(failure=copy_fails).fail(IndexError("a row"))


def test_diverged_weights_are_not_saved():
    trainer = Trainer()
    trainer.fail(NotFinite("weights are NaN"))
    early = Trainer(has_entered=False)
    early.fail(OSError("before it entered"))
    assert (trainer.saved, early.saved, early.finished) == (0, 0, 0)


@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid 7) is killed by signal: Killed. ",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
        "are out of shared memory. Please try to raise your shared memory limit.",
        "DataLoader worker (pid(s) 7, 8) exited unexpectedly",
        "DataLoader timed out after 600 seconds",
    ],
)
def test_lost_worker_is_explained(said):
    trainer, told = Trainer(), []
    with pytest.raises(PeerBroken, match="A worker process of the data loader was killed") as failure:
        with leaving_a_checkpoint(trainer, Events(told.append)):
            raise RuntimeError(said)
    assert trainer.saved == 1 and [one["code"] for one in told] == ["worker"]
    assert "/dev/shm" in failure.value.hint and failure.value.exit_code == 1


class Rows(torch.utils.data.Dataset):
    """Two rows, of which reading the second one raises."""

    def __init__(self, failure):
        self.failure = failure

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            raise self.failure
        return index


@pytest.mark.parametrize("failure", [IndexError("row 1 has no text"), ValueError("line 3: not JSON")])
def test_data_error_is_explained(failure):
    with pytest.raises(TrahivError, match=f"could not be read further: {failure}") as told:
        with explaining_the_data():
            list(DataLoader(Rows(failure)))
    assert told.value.exit_code == 1 and told.value.__cause__ is failure


@pytest.mark.parametrize("failure", [OutOfMemory("no room"), MemoryError("no room")])
def test_other_failures_while_reading_pass(failure):
    with pytest.raises(type(failure)), explaining_the_data():
        list(DataLoader(Rows(failure)))
    with pytest.raises(KeyError), explaining_the_data():
        raise KeyError("elsewhere")
