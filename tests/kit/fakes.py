"""Stand-ins for what a test must not start. They behave; they do not record calls."""


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


class FakeNode:
    """A `swarm.node.Node` without a network: a dict with expiry, shared by the nodes of one swarm.

    Args:
        peer_id: this node's id.
        records: what the swarm holds; take another node's to be its neighbour.
        now: the clock, in seconds.
    """

    def __init__(self, peer_id="QmA", records=None, now=lambda: 0.0):
        self.peer_id = peer_id
        self.records = {} if records is None else records
        self._now = now

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leave the records: others of the swarm hold them."""

    def neighbour(self, peer_id):
        """Another node of the same swarm."""
        return FakeNode(peer_id, self.records, self._now)

    def only_dials(self):
        return False

    def notes(self):
        return []

    def publish(self, key, value, ttl_s):
        self.records.setdefault(key, {})[self.peer_id] = value, self._now() + ttl_s
        return True

    def fetch(self, key):
        held = self.records.get(key, {})
        return {peer: value for peer, (value, expires) in held.items() if expires > self._now()}
