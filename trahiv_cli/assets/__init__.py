"""What Hugging Face knows: models, tokenizers, datasets. The only room that touches a hub."""
