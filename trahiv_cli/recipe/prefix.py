"""How an invitation is told from an address."""

INVITATION_PREFIX = "trahiv1:"
"""An invitation begins with it; what follows may hold a secret."""
