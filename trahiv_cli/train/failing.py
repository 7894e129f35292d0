"""Handling of failures that end training: save a checkpoint, and add a note about it to the exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trahiv_cli.assets.memory import is_out_of_memory
from trahiv_cli.errors import NotFinite, PeerBroken, TrahivError
from trahiv_cli.telemetry.events import Events


@contextmanager
def leaving_a_checkpoint(trainer: Any, events: Events) -> Iterator[None]:
    """Save a checkpoint of the last step if a failure ends the block; wait until checkpoints are written.

    `trainer` is a `SwarmTrainerMixin`. No checkpoint is saved if weights are not finite, or if the failure
    came while the state was being changed. A note on the exception names the checkpoint from which `train()`
    resumes.

    Raises:
        PeerBroken: a worker of the data loader was killed or hangs; it replaces torch's `RuntimeError`.
    """
    try:
        yield
    except Exception as failure:
        note = _save(trainer, failure) if trainer.has_entered else "Nothing was trained."
        failure.add_note(note)
        # Torch's errors about a worker begin so; errors of the user's code in a worker do not.
        if isinstance(failure, RuntimeError) and str(failure).startswith("DataLoader "):
            reason = str(failure).strip().rstrip(".")
            message = f"A worker process of the data loader was killed, or hangs: {reason}. {note}"
            hint = (
                "if it repeats, give this machine more memory or a larger /dev/shm, or set "
                "dataloader_num_workers to 0 (in a recipe: training.dataloader_num_workers)"
            )
            events.warn("worker", message, hint)
            raise PeerBroken(message, hint) from failure
        raise
    finally:
        if trainer.has_entered:
            trainer.swarm_callback.checkpoints.finish()


def _save(trainer: Any, failure: Exception) -> str:
    """Save a checkpoint if the state is consistent; return a sentence about it."""
    callback = trainer.swarm_callback
    optimizer = trainer.swarm_optimizer
    path = None
    is_torn = optimizer is None or optimizer.state_averager.lock_state.is_torn
    if not is_torn and not isinstance(failure, NotFinite):
        with suppress(RuntimeError, MemoryError):  # memory may have run out, and a copy needs some
            callback.save_checkpoint()
            path = callback.checkpoints.finish()
    if path is None:
        return "No checkpoint of the last step could be saved; the earlier ones are untouched."
    return f"The swarm's last step is saved: `train()` resumes from {path}."


@contextmanager
def explaining_the_data() -> Iterator[None]:
    """Turn an error that the data loader raises during training into a `TrahivError` with a hint."""
    try:
        yield
    except Exception as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        is_of_data = any(frame.filename.endswith("torch/utils/data/dataloader.py") for frame in frames)
        if is_of_data and not isinstance(failure, TrahivError) and not is_out_of_memory(failure):
            *_, reason = str(failure).strip().split("\n")  # after a worker's traceback
            message = f"The data could not be read further: {reason} ({type(failure).__name__})."
            raise TrahivError(
                " ".join([message, *getattr(failure, "__notes__", [])]),
                hint="mend the data, and run the same command again: it resumes from its checkpoint",
            ) from failure
        raise
