"""Models, tokenizers and datasets from Hugging Face. Only this package uses a hub."""
