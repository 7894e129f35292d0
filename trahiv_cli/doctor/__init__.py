"""Checks of this machine and its network before a peer trains."""
