"""Talks to people: options in, one call out, every word printed here. Decides nothing."""
