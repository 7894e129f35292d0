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
    script = Script("one process")
    shown = {one.line: one.output for one in shown_in(CODES)}

    def run(line, code=0):
        out, err = trahiv("", *script.words(line), code=code)
        assert code == 0 or looks_like(err + out, shown[line]), err + out
        return out

    recipe, pictured, rewarded = blocks(FIRST, "yaml")
    [chats] = blocks(FIRST, "json")
    (here / "parrot.yaml").write_text(recipe)
    (here / "mistaken.yaml").write_text(re.sub("task: sft .*", "task: sftt", recipe))
    for line, code in {
        "trahiv init quickstart --budget soon": 2,
        "trahiv check mistaken.yaml": 2,
        "trahiv init parrot.yaml": 3,
        "trahiv pause": 3,
    }.items():
        run(line, code)

    assert "chat-sft" in run("trahiv new")
    run("trahiv new chat-sft")
    write_llama(here / "model", chat_template=CHATML_MARKED)
    (here / "chats.jsonl").write_text(chats * 40)
    text = (here / "chat-sft.yaml").read_text()
    for name, local in HUB.items():
        assert name in text
        text = text.replace(name, local)
    (here / "chat-sft.yaml").write_text(text.replace("max_length: 1024", "max_length: 256"))
    for line, said in {
        "trahiv check chat-sft.yaml": "chat-sft.yaml: ok",
        "trahiv check chat-sft.yaml --deep": "Mbit/s",
        "trahiv preview chat-sft.yaml": "⟦",
        "trahiv show chat-sft.yaml": "# default",
    }.items():
        assert said in run(line)
    assert not script.left
    (here / "questions.jsonl").write_text('{"prompt": "What is 3 + 4?", "answer": "7"}\n' * 8)
    (here / "rewards.py").write_text("def brief(completions, **_): pass\n")
    rest = "model: {model_name_or_path: ./model}\ntraining: {max_steps: 8}\n"
    (here / "rewards.yaml").write_text(rewarded + rest)
    out, _ = trahiv("check", "rewards.yaml")
    assert "rewards.yaml: ok" in out

    row = re.search(r"# (\{.*)\n +#( \{?.*\})", pictured)
    (here / "photos.jsonl").write_text((row[1] + row[2]) + "\n")
    (here / "pictures.yaml").write_text(pictured + "training: {max_steps: 8}\n")
    _, err = trahiv("check", "pictures.yaml", code=2)
    assert "names a picture that is not here: 'cat.png'" in err
    (here / "cat.png").write_bytes(b"only its place is checked")
    out, _ = trahiv("check", "pictures.yaml")
    assert "pictures.yaml: ok" in out
