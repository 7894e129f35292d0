"""What to join by, found in text that went through mails, chats and hands.

An invitation is `trahiv1:` and base64url, without padding, of a checksum and its content. The checksum tells
whether it goes on in the next line.
"""

from __future__ import annotations

import base64
import hashlib
import re

INVITATION_PREFIX = "trahiv1:"
"""An invitation begins with it; what follows may hold a secret."""

AROUND = re.compile(r"[\s\u200b-\u200d\u2060\ufeff\"'`´‘’‚‛“”„‟«»‹›<>]+")
"""What separates words, or stands around them: white space, visible or not, quotes, angle brackets."""

INVITATION = re.compile(rf"{INVITATION_PREFIX}[A-Za-z0-9_-]*")
OTHER = re.compile(r"@.+|/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/.+")
"""The name of a file with an invitation, or a multiaddr."""

CHECKSUM_BYTES = 4


def invitation_of(content: bytes) -> str:
    """Write what an invitation says as one word; `content_of` reads it."""
    checksum = hashlib.sha256(content).digest()[:CHECKSUM_BYTES]
    return INVITATION_PREFIX + base64.urlsafe_b64encode(checksum + content).rstrip(b"=").decode()


def content_of(invitation: str) -> bytes | None:
    """Return what `invitation_of` was given, or None if the word is damaged, or not complete."""
    encoded = invitation.removeprefix(INVITATION_PREFIX)
    try:
        content = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))[CHECKSUM_BYTES:]
    except ValueError:
        return None
    return content if invitation_of(content) == invitation else None


def without_secrets(text: str) -> str:
    """Shorten the invitations in a text, so that nobody can join by them."""
    return re.sub(rf"({INVITATION_PREFIX})[A-Za-z0-9_-]{{9,}}", r"\1...", text)


def peers_in(text: str) -> list[str]:
    """Find the invitations, multiaddrs and names of files (`@FILE`) in what somebody pasted.

    It may be the whole `trahiv join` line, in quotes or angle brackets, and wrapped anywhere. What is damaged
    is returned as it is: whoever reads an invitation finds that out.

    Args:
        text: of any kind; a file's name with a blank in it is not recognized.

    Returns:
        What was found, in its order; nothing if `text` is about something else.
    """
    peers: list[str] = []
    for word in AROUND.split(text):
        if (invitation := INVITATION.search(word)) is not None:
            peers.append(invitation[0])
        elif peers and INVITATION.fullmatch(peers[-1] + word) and content_of(peers[-1]) is None:
            peers[-1] += word  # it was wrapped
        elif found := OTHER.match(word.removeprefix("--peer=")):
            peers.append(found[0])
    return peers
