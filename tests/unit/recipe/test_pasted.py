"""The line to join by, as it comes out of mails, chats and documents."""

import pytest

from trahiv_cli.recipe.pasted import peers_in

ONE = "trahiv1:mR0kZpKS-x_9AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmXk"
LINE = f"trahiv join --peer {ONE}"


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        (ONE, [ONE]),
        (LINE, [ONE]),
        (f"$ trahiv join --peer={ONE}", [ONE]),
        (f"  {ONE}\n", [ONE]),
        (f"\t{LINE}\r\n", [ONE]),
        (f'"{ONE}"', [ONE]),
        (f"'{LINE}'", [ONE]),
        (f"“{ONE}”", [ONE]),
        (f"„{ONE}“", [ONE]),
        (f"‘{LINE}’", [ONE]),
        (f"«\u00a0{ONE}\u00a0»", [ONE]),
        (f"`{LINE}`", [ONE]),
        (f"<{ONE}>", [ONE]),
        (f"\ufeff{ONE}\u200b", [ONE]),
        (f"Come in: {LINE}.", [ONE]),
        (f"({ONE}), please", [ONE]),
        (f"trahiv join —peer {ONE}", [ONE]),
        (f"trahiv join --peer\n{ONE}", [ONE]),
        (f"{LINE[:40]}\n{LINE[40:]}", [ONE]),
        (f"{LINE[:40]} {LINE[40:50]}\r\n  {LINE[50:]}", [ONE]),
        (f"> {LINE[:40]}\n> {LINE[40:]}", [ONE]),
        (f"{LINE[:40]}\u200b{LINE[40:]}", [ONE]),
        ("trahiv1:\nmR0kZpKS", ["trahiv1:mR0kZpKS"]),
        (f"{LINE} --yes --output-dir there", [ONE]),
        (f"{LINE} --peer {ADDRESS}", [ONE, ADDRESS]),
        (f"{ONE} {ONE}x", [ONE, f"{ONE}x"]),
        (f"trahiv join --peer {ADDRESS}", [ADDRESS]),
        (f"--peer={ADDRESS}", [ADDRESS]),
        (f"“{ADDRESS}”", [ADDRESS]),
        ("trahiv join --peer @/home/a/runs/x/invitation", ["@/home/a/runs/x/invitation"]),
        (f"@one {ONE} @two", ["@one", ONE, "@two"]),
        ("", []),
        ("quickstart", []),
        ("./recipes/p2p/recipe.yaml", []),
        ("/home/me/recipe.yaml", []),
        ("/home/ip4/recipe.yaml by me@example.org", []),
        ("trahiv join --peer", []),
    ],
)
def test_what_to_join_by_is_found_in_what_was_pasted(text, peers):
    assert peers_in(text) == peers
