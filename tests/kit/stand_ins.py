"""Models and tokenizers small enough for a test, written to a folder as a hub would hold them."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.kit.recipes import tiny_llama

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that does not mark what the assistant says."""

CHATML_MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same text, with the assistant's part marked for `assistant_only_loss`."""

CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def chat_tokenizer(chat_template=CHATML):
    """One token for each byte, and ChatML's own; fast, so that it can mark the assistant's tokens."""
    tokenizer = _bytes(CHAT_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
    )


def bert_tokenizer():
    """One token for each byte, and BERT's own around each text."""
    tokenizer = _bytes(BERT_TOKENS)
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    names = {f"{token[1:-1].lower()}_token": token for token in BERT_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def write_llama(folder, *, chat_template=CHATML, hidden_size=64, seed=0):
    """Write a llama of two layers (0.1M weights at 64) and its tokenizer, as `from_pretrained` reads them."""
    tokenizer = chat_tokenizer(chat_template)
    torch.manual_seed(seed)
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    sizes = tiny_llama(hidden_size, vocab_size=len(tokenizer), max_position_embeddings=512)
    config = AutoConfig.for_model(**sizes, **tokens, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_original(folder):
    """Write the model and the data for `spanish_qlora.py`; return where they are."""
    quotes = folder / "quotes.jsonl"
    quotes.write_text("".join(f'{{"quote": "Quote {i}: be the {i} you wish to see."}}\n' for i in range(200)))
    return write_llama(folder / "model"), quotes


def write_bert(folder):
    """Write a BERT of two layers with its head for masked words, and its tokenizer."""
    tokenizer = bert_tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _bytes(special):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """64 samples of 16 tokens."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(3, 60, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model_of_blocks():
    """A llama of one layer for `Blocks`; always the same one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
