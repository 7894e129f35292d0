"""Peers that loaded something else are refused with the reason, by the records of others.

Records of a liar turn no peer away: `tests/simulation/test_records_of_a_liar.py`.
"""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.kit.fakes import FakeNode
from tests.kit.stand_ins import CHATML_MARKED, chat_tokenizer, write_llama
from tests.unit.conftest import refused
from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.train.comparison import (
    FROZEN,
    SAMPLES,
    TOKENIZER,
    TRAINABLE,
    Comparison,
    asset_digests,
)

OURS = {FROZEN: "a" * 64, TOKENIZER: "b" * 64, SAMPLES: "800"}
ME, ONE, TWO = (SimpleNamespace(peer_id=name) for name in ("me", "one", "two"))


def pair(mine, theirs):
    """Have the peers `me` and `one` publish their parts."""
    node = FakeNode("me")
    return Comparison(node, "run", mine), Comparison(node.neighbour("one"), "run", theirs)


@pytest.mark.parametrize(
    ("part", "value", "hint"), [(FROZEN, "c" * 64, "revision"), (SAMPLES, "801", "divide_data")]
)
def test_unlike_joiner_is_refused_with_difference(part, value, hint):
    ours, theirs = pair(OURS, OURS | {part: value})
    with refused(part, hint, RecipeMismatch) as error:
        ours.require_alike([ONE])
    assert error.value.differences == ((part, OURS[part][:12], value[:12]),)
    assert ours.schema != theirs.schema


def test_joiner_like_half_of_others_is_accepted():
    ours, _ = pair(OURS, OURS | {TOKENIZER: "c" * 64})
    ours.require_alike([TWO])  # it has published nothing
    same = Comparison(ours.node.neighbour("two"), "run", dict(reversed(OURS.items())))
    ours.require_alike([ONE, TWO])
    assert ours.schema == same.schema


def test_initial_weights_of_earlier_version_are_ignored():
    ours, _ = pair(OURS, OURS | {"initial weights": "d" * 64})
    ours.require_alike([ONE])


def test_missing_part_is_difference():
    """One peer divides its data and the other does not: they would never average, and wait for each other."""
    ours, theirs = pair({FROZEN: "a"}, {FROZEN: "a", SAMPLES: "800"})
    for one, other, row in ((ours, ONE, ("not set", "800")), (theirs, ME, ("800", "not set"))):
        with pytest.raises(RecipeMismatch) as error:
            one.require_alike([other])
        assert error.value.differences == ((SAMPLES, *row),)


def test_traceback_shows_table_and_hint():
    ours, _ = pair({"learning_rate": "0.01", "optim": "sgd"}, {"learning_rate": "0.0001", "optim": "lion"})
    with pytest.raises(RecipeMismatch) as error:
        ours.require_alike([ONE])
    _, head, *rows, hint = str(error.value).splitlines()
    assert [row.split() for row in rows] == [["learning_rate", "0.01", "0.0001"], ["optim", "sgd", "lion"]]
    assert "in the swarm" in head
    assert hint.startswith("hint: give these the same values")


def test_greater_id_leaves_on_joint_entry():
    mine, theirs = pair(OURS, OURS | {TOKENIZER: "e" * 64})
    mine.repeat([ONE])  # one of two is enough
    with pytest.raises(RecipeMismatch, match="tokenizer"):
        theirs.repeat([ME])


def test_failed_comparison_is_repeated():
    def no_answer(_):
        raise SwarmError("no answer")

    mine, _ = pair(OURS, OURS | {TOKENIZER: "e" * 64})
    mine.node.fetch = no_answer
    mine.repeat([ONE, ONE])
    del mine.node.fetch
    with pytest.raises(RecipeMismatch):
        mine.repeat([ONE, ONE])


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


def digests(folder, r=4, tokenizer=None, **options):
    """The digests of a model with fresh adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    lora = LoraConfig(r=r, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return asset_digests(get_peft_model(model, lora) if r else model, tokenizer)


def unlike(ours, theirs):
    return {name for name in ours if ours[name] != theirs[name]}


def test_adapters_compare_by_shape_only(llama_folder, tmp_path):
    torch.manual_seed(1)
    expected = digests(llama_folder)
    torch.manual_seed(2)
    assert digests(llama_folder) == expected
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += 1e-3
    model.save_pretrained(tmp_path)
    assert unlike(expected, digests(tmp_path)) == {FROZEN}
    assert FROZEN in unlike(expected, digests(llama_folder, dtype=torch.bfloat16))
    assert unlike(expected, digests(llama_folder, r=8)) == {TRAINABLE}


def test_moving_buffers_compare_like_trained_weights():
    def digests_of(mask=0.0, mean=0.0, width=2):
        model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
        model[1].running_mean += mean
        model.register_buffer("mask", torch.tensor([mask, -torch.inf]))
        return asset_digests(model, None)

    for changes, expected in (({"mean": 1.0}, set()), ({"mask": 1.0}, {FROZEN}), ({"width": 3}, {TRAINABLE})):
        assert unlike(digests_of(), digests_of(**changes)) == expected


def test_template_and_tokens_change_tokenizer_digest(llama_folder):
    longer = chat_tokenizer()
    longer.add_tokens(["<more>"])
    ours, same, *others = (
        digests(llama_folder, tokenizer=tokenizer)[TOKENIZER]
        for tokenizer in (chat_tokenizer(), chat_tokenizer(), chat_tokenizer(CHATML_MARKED), longer)
    )
    assert same == ours
    assert ours not in others


def test_quantized_weights_compare_by_files(llama_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    with torch.no_grad():  # of a layer that is quantized; all others stay
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    ours, again, other = (
        digests(folder, quantization_config=nf4)[FROZEN] for folder in (llama_folder, llama_folder, tmp_path)
    )
    assert ours == again
    assert ours not in (other, digests(llama_folder)[FROZEN])
    assert digests(llama_folder, r=0) == digests(tmp_path, r=0)
