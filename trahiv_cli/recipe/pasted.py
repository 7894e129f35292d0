"""What to join by, found in text that went through mails, chats and hands."""

from __future__ import annotations

import re

INVITATION_PREFIX = "trahiv1:"
"""An invitation begins with it; what follows may hold a secret."""

AROUND = re.compile(r"[\s\u200b-\u200d\u2060\ufeff\"'`´‘’‚‛“”„‟«»‹›<>]+")
"""What separates words, or stands around them: white space, visible or not, quotes, angle brackets."""

INVITATION = re.compile(rf"{INVITATION_PREFIX}[A-Za-z0-9_-]*")
REST_OF_ONE = re.compile(r"(?!--)[A-Za-z0-9_-]+")
"""A later line of an invitation that was wrapped; an option begins otherwise."""

OTHER = re.compile(r"@.+|/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/.+")
"""The name of a file with an invitation, or a multiaddr."""


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
    is_open = False  # whether the last one is an invitation that may go on in the next line
    for word in AROUND.split(text):
        invitation = INVITATION.search(word)
        if invitation is not None:
            peers.append(invitation[0])
            is_open = word.endswith(invitation[0])
        elif is_open and REST_OF_ONE.fullmatch(word):
            peers[-1] += word
        elif word:
            is_open = False
            if found := OTHER.match(word.removeprefix("--peer=")):
                peers.append(found[0])
    return peers
