"""One peer's life."""
