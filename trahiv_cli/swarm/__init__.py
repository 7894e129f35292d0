"""The network layer: a peer's node, its identity, and the records that peers publish."""
