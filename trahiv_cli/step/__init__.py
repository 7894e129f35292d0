"""The steps of a peer, from a batch to committed weights."""
