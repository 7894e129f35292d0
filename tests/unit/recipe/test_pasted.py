"""The line to join by, as it comes out of mails, chats and documents."""

import pytest

from trahiv_cli.recipe.pasted import peers_in

ONE = "trahiv1:mR0kZpKS-x_9AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmXk"
LINE = f"trahiv join --peer {ONE}"
AROUND = [
    "  {}\n",
    '"{}"',
    "“{}”",
    "<{}>",
    "\ufeff{}\u200b",
    "({}), please",
    "«\u00a0{}\u00a0»",
    "Come in: {}.",
]
WRAPPED = [f"{LINE[:40]}{gap}{LINE[40:]}" for gap in ("\n", "\n> ", "\u200b")]


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        *((form.format(text), [ONE]) for form in AROUND for text in (ONE, LINE, f"trahiv join —peer {ONE}")),
        *((text, [ONE]) for text in (*WRAPPED, f"{LINE[:40]} {LINE[40:50]}\r\n  {LINE[50:]}")),
        ("trahiv1:\nmR0kZpKS", ["trahiv1:mR0kZpKS"]),
        (f"{LINE} --yes --output-dir there", [ONE]),
        (f"{LINE} --peer={ADDRESS}", [ONE, ADDRESS]),
        (f"{ONE} {ONE}x", [ONE, f"{ONE}x"]),
        (f"@/one/file {ONE} @two", ["@/one/file", ONE, "@two"]),
        *((text, []) for text in ("", "./recipes/p2p/recipe.yaml", "trahiv join --peer")),
        ("/home/ip4/recipe.yaml by me@example.org", []),
    ],
)
def test_what_to_join_by_is_found_in_what_was_pasted(text, peers):
    assert peers_in(text) == peers
