"""How other peers reach this one: router, hole punching, relays."""
