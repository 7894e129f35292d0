"""One round: claims, group, exchange, vote, and its record for peers that missed it."""
