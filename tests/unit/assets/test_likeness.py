"""Peers that have the same have equal digests, and what differs in anything that matters has not."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.kit.stand_ins import CHATML_MARKED, chat_tokenizer, write_llama
from trahiv_cli.assets.likeness import FROZEN, INITIAL, TOKENIZER, TRAINABLE, likeness


def load(folder, r=4, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return get_peft_model(model, LoraConfig(r=r, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.fixture
def other_folder(tmp_path):
    return write_llama(tmp_path / "other", seed=1)


def test_what_was_trained_does_not_count_but_its_shape_and_every_frozen_number_do(llama_folder):
    first, second = load(llama_folder), load(llama_folder)
    with torch.no_grad():
        for weight in second.parameters():
            weight.add_(weight.requires_grad)
    expected = likeness(first, None)
    assert likeness(second, None) == expected and INITIAL not in expected
    with torch.no_grad():
        second.get_input_embeddings().weight[3, 5] += 1e-3
    other = likeness(second, None)
    assert other[FROZEN] != expected[FROZEN] and other[TRAINABLE] == expected[TRAINABLE]
    assert likeness(load(llama_folder, dtype=torch.bfloat16), None)[FROZEN] != expected[FROZEN]
    assert likeness(load(llama_folder, r=8), None)[TRAINABLE] != expected[TRAINABLE]


def test_another_template_or_token_differs_in_the_tokenizer(llama_folder):
    model = load(llama_folder)
    plain, marked, longer = chat_tokenizer(), chat_tokenizer(CHATML_MARKED), chat_tokenizer()
    longer.add_tokens(["<more>"])
    assert len({likeness(model, tokenizer)[TOKENIZER] for tokenizer in (plain, marked, longer)}) == 3
    assert likeness(model, chat_tokenizer()) == likeness(model, plain)
    assert TOKENIZER not in likeness(model, None)


def test_a_quantized_base_is_known_by_its_files(llama_folder, other_folder):
    digests = []
    for folder in (llama_folder, llama_folder, other_folder):
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        digests.append(likeness(load(folder, quantization_config=nf4), None)[FROZEN])
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] != likeness(load(llama_folder), None)[FROZEN]


def test_where_everything_is_trained_the_beginning_counts(llama_folder, other_folder):
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (llama_folder, other_folder)]
    one, two = (likeness(model, None) for model in models)
    assert one[INITIAL] != two[INITIAL]
    assert {**one, INITIAL: ""} == {**two, INITIAL: ""}
