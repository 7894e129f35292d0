"""Bytes between machines: addresses, streams, links, keys of the DHT."""
