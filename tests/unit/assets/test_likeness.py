"""What is alike has equal digests, and what differs in anything that matters has not."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.kit.stand_ins import CHATML_MARKED, chat_tokenizer, write_llama
from trahiv_cli.assets.likeness import FROZEN, INITIAL, TOKENIZER, TRAINABLE, likeness


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


def load(folder, r=4, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return get_peft_model(model, LoraConfig(r=r, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_the_same_folder_is_alike_whatever_has_been_trained(folder):
    first, second = load(folder), load(folder)
    with torch.no_grad():
        for weight in second.parameters():
            if weight.requires_grad:
                weight.add_(1)
    assert likeness(first, chat_tokenizer()) == likeness(second, chat_tokenizer())


def test_one_frozen_number_is_enough_to_differ(folder):
    first, second = load(folder), load(folder)
    with torch.no_grad():
        second.get_input_embeddings().weight[3, 5] += 1e-3
    assert likeness(first, None)[FROZEN] != likeness(second, None)[FROZEN]
    assert likeness(first, None)[TRAINABLE] == likeness(second, None)[TRAINABLE]


def test_another_dtype_of_the_base_differs(folder):
    assert likeness(load(folder, dtype=torch.float32), None) != likeness(
        load(folder, dtype=torch.bfloat16), None
    )


def test_another_rank_differs_in_what_is_trained(folder):
    assert likeness(load(folder, r=4), None)[TRAINABLE] != likeness(load(folder, r=8), None)[TRAINABLE]


def test_another_template_or_token_differs_in_the_tokenizer(folder):
    model = load(folder)
    plain, marked, longer = chat_tokenizer(), chat_tokenizer(CHATML_MARKED), chat_tokenizer()
    longer.add_tokens(["<more>"])
    assert len({likeness(model, tokenizer)[TOKENIZER] for tokenizer in (plain, marked, longer)}) == 3
    assert TOKENIZER not in likeness(model, None)


def test_a_quantized_base_is_known_by_its_files(folder, tmp_path):
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    other = write_llama(tmp_path / "other", seed=1)
    digests = [
        likeness(load(f, quantization_config=copy.copy(nf4)), None)[FROZEN] for f in (folder, folder, other)
    ]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] != likeness(load(folder), None)[FROZEN]


def test_where_everything_is_trained_the_beginning_counts(folder, tmp_path):
    other = write_llama(tmp_path / "other", seed=1)
    first, second = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, other))
    one, two = likeness(first, None), likeness(second, None)
    assert one[INITIAL] != two[INITIAL]
    assert {**one, INITIAL: ""} == {**two, INITIAL: ""}
    assert INITIAL not in likeness(load(folder), None)
