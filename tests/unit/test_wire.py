"""MessagePack without hivemind has the same bytes, and is parsed with hivemind's tuples."""

import pytest
from hivemind.utils import MSGPackSerializer

from trahiv_cli.wire import digest_of_bytes, packed, unpacked

VALUE = [None, True, -1, 2**63, 0.5, "ä", b"\xff" * 300, [1, [2]], {"key": [b""], "more": {}}]


def test_packed_bytes_equal_those_of_hivemind():
    assert packed(VALUE) == MSGPackSerializer.dumps(VALUE)
    assert unpacked(packed(VALUE)) == VALUE


def test_tuples_of_hivemind_are_parsed():
    nested = [(1, ("a", [(b"",)])), ()]
    assert unpacked(MSGPackSerializer.dumps(nested)) == nested


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\x92\x01", b"\x01\x01", b"\xd4\x40\xc1", b"\xd4\x50\x90"]
)
def test_malformed_or_unknown_content_is_refused(content):
    with pytest.raises(ValueError, match="not MessagePack"):
        unpacked(content)


def test_digest_is_truncated_sha256():
    assert digest_of_bytes(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223"
