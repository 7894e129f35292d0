"""Every word that another tool knows is answered: with ours, with a reason, or with "not built yet"."""

from typing import get_args

import pytest
from transformers import SchedulerType
from transformers.training_args import OptimizerNames

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.document import dotted
from trahiv_cli.recipe.foreign import FOREIGN, FOREIGN_CHOICES, REFUSED_CHOICES
from trahiv_cli.recipe.load import parse_recipe
from trahiv_cli.recipe.schema import sections_of_a_recipe

UPSTREAM = {"training.optim": OptimizerNames, "training.lr_scheduler_type": SchedulerType}


def finding_of(task="clm", **more):
    """Return the only finding in a recipe that is right but for `more`."""
    data = {
        "name": "test",
        "task": task,
        "model": {"model_name_or_path": "owner/model"},
        "data": {"datasets": [{"path": "owner/data"}]},
        "training": {"max_steps": 1},
        **({"seq_cls": {"labels": ["no", "yes"]}} if task == "seq-cls" else {}),
        **more,
    }
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "test")
    (finding,) = caught.value.findings
    return finding


def ours(field):
    """Return the choices of a field."""
    *section, name = field.split(".")
    annotation = sections_of_a_recipe()[tuple(section)][name].annotation
    return {choice for part in get_args(annotation) for choice in get_args(part) or [part]} - {type(None)}


@pytest.mark.parametrize("field", UPSTREAM)
def test_every_choice_of_transformers_is_ours_or_refused_with_a_reason(field):
    upstream = {name.value for name in UPSTREAM[field]}
    assert ours(field) | set(REFUSED_CHOICES[field]) == upstream
    assert not ours(field) & set(REFUSED_CHOICES[field])


@pytest.mark.parametrize("field", REFUSED_CHOICES)
def test_a_refused_choice_is_told_the_reason_and_one_that_can_be_had(field):
    *sections, name = field.split(".")
    choices = {choice for field in REFUSED_CHOICES for choice in ours(field)} | {"peft"}
    for choice, (reason, instead) in REFUSED_CHOICES[field].items():
        data = {name: choice}
        for section in reversed(sections[1:]):
            data = {section: data}
        more = {"max_steps": 1} if sections[0] == "training" else {}
        finding = finding_of(**{sections[0]: more | data})
        assert finding.message == f"{choice!r} can't work in a swarm: {reason}"
        assert finding.hint == instead
        assert {word for word in instead.split("`")[1::2] if " " not in word} <= choices


@pytest.mark.parametrize("field", FOREIGN_CHOICES)
def test_a_foreign_choice_means_one_of_ours(field):
    assert set(FOREIGN_CHOICES[field].values()) <= ours(field)
    assert not FOREIGN_CHOICES[field].keys() & ours(field)


def test_a_foreign_name_leads_to_a_field_that_is_there():
    sections = sections_of_a_recipe()
    places = {dotted((*home, field)) for home, fields in sections.items() for field in fields}
    for key, here in FOREIGN.items():
        assert finding_of(**{key: 1}).hint == f"other tools call it `{key}`; here it is {here}"
        words = (word.partition(":")[0] for word in here.split("`")[1::2])
        assert {word for word in words if "." in word and not word.startswith(".")} <= places


@pytest.mark.parametrize(
    ("key", "home"),
    [
        *(("load_in_4bit", "quantization"), ("chat_template", "data"), ("use_dora", "peft"), ("beta", "dpo")),
        *(("assistant_only_loss", "sft"), ("mlm_probability", "mlm"), ("labels", "seq_cls")),
        *(("columns", "data.datasets.0"), ("test_split_size", "data.eval"), ("model_name_or_path", "model")),
    ],
)
def test_a_key_at_the_top_level_is_sent_to_its_section(key, home):
    assert finding_of(**{key: True}).hint == f"`{key}` belongs under `{home}`"


@pytest.mark.parametrize("key", ["load_in_4bit", "quantization_bit", "num_labels"])
def test_a_foreign_name_is_known_inside_of_a_section_too(key):
    finding = finding_of(model={"model_name_or_path": "owner/model", key: 4})
    assert finding.path == f"model.{key}"
    assert "`quantization" in finding.hint or "`seq_cls.labels`" in finding.hint
