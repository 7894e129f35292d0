"""How peers agree on a step."""
