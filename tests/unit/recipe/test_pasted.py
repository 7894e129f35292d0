"""The line to join by, as it comes out of mails, chats and documents."""

import pytest

from trahiv_cli.recipe.pasted import peers_in

ONE = "trahiv1:mR0kZpKS-x_9AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmXk"
LINE = f"trahiv join --peer {ONE}"


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        *(
            (form.format(ONE), [ONE])
            for form in ("{}", "  {}\n", '"{}"', "“{}”", "„{}“", "<{}>", "\ufeff{}\u200b")
        ),
        *(
            (form.format(ONE), [ONE])
            for form in ("({}), please", "«\u00a0{}\u00a0»", "$ trahiv join --peer={}")
        ),
        *((form.format(LINE), [ONE]) for form in ("\t{}\r\n", "'{}'", "‘{}’", "`{}`", "Come in: {}.")),
        *((f"trahiv join {word}{ONE}", [ONE]) for word in ("—peer ", "--peer\n")),
        *((f"{LINE[:40]}{gap}{LINE[40:]}", [ONE]) for gap in ("\n", "\n> ", "\u200b")),
        (f"{LINE[:40]} {LINE[40:50]}\r\n  {LINE[50:]}", [ONE]),
        ("trahiv1:\nmR0kZpKS", ["trahiv1:mR0kZpKS"]),
        (f"{LINE} --yes --output-dir there", [ONE]),
        (f"{LINE} --peer {ADDRESS}", [ONE, ADDRESS]),
        (f"{ONE} {ONE}x", [ONE, f"{ONE}x"]),
        *((form.format(ADDRESS), [ADDRESS]) for form in ("trahiv join --peer {}", "--peer={}", "“{}”")),
        ("trahiv join --peer @/home/a/runs/x/invitation", ["@/home/a/runs/x/invitation"]),
        (f"@one {ONE} @two", ["@one", ONE, "@two"]),
        *((text, []) for text in ("", "quickstart", "./recipes/p2p/recipe.yaml", "/home/me/recipe.yaml")),
        *((text, []) for text in ("/home/ip4/recipe.yaml by me@example.org", "trahiv join --peer")),
    ],
)
def test_what_to_join_by_is_found_in_what_was_pasted(text, peers):
    assert peers_in(text) == peers
