from transformers import AutoTokenizer

from trahiv_cli.assets.bpe import END, NUM_TOKENS, train_tokenizer
from trahiv_cli.recipe.builtin import read_text


def test_it_writes_any_text_with_the_tokens_that_were_asked_for_and_is_saved(tmp_path):
    tokenizer = train_tokenizer(read_text())
    assert len(tokenizer) == NUM_TOKENS and tokenizer.eos_token == END
    for text in ("def f(x):\n\n    return x  # ok", "Grüße, 世界 \x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.get_vocab() == tokenizer.get_vocab() and read.eos_token == END


def test_the_same_texts_give_the_same_tokens_in_any_order_on_any_number_of_threads(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    parallel = train_tokenizer(read_text())
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert train_tokenizer(reversed(read_text())).get_vocab() == parallel.get_vocab()
