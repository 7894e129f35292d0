"""Reachability of this peer: router, hole punching, relays."""
