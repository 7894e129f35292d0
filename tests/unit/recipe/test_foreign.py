"""Every word that another tool knows is answered: with ours, with a reason, or with "not built yet"."""

from typing import get_args

import pytest
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.document import dotted
from trahiv_cli.recipe.foreign import (
    FOREIGN,
    FOREIGN_CHOICES,
    MEANINGLESS,
    REFUSED_CHOICES,
    UNBUILT_CHOICES,
    UNBUILT_KEYS,
)
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import (
    TASK_SECTIONS,
    CompressionName,
    OptimName,
    SchedulerName,
    Task,
    WeightCompressionName,
    sections_of_a_recipe,
)

OUR_CHOICES = {
    "task": get_args(Task),
    "training.optim": get_args(OptimName),
    "training.lr_scheduler_type": get_args(SchedulerName),
    "hivemind_config.opt.grad_compression": get_args(CompressionName),
    "hivemind_config.opt.state_averaging_compression": get_args(WeightCompressionName),
    "hivemind_config.opt.load_state_compression": get_args(WeightCompressionName),
}


def recipe_data(task="clm", **more):
    """Plain data of a recipe that is right but for `more`."""
    section = {"seq_cls": {"labels": ["no", "yes"]}} if task == "seq-cls" else {}
    return {
        "name": "test",
        "task": task,
        "model": {"model_name_or_path": "owner/model"},
        "data": {"datasets": [{"path": "owner/data"}]},
        "training": {"max_steps": 1},
        **section,
        **more,
    }


def finding_of(data):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "test")
    (finding,) = caught.value.findings
    return finding


@pytest.mark.parametrize(
    ("field", "names"), [("training.optim", OptimizerNames), ("training.lr_scheduler_type", SchedulerType)]
)
def test_every_choice_of_transformers_is_ours_or_refused_with_a_reason(field, names):
    upstream = {name.value for name in names}
    ours, refused = set(OUR_CHOICES[field]), set(REFUSED_CHOICES[field])
    unbuilt = UNBUILT_CHOICES.get(field, set())
    assert ours | refused | unbuilt == upstream
    assert len(ours) + len(refused) + len(unbuilt) == len(upstream)


@pytest.mark.parametrize("field", REFUSED_CHOICES)
def test_a_choice_that_cannot_work_is_refused_with_the_reason(field):
    for choice, (reason, instead) in REFUSED_CHOICES[field].items():
        data = place = recipe_data()
        *sections, name = field.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = choice
        finding = finding_of(data)
        assert finding.message == f"{choice!r} can't work in a swarm: {reason}"
        assert finding.hint == instead != ""


def test_what_a_refusal_recommends_can_be_had():
    recommended = {
        word
        for choices in REFUSED_CHOICES.values()
        for _, instead in choices.values()
        for word in instead.split("`")[1::2]
        if " " not in word and word != "peft"
    }
    assert recommended <= {choice for choices in OUR_CHOICES.values() for choice in choices}


def test_weights_may_be_in_any_codec_but_that_of_4_bits():
    assert set(get_args(CompressionName)) - set(get_args(WeightCompressionName)) == {"blockwise4"}


def test_what_is_not_built_is_nowhere_in_a_recipe():
    fields = {field for fields in sections_of_a_recipe().values() for field in fields}
    assert not UNBUILT_KEYS & fields
    assert not UNBUILT_KEYS & FOREIGN.keys()
    for field, choices in UNBUILT_CHOICES.items():
        assert not choices & set(OUR_CHOICES.get(field, ()))


def test_a_foreign_choice_means_one_of_ours():
    for field, choices in FOREIGN_CHOICES.items():
        assert set(choices.values()) <= set(OUR_CHOICES[field])
        assert not choices.keys() & {*OUR_CHOICES[field], *UNBUILT_CHOICES.get(field, ())}


def paths_in(text):
    """The fields that a hint names, without values and without what is not a field."""
    words = (word.partition(":")[0] for word in text.split("`")[1::2])
    return [word for word in words if "." in word and not word.startswith((".", "bnb"))]


@pytest.mark.parametrize("key", FOREIGN)
def test_a_foreign_name_leads_to_a_field_that_is_there(key):
    tool, here = FOREIGN[key]
    sections = sections_of_a_recipe()
    places = {dotted((*home, field)) for home, fields in sections.items() for field in fields}
    for task, section in TASK_SECTIONS.items():
        finding = finding_of(recipe_data(task, **{key: 1}))
        assert set(paths_in(finding.hint)) <= places
        if "{section}" in here:
            field = here.strip("`").removeprefix("{section}.")
            has_it = field in sections[(section,)]
            wanted = (
                f"{tool} calls it `{key}`; here it is `{section}.{field}`"
                if has_it
                else MEANINGLESS[field].format(task=task)
            )
            assert finding.hint == wanted
        elif key != "datasets":
            assert finding.hint.startswith(f"{tool} calls it `{key}`; here it is ")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("load_in_4bit", "`load_in_4bit` belongs under `quantization`"),
        ("bnb_4bit_compute_dtype", "`bnb_4bit_compute_dtype` belongs under `quantization`"),
        ("chat_template", "`chat_template` belongs under `data`"),
        ("use_dora", "`use_dora` belongs under `peft`"),
        ("beta", "`beta` belongs under `dpo`"),
        ("assistant_only_loss", "`assistant_only_loss` belongs under `sft`"),
        ("mlm_probability", "`mlm_probability` belongs under `mlm`"),
        ("columns", "`columns` belongs under `data.datasets.0`"),
        ("test_split_size", "`test_split_size` belongs under `data.eval`"),
    ],
)
def test_a_key_at_the_top_level_is_sent_to_its_section(key, hint):
    assert finding_of(recipe_data(**{key: True})).hint == hint


@pytest.mark.parametrize("key", ["load_in_4bit", "quantization_bit", "num_labels"])
def test_a_foreign_name_is_known_inside_of_a_section_too(key):
    finding = finding_of(recipe_data(model={"model_name_or_path": "owner/model", key: 4}))
    assert finding.path == f"model.{key}"
    assert "`quantization" in finding.hint or "`seq_cls.labels`" in finding.hint
