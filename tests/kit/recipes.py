"""The smallest useful recipe, its model and its text."""

import json

import yaml


def tiny_llama(hidden_size=32, **changes):
    """A model's config: a llama of two layers for the byte tokenizer."""
    return {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **changes,
    }


TINY = {
    "name": "tiny",
    "model": {
        "config": tiny_llama(max_position_embeddings=64, tie_word_embeddings=True),
        "tokenizer_name_or_path": "builtin/bytes",
    },
    "clm": {"max_length": 32},
    "training": {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "save_steps": 0,
    },
    "hivemind_config": {
        "dht": {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False},
        "opt": {"target_batch_size": 8, "matchmaking_time": 2, "averaging_timeout": 10},
    },
}
TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n" * 50

HUGE = tiny_llama(16384, num_hidden_layers=100, num_attention_heads=128, num_key_value_heads=128)
"""The config of a model that no machine of these tests can hold."""


def write_tiny(folder, file="tiny.yaml", **overrides):
    """Write the recipe and its text; `write_tiny(folder, training__max_steps=9)` changes something in it.

    Overrides are dotted paths with `__` for the dot; `None` removes a key; a whole section may be given.

    Args:
        folder: is made.
        file: the recipe's name in the folder.
        **overrides: see above.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    data = json.loads(json.dumps(TINY))
    data["data"] = {"datasets": [{"path": str(text)}]}
    for name, value in overrides.items():
        *sections, key = name.split("__")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    path = folder / file
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path
