"""The training of one peer, from its start to its end."""
