"""Bytes between machines: addresses, streams, links, and the keys of the DHT."""
