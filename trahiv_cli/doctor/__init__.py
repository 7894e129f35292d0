"""Will it work here? What a peer needs of this machine and its network, looked at before it trains."""
