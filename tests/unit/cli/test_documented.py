"""Commands of the README and the pages that need no process of their own; the others are in `tests/swarm`."""

import re

import pytest

from tests.kit.documented import ROOT, Script, blocks, looks_like, shown_in, with_todays_typer
from tests.kit.stand_ins import CHATML_MARKED, write_llama

FIRST, CODES = (ROOT / "docs" / page for page in ("first-recipe.md", "exit-codes.md"))
HUB = {"Qwen/Qwen3-0.6B-Base": "./model", "trl-lib/Capybara": "./chats.jsonl"}


@with_todays_typer
@pytest.mark.usefixtures("nothing_starts")
def test_documented_recipe_commands_work_as_shown(trahiv, here):
    script, shown = Script("one process"), {one.line: one.output for one in shown_in(CODES)}

    def run(line, code=0):
        out, err = trahiv("", *script.words(line), code=code)
        assert code == 0 or looks_like(err + out, shown[line]), err + out
        return out

    [recipe], [chats] = blocks(FIRST, "yaml"), blocks(FIRST, "json")
    (here / "parrot.yaml").write_text(recipe)
    (here / "mistaken.yaml").write_text(re.sub("task: sft .*", "task: sftt", recipe))
    run("trahiv init quickstart --budget soon", code=2)
    run("trahiv check mistaken.yaml", code=2)
    run("trahiv init parrot.yaml", code=3)
    run("trahiv pause", code=3)

    assert "chat-sft" in run("trahiv new")
    run("trahiv new chat-sft")
    write_llama(here / "model", chat_template=CHATML_MARKED)
    (here / "chats.jsonl").write_text(chats * 40)
    text = (here / "chat-sft.yaml").read_text()
    for name, local in HUB.items():
        assert name in text
        text = text.replace(name, local)
    (here / "chat-sft.yaml").write_text(text.replace("max_length: 1024", "max_length: 256"))
    assert "chat-sft.yaml: ok" in run("trahiv check chat-sft.yaml")
    assert "Mbit/s" in run("trahiv check chat-sft.yaml --deep")
    assert "⟦" in run("trahiv preview chat-sft.yaml")
    assert "# default" in run("trahiv show chat-sft.yaml")
    assert not script.left
