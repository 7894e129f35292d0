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
from trahiv_cli.errors import RecipeMismatch, SwarmError
from trahiv_cli.train.comparison import FROZEN, IGNORED, SAMPLES, TOKENIZER, TRAINABLE, Comparison, likeness

OURS = {"frozen weights": "a" * 64, "tokenizer": "b" * 64, SAMPLES: "800"}
ME, ONE, TWO, ANOTHER = (SimpleNamespace(peer_id=name) for name in ("me", "one", "two", "another"))


@pytest.mark.parametrize(
    ("part", "value", "hint"), [("frozen weights", "c" * 64, "revision"), (SAMPLES, "801", "divide_data")]
)
def test_unlike_joiner_is_refused_with_difference(part, value, hint):
    node = FakeNode("me")
    ours = Comparison(node, "run", OURS)
    ours.require_alike([ONE, TWO])  # they have published nothing
    theirs = Comparison(node.neighbour("one"), "run", OURS | {part: value})
    same = Comparison(node.neighbour("two"), "run", dict(reversed(OURS.items())))
    for there in ([ONE, TWO], [TWO], [ANOTHER]):  # that one has left
        ours.require_alike(there)
    with pytest.raises(RecipeMismatch, match=part) as refused:
        ours.require_alike([ONE])
    assert refused.value.differences == ((part, OURS[part][:12], value[:12]),) and hint in refused.value.hint
    assert ours.schema == same.schema != theirs.schema


def test_initial_weights_of_earlier_version_are_ignored():
    node = FakeNode("me")
    ours = Comparison(node, "run", OURS)
    Comparison(node.neighbour("one"), "run", OURS | {IGNORED: "d" * 64})
    ours.require_alike([ONE])


def test_missing_part_is_difference():
    """One peer divides its data and the other does not: they would never average, and wait for each other."""
    node = FakeNode("me")
    undivided = {part: text for part, text in OURS.items() if part != SAMPLES}
    ours = Comparison(node, "run", undivided)
    theirs = Comparison(node.neighbour("one"), "run", OURS)
    for one, other, row in ((ours, ONE, ("not set", "800")), (theirs, ME, ("800", "not set"))):
        with pytest.raises(RecipeMismatch) as refused:
            one.require_alike([other])
        assert refused.value.differences == ((SAMPLES, *row),)


def test_traceback_shows_table_and_hint():
    node = FakeNode("me")
    ours = Comparison(node, "run", {"learning_rate": "0.01", "weight_decay": "0"})
    Comparison(node.neighbour("one"), "run", {"learning_rate": "0.0001", "weight_decay": "0.1"})
    with pytest.raises(RecipeMismatch) as refused:
        ours.require_alike([ONE])
    _, head, *rows, hint = str(refused.value).splitlines()
    assert [row.split() for row in rows] == [
        ["learning_rate", "0.01", "0.0001"],
        ["weight_decay", "0", "0.1"],
    ]
    assert "in the swarm" in head and hint.startswith("hint: give these the same values")


def test_greater_id_leaves_on_joint_entry(monkeypatch):
    def no_answer(*_):
        raise SwarmError("no answer")

    first = FakeNode("me")
    ours = Comparison(first.neighbour("one"), "run", OURS | {"tokenizer": "e" * 64})
    theirs = Comparison(first, "run", OURS)
    theirs.repeat([ONE])  # one of two is enough
    with pytest.raises(RecipeMismatch, match="tokenizer"):
        ours.repeat([ME])
    with monkeypatch.context() as deaf:
        deaf.setattr(FakeNode, "fetch", no_answer)
        theirs.repeat([ONE, ONE])
    with pytest.raises(RecipeMismatch):
        theirs.repeat([ONE, ONE])


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


def digests(folder, r=4, tokenizer=None, **options):
    """The digests of a model with fresh adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    lora = LoraConfig(r=r, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return likeness(get_peft_model(model, lora) if r else model, tokenizer)


def test_adapters_compare_by_shape_only(llama_folder, tmp_path):
    torch.manual_seed(1)
    expected = digests(llama_folder)
    torch.manual_seed(2)
    assert digests(llama_folder) == expected
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += 1e-3
    model.save_pretrained(tmp_path)
    other = digests(tmp_path)
    assert other[FROZEN] != expected[FROZEN] and other[TRAINABLE] == expected[TRAINABLE]
    assert digests(llama_folder, dtype=torch.bfloat16)[FROZEN] != expected[FROZEN]
    assert digests(llama_folder, r=8)[TRAINABLE] != expected[TRAINABLE]


def test_moving_buffers_compare_like_trained_weights():
    def digests_of(mask=0.0, mean=0.0, width=2):
        model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
        torch.nn.init.zeros_(model[0].weight)
        torch.nn.init.zeros_(model[0].bias)
        model[1].running_mean += mean
        model.register_buffer("mask", torch.tensor([mask, -torch.inf]))
        return likeness(model, None)

    ours = digests_of()
    assert digests_of() == ours
    assert digests_of(mean=1.0) == ours
    assert {name for name, other in digests_of(mask=1.0).items() if other != ours[name]} == {FROZEN}
    assert digests_of(width=3)[TRAINABLE] != ours[TRAINABLE]


def test_template_and_tokens_change_tokenizer_digest(llama_folder):
    longer = chat_tokenizer()
    longer.add_tokens(["<more>"])
    tokenizers = (chat_tokenizer(), chat_tokenizer(), chat_tokenizer(CHATML_MARKED), longer)
    first, *others = (digests(llama_folder, tokenizer=tokenizer)[TOKENIZER] for tokenizer in tokenizers)
    assert others[0] == first and len({first, *others}) == 3


def test_quantized_weights_compare_by_files(llama_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    with torch.no_grad():  # of a layer that is quantized; all others stay
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    folders = (llama_folder, llama_folder, tmp_path)
    ours, again, other = (digests(folder, quantization_config=nf4)[FROZEN] for folder in folders)
    assert ours == again != other
    assert ours != digests(llama_folder)[FROZEN]
    assert digests(llama_folder, r=0) == digests(tmp_path, r=0)
