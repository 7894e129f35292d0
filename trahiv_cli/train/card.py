"""The model card of a finished run, from what the run knows of itself."""

from __future__ import annotations

from trahiv_cli.assets.export import model_card
from trahiv_cli.assets.sources import hub_names
from trahiv_cli.recipe.agreement import agreement, fingerprint, run_id
from trahiv_cli.recipe.paths import is_hub_id, is_local
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.train.trainer import SwarmTrainerMixin


def final_card(recipe: Recipe, trainer: SwarmTrainerMixin) -> str:
    """Compose the README.md of `final/`. Paths of this machine are left out."""
    base = recipe.model.model_name_or_path
    return model_card(
        recipe_name=recipe.name,
        base=base if base and is_hub_id(base) and not is_local(base) else None,
        run_id=run_id(recipe),
        fingerprint=fingerprint(agreement(recipe)),
        step=recipe.training.max_steps,
        samples=trainer.swarm_callback.samples_seen,
        peers=trainer.swarm_callback.most_peers,
        dataset_names=hub_names(recipe.data.datasets),
        peft=recipe.peft is not None,
    )
