"""Peers that have the same have equal digests, and what differs in anything that matters has not."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.kit.stand_ins import CHATML_MARKED, chat_tokenizer, write_llama
from trahiv_cli.assets.likeness import FROZEN, INITIAL, TOKENIZER, TRAINABLE, likeness


def digests(folder, r=4, tokenizer=None, **options):
    """The digests of a model with fresh adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    lora = LoraConfig(r=r, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return likeness(get_peft_model(model, lora) if r else model, tokenizer)


def test_what_adapters_begin_with_does_not_count_but_every_frozen_number_and_their_shape_do(
    llama_folder, tmp_path
):
    torch.manual_seed(1)
    expected = digests(llama_folder)
    torch.manual_seed(2)
    assert digests(llama_folder) == expected and INITIAL not in expected
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += 1e-3
    model.save_pretrained(tmp_path)
    other = digests(tmp_path)
    assert other[FROZEN] != expected[FROZEN] and other[TRAINABLE] == expected[TRAINABLE]
    assert digests(llama_folder, dtype=torch.bfloat16)[FROZEN] != expected[FROZEN]
    assert digests(llama_folder, r=8)[TRAINABLE] != expected[TRAINABLE]


def test_another_template_or_token_differs_in_the_tokenizer(llama_folder):
    longer = chat_tokenizer()
    longer.add_tokens(["<more>"])
    tokenizers = (chat_tokenizer(), chat_tokenizer(), chat_tokenizer(CHATML_MARKED), longer)
    first, *others = (digests(llama_folder, tokenizer=tokenizer)[TOKENIZER] for tokenizer in tokenizers)
    assert others[0] == first and len({first, *others}) == 3


def test_quantized_weights_are_known_by_their_files_and_trained_ones_by_their_beginning(
    llama_folder, tmp_path
):
    other_folder = write_llama(tmp_path, seed=1)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    folders = (llama_folder, llama_folder, other_folder)
    ours, again, other = (digests(folder, quantization_config=nf4)[FROZEN] for folder in folders)
    assert ours == again != other
    assert ours != digests(llama_folder)[FROZEN]
    one, two = digests(llama_folder, r=0), digests(other_folder, r=0)
    assert one[INITIAL] != two[INITIAL]
    assert {**one, INITIAL: ""} == {**two, INITIAL: ""}
