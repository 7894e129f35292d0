"""Modules of hivemind that need no other part of it, without `import hivemind`, which loads torch.

This module is a package whose modules are files of hivemind. Their classes are copies of hivemind's.
"""

from __future__ import annotations

from importlib.util import find_spec

_hivemind = find_spec("hivemind")
assert _hivemind is not None and _hivemind.origin is not None
__path__ = [_hivemind.origin.replace("__init__.py", folder) for folder in ("utils", "dht")]
