"""What a recipe says of its swarm arrives at the trainer of its task."""

import math

import pytest
from datasets import Dataset

from trahiv_cli.assets.data import Splits
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.recipe.agreement import with_run_id
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.train.tasks import build_trainer

TINY = ("model.config.hidden_size=12", "model.config.num_hidden_layers=1", "model.config.intermediate_size=8")
SAID = {
    "swarm={}": RoundRules(),
    "swarm={solo: never, norm_limit: 3, robust_mean: true}": RoundRules(math.inf, 3.0, True),
}


@pytest.mark.parametrize("said", SAID)
def test_the_recipe_says_how_rounds_are_judged(tmp_path, said):
    recipe = with_run_id(load_recipe("quickstart", [*TINY, "training.bf16=false", said]).recipe)
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3)
    trainer = build_trainer(recipe, tmp_path, build_tokenizer(recipe), Splits(rows, None))
    assert trainer._rules == SAID[said]
