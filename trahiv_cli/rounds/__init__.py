"""Rounds: claims, group, exchange, vote, and records for peers that missed one."""
