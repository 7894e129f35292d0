"""Peers that have the same have equal digests, and what differs in anything that matters has not."""

import copy

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


def test_the_same_folder_is_alike_whatever_has_been_trained(llama_folder):
    first, second = load(llama_folder), load(llama_folder)
    with torch.no_grad():
        for weight in second.parameters():
            if weight.requires_grad:
                weight.add_(1)
    assert likeness(first, chat_tokenizer()) == likeness(second, chat_tokenizer())


def test_one_frozen_number_or_another_dtype_is_enough_to_differ(llama_folder):
    first, second = load(llama_folder), load(llama_folder)
    with torch.no_grad():
        second.get_input_embeddings().weight[3, 5] += 1e-3
    assert likeness(first, None)[FROZEN] != likeness(second, None)[FROZEN]
    assert likeness(first, None)[TRAINABLE] == likeness(second, None)[TRAINABLE]
    assert likeness(load(llama_folder, dtype=torch.bfloat16), None) != likeness(first, None)


def test_another_rank_differs_in_what_is_trained(llama_folder):
    digests = [likeness(load(llama_folder, r=r), None)[TRAINABLE] for r in (4, 8)]
    assert digests[0] != digests[1]


def test_another_template_or_token_differs_in_the_tokenizer(llama_folder):
    model = load(llama_folder)
    plain, marked, longer = chat_tokenizer(), chat_tokenizer(CHATML_MARKED), chat_tokenizer()
    longer.add_tokens(["<more>"])
    assert len({likeness(model, tokenizer)[TOKENIZER] for tokenizer in (plain, marked, longer)}) == 3
    assert TOKENIZER not in likeness(model, None)


def test_a_quantized_base_is_known_by_its_files(llama_folder, other_folder):
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    folders = (llama_folder, llama_folder, other_folder)
    digests = [likeness(load(one, quantization_config=copy.copy(nf4)), None)[FROZEN] for one in folders]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] != likeness(load(llama_folder), None)[FROZEN]


def test_where_everything_is_trained_the_beginning_counts(llama_folder, other_folder):
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (llama_folder, other_folder)]
    one, two = (likeness(model, None) for model in models)
    assert one[INITIAL] != two[INITIAL]
    assert {**one, INITIAL: ""} == {**two, INITIAL: ""}
    assert INITIAL not in likeness(load(llama_folder), None)
