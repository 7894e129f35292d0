"""How a peer's life ends: with the finished model, or with the checkpoint to resume from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trahiv_cli.recipe.agreement import agreement, fingerprint, run_id
from trahiv_cli.recipe.paths import is_hub_id, is_local
from trahiv_cli.recipe.schema import Recipe, section_of
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.checkpoint import saved_in

if TYPE_CHECKING:
    from trahiv_cli.train.trainer import SwarmTrainerMixin

FINAL = "final"
"""Name of the finished model's folder in a run's folder."""

SAMPLE_TOKENS, SAMPLE_PROMPT_TOKENS = 120, 32


@dataclass(frozen=True)
class Ended:
    """How a peer's life ended."""

    reason: str  # `max_steps`, `signal` or `budget`
    step: int = 0
    path: Path | None = None  # `final/`, or the checkpoint to resume from
    had_ended: bool = False  # whether it was over before it began: the run is finished

    def tell(self, events: Events, resume: str) -> None:
        """Say that it is over, and what to type to resume if there is more to do."""
        events.emit(
            "done",
            step=self.step,
            path=str(self.path) if self.path else None,
            reason=self.reason,
            resume=None if self.reason == "max_steps" else resume,
            had_ended=self.had_ended,
        )


def finished_before(folder: Path, recipe: Recipe) -> Ended | None:
    """Return the end of a run that is finished already; None if it is not, or was given more steps since."""
    saved, max_steps = saved_in(folder), recipe.training.max_steps
    if not (folder / FINAL).exists() or (saved and saved[-1].step < max_steps):
        return None
    return Ended("max_steps", max_steps, folder / FINAL, had_ended=True)


def finish(trainer: SwarmTrainerMixin, tokenizer: Any, recipe: Recipe, folder: Path, events: Events) -> Ended:
    """Write the finished model, or the checkpoint to resume from."""
    optimizer, callback = trainer.swarm_optimizer, trainer.swarm_callback
    assert optimizer is not None
    step = optimizer.local_epoch
    callback.save_checkpoint()
    path = callback.finish_saving()
    if step < recipe.training.max_steps:
        return Ended("budget" if callback.has_spent_budget else "signal", step, path)
    from trahiv_cli.assets.export import model_card, write_final
    from trahiv_cli.assets.sources import hub_names

    if trainer.eval_dataset is not None and callback.evaluated_at != step:
        trainer.evaluate()
    base = recipe.model.model_name_or_path
    card = model_card(
        recipe_name=recipe.name,
        base=base if base and is_hub_id(base) and not is_local(base) else None,  # no paths of this machine
        run_id=run_id(recipe),
        fingerprint=fingerprint(agreement(recipe)),
        step=recipe.training.max_steps,
        samples=callback.samples_seen,
        peers=callback.most_peers,
        dataset_names=hub_names(recipe.data.datasets),
        peft=recipe.peft is not None,
    )
    with optimizer.agreed_weights():
        write_final(trainer.accelerator.unwrap_model(trainer.model), tokenizer, folder / FINAL, card)
        show_sample(trainer, tokenizer, recipe, step, events)
    return Ended("max_steps", step, folder / FINAL)


def show_sample(
    trainer: SwarmTrainerMixin, tokenizer: Any, recipe: Recipe, step: int, events: Events
) -> None:
    """Let the model continue the beginning of a held-out sample, or of nothing, if its task is to write.

    Both together are no longer than what it is trained on: some models have no positions beyond that.
    """
    if recipe.task not in ("clm", "sft", "dpo"):
        return
    from trahiv_cli.assets.export import sample_text

    half, prompt = getattr(recipe, section_of(recipe.task) or "").max_length // 2, ""
    if trainer.eval_dataset is not None:
        first = next(iter(trainer.eval_dataset))
        ids = first.get("prompt_ids") or first["input_ids"]
        prompt = tokenizer.decode(ids[: min(half, SAMPLE_PROMPT_TOKENS)], skip_special_tokens=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with events.waiting("the model to write a sample", until_s=600):
        text = sample_text(model, tokenizer, prompt, min(half, SAMPLE_TOKENS), recipe.training.seed)
    events.emit("sample", step=step, prompt=prompt, text=text)
