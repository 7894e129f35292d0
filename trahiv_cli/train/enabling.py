"""`enable`: transformers' own classes take `hivemind_config`, as those of the original trahiv did."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from trahiv_cli.train.settings import taking_config
from trahiv_cli.train.trainer import SwarmTrainerMixin, constructor


def enable(hivemind_config: dict[str, Any] | None = None, swarm: dict[str, Any] | None = None) -> None:
    """Let `transformers.Trainer`, its subclasses and `TrainingArguments` take `hivemind_config`.

    It holds for this process from now on, also for classes that were imported or defined before. Trainers
    also take the other keywords of `SwarmTrainerMixin`. One without `hivemind_config` trains as before.

    Example::

        import transformers, trahiv_cli

        trahiv_cli.enable()
        args = transformers.TrainingArguments(..., hivemind_config={"opt": {"run_id": "spanish", ...}})
        transformers.Trainer(model=model, args=args, train_dataset=data).train()

    Args:
        hivemind_config: what each trainer uses that is given none; None leaves those alone.
        swarm: the same for the recipe's section `swarm`, or its fields.
    """
    SwarmTrainerMixin.set_usual(hivemind_config, swarm)
    # A class is called by its `__new__`, also where a program has imported it already.
    Trainer.__new__ = staticmethod(constructor(Trainer.__init__))
    TrainingArguments.__new__ = staticmethod(_new_arguments)


def _new_arguments(cls: Any, *_: Any, **keywords: Any) -> Any:
    return object.__new__(taking_config(cls) if "hivemind_config" in keywords else cls)
