"""Find invitations and addresses in text that was pasted from mails and chats.

An invitation is `trahiv1:` and the base64url, without padding, of a checksum (4 bytes) and the content. The
checksum shows whether a wrapped invitation continues in the next line.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex

INVITATION_PREFIX = "trahiv1:"
"""Every invitation begins with this prefix; the rest may hold a secret."""

INVITATION = re.compile(rf"{INVITATION_PREFIX}[A-Za-z0-9_-]*")


def invitation_of(content: bytes) -> str:
    """Encode the content of an invitation as one word; `content_of` decodes it."""
    checksum = hashlib.sha256(content).digest()[:4]
    return INVITATION_PREFIX + base64.urlsafe_b64encode(checksum + content).rstrip(b"=").decode()


def content_of(invitation: str) -> bytes | None:
    """Return the content that `invitation_of` encoded, or None if the word is damaged or incomplete."""
    encoded = invitation.removeprefix(INVITATION_PREFIX)
    try:
        content = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))[4:]
    except ValueError:
        return None
    return content if invitation_of(content) == invitation else None


def without_secrets(text: str) -> str:
    """Shorten the invitations in a text, so that no reader can join with them."""
    return re.sub(rf"({INVITATION_PREFIX})[A-Za-z0-9_-]{{9,}}", r"\1...", text)


def peers_in(text: str) -> list[str]:
    """Find the invitations, multiaddrs and names of files (`@FILE`) in pasted text.

    It may be the whole `trahiv join` line, in quotes or angle brackets, and wrapped anywhere. A damaged
    invitation is returned unchanged: the code that decodes it reports the damage.

    Args:
        text: any text; a file's name with a blank in it is not recognized.

    Returns:
        The matches, in their order; empty if `text` is about another subject.
    """
    peers: list[str] = []
    # White space, visible or not, quotes and angle brackets stand between words or around them.
    for word in re.split(r"[\s\u200b-\u200d\u2060\ufeff\"'`´‘’‚‛“”„‟«»‹›<>]+", text):
        if invitation := INVITATION.search(word):
            peers.append(invitation[0])
        elif peers and INVITATION.fullmatch(peers[-1] + word) and content_of(peers[-1]) is None:
            peers[-1] += word  # it was wrapped
        elif found := re.match(r"@.+|/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/.+", word.removeprefix("--peer=")):
            peers.append(found[0])
    return peers


def launch_by(place: str, program: str) -> str:
    """Return the command that joins with a program, through an address or the `@FILE` of an invitation."""
    return f"{shlex.join(['trahiv', 'launch', '--peer', place, '--'])} {program}"


def join_by(place: str) -> str:
    """Return the command that joins through an address, or through the `@FILE` of an invitation."""
    return shlex.join(["trahiv", "join", "--peer", place])
