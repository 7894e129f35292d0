"""What a user wrote wrong is said with its place, and everything at once."""

import json

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.load import builtin_recipes, load_recipe, parse_recipe

GOOD = """\
model:
  model_name_or_path: owner/model
data:
  datasets:
    - path: owner/data
training:
  max_steps: 10
  learning_rate: 2e-4
"""

OPTIMS = "adamw_torch, adamw_torch_fused, adafactor, adagrad, rmsprop, sgd"


@pytest.fixture
def write(tmp_path):
    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def findings_of(path, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.findings


def only_finding(path, overrides=()):
    (finding,) = findings_of(path, overrides)
    return finding


def place_and_hint(finding):
    return finding.line, finding.col, finding.path, finding.message, finding.hint


def test_a_good_recipe_loads_and_numbers_like_2e_4_are_numbers(write):
    recipe = load_recipe(write(GOOD)).recipe
    assert recipe.training.learning_rate == 0.0002
    assert recipe.data.datasets[0].path == "owner/data"


def test_the_name_defaults_to_the_file_name_made_valid(write):
    assert load_recipe(write(GOOD, "my run.v2.yaml")).recipe.name == "my-run-v2"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "  learning_rate: 2e-4",
            "  lerning_rate: 2e-4",
            (8, 3, "training.lerning_rate", "unknown key", "did you mean `learning_rate`?"),
        ),
        (
            "max_steps: 10",
            "max_steps: many",
            (7, 14, "training.max_steps", "expected a whole number, got 'many'", ""),
        ),
        ("max_steps: 10", "max_steps: 0", (7, 14, "training.max_steps", "must be at least 1, got 0", "")),
        (
            "max_steps: 10",
            "max_steps: true",
            (7, 14, "training.max_steps", "expected a whole number, got true", ""),
        ),
        (
            "max_steps: 10",
            "max_steps: 1_000",
            (
                7,
                14,
                "training.max_steps",
                "expected a whole number, got '1_000'",
                "write 1000, without quotes",
            ),
        ),
        (
            "max_steps: 10",
            "max_steps: 10\n  fp16: no",
            (
                8,
                9,
                "training.fp16",
                "expected true or false, got 'no'",
                "YAML 1.2 reads 'no' as text: write false",
            ),
        ),
        (
            "max_steps: 10",
            "max_steps: 10\n  bf16: maybe",
            (8, 9, "training.bf16", "expected auto, true or false, got 'maybe'", ""),
        ),
        (
            "max_steps: 10\n",
            "",
            (
                6,
                1,
                "training.max_steps",
                "is missing",
                "add `max_steps: ...` (The run ends here)",
            ),
        ),
        (
            "model:\n  model_name_or_path: owner/model\n",
            "",
            (
                1,
                1,
                "model",
                "is missing",
                "add `model:`; `trahiv new quickstart` writes a whole recipe to start from",
            ),
        ),
        (
            "model:",
            "base_model: x\nmodel:",
            (
                1,
                1,
                "base_model",
                "unknown key",
                "axolotl calls it `base_model`; here it is `model.model_name_or_path`",
            ),
        ),
        (
            "data:",
            "clm:\n  sequence_len: 4\ndata:",
            (
                4,
                3,
                "clm.sequence_len",
                "unknown key",
                "axolotl calls it `sequence_len`; here it is `clm.max_length`",
            ),
        ),
        (
            "model:",
            "weight_decay: 1\nmodel:",
            (1, 1, "weight_decay", "unknown key", "`weight_decay` belongs under `training`"),
        ),
        (
            "model:",
            "client_mode: true\nmodel:",
            (
                1,
                1,
                "client_mode",
                "unknown key",
                "`client_mode` belongs under `hivemind_config.dht` or `hivemind_config.opt`",
            ),
        ),
        ("model:", "dpo: {}\nmodel:", (1, 1, "dpo", "not built yet in this version", "remove it")),
        (
            "model:",
            "task: sft\nmodel:",
            (1, 7, "task", "'sft' is not built yet in this version", "built: clm"),
        ),
        (
            "  learning_rate: 2e-4",
            "  optim: adamw",
            (
                8,
                10,
                "training.optim",
                f"expected one of {OPTIMS}, got 'adamw'",
                "did you mean `adamw_torch`?",
            ),
        ),
        (
            "  learning_rate: 2e-4",
            "  optim: paged_adamw_8bit",
            (
                8,
                10,
                "training.optim",
                "'paged_adamw_8bit' is not built yet in this version",
                f"built: {OPTIMS}",
            ),
        ),
        (
            "  model_name_or_path: owner/model",
            "  model_name_or_path: owner/model\n  trust_remote_code: true",
            (
                3,
                3,
                "model.trust_remote_code",
                "unknown key",
                "trahiv never runs code that a model or dataset brings",
            ),
        ),
        (
            "training:",
            "hivemind_config: {opt: {run_id: my.run}}\ntraining:",
            (
                6,
                33,
                "hivemind_config.opt.run_id",
                "expected letters, digits, `-` and `_`, at most 48, got 'my.run'",
                "`my-run` would do",
            ),
        ),
        (
            "training:",
            "peft: {target_modules: [q_proj, 2]}\ntraining:",
            (6, 33, "peft.target_modules.1", "expected text, got 2", "put it in quotes"),
        ),
        (
            "training:",
            "peft: {target_modules: 2}\ntraining:",
            (6, 24, "peft.target_modules", "expected text or a list, got 2", ""),
        ),
        (
            "training:",
            "peft:\n  lora_dropout: 1\ntraining:",
            (7, 17, "peft.lora_dropout", "must be below 1.0, got 1", ""),
        ),
        (
            "    - path: owner/data",
            "    []",
            (5, 5, "data.datasets", "needs at least 1 entry, got 0", ""),
        ),
        (
            "training:",
            "clm:\ntraining:",
            (6, 1, "clm", "is empty: expected a section (`key: value` lines)", ""),
        ),
        (
            "  max_steps: 10",
            "  max_steps: 10\n  max_steps: 20",
            (8, 3, "training.max_steps", "is given twice; the first is on line 7", "keep one of them"),
        ),
        (
            "model:",
            "version: 2\nmodel:",
            (1, 10, "version", "expected 1, got 2", "a newer version of the format needs a newer trahiv"),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n    - path: !!python/name:os.system x",
            (
                6,
                13,
                "data.datasets.1.path",
                "the tag !!python/name:os.system is not known here",
                "",
            ),
        ),
    ],
)
def test_each_mistake_is_one_finding_with_its_place_and_its_hint(write, old, new, expected):
    assert GOOD.count(old) == 1
    assert place_and_hint(only_finding(write(GOOD.replace(old, new)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 0, "", "the file is empty", "`trahiv new quickstart` writes a commented recipe")),
        (
            "# only a comment\n",
            (0, 0, "", "the file is empty", "`trahiv new quickstart` writes a commented recipe"),
        ),
        ("- a\n", (1, 1, "", "expected `key: value` lines, got a list", "")),
        (
            "model:\n  a: b: c\n",
            (
                2,
                7,
                "",
                "not valid YAML: mapping values are not allowed here",
                "check the indentation, and quote a text that contains `: `",
            ),
        ),
        (
            "model:\n\ta: b\n",
            (
                2,
                1,
                "",
                "not valid YAML: found character '\\t' that cannot start any token",
                "YAML indents with spaces, not with tabs",
            ),
        ),
        (
            "a: 1\n---\nb: 2\n",
            (
                2,
                1,
                "",
                "not valid YAML: a second document begins here",
                "a recipe is one document: remove the `---`",
            ),
        ),
        ("a: 1\nb: \x07\n", (2, 4, "", "has a control character (#x0007)", "")),
        ("[" * 5000, (1, 32, "", "not valid YAML: nested more than 32 deep", "")),
        ("a: &a [*a]\n", (1, 4, "", "not valid YAML: too many values", "")),
        ("# " + "x" * 200_000, (0, 0, "", "is 200002 characters long; a recipe has at most 131072", "")),
    ],
)
def test_what_is_no_recipe_at_all_is_one_finding(write, text, expected):
    assert place_and_hint(only_finding(write(text))) == expected


def test_aliases_that_multiply_are_stopped(write):
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    assert only_finding(write("\n".join(lines))).message == "not valid YAML: too many values"


def test_anchors_and_aliases_within_reason_are_fine(write):
    text = GOOD.replace("owner/data", "&here owner/data") + "  optim_args: *here\n"
    assert load_recipe(write(text)).recipe.training.optim_args == "owner/data"


def test_a_local_batch_beyond_the_target_points_at_the_target(write):
    text = GOOD + "hivemind_config:\n  opt:\n    target_batch_size: 4\n"
    finding = only_finding(write(text))
    assert (finding.line, finding.col) == (11, 24)
    assert finding.path == "hivemind_config.opt.target_batch_size"
    assert "one local batch is 8 samples" in finding.message


def test_a_local_batch_beyond_the_default_target_points_at_the_training(write):
    finding = only_finding(write(GOOD + "  per_device_train_batch_size: 512\n"))
    assert (finding.line, finding.col) == (9, 32)
    assert finding.path == "training.per_device_train_batch_size"


def test_a_model_from_nothing_points_at_the_section(write):
    finding = only_finding(write(GOOD.replace("model_name_or_path: owner/model", "revision: main")))
    assert (finding.line, finding.col, finding.path) == (1, 1, "model")


def test_every_mistake_is_found_at_once_in_the_order_of_the_file(write):
    text = GOOD.replace("owner/model", "7").replace("max_steps: 10", "max_step: 10\n  seed: 1\n  seed: 2")
    found = findings_of(write(text), ["training.optim=no", "x.y=1", "nothing"])
    assert [(finding.line, finding.path) for finding in found] == [
        (2, "model.model_name_or_path"),
        (6, "training.max_steps"),
        (7, "training.max_step"),
        (9, "training.seed"),
        (0, "nothing"),
        (0, "training.optim"),
        (0, "x"),
    ]


def test_the_error_says_how_many_and_exits_with_2(write):
    path = write("a: 1\nb: 2\n")
    with pytest.raises(RecipeError, match=f"^{path}: 5 errors$") as caught:
        load_recipe(path)
    assert caught.value.exit_code == 2


def test_set_replaces_values_and_makes_sections_on_the_way(write):
    loaded = load_recipe(write(GOOD), ["training.learning_rate=1e-5", "peft.r=4", "data.datasets.0.path=b/c"])
    assert loaded.recipe.training.learning_rate == 1e-5
    assert loaded.recipe.peft is not None
    assert loaded.recipe.peft.r == 4
    assert loaded.recipe.data.datasets[0].path == "b/c"


def test_origins_tell_the_line_the_option_or_the_default(write):
    origins = load_recipe(write(GOOD), ["peft.r=4"]).origins
    assert origins["training.learning_rate"] == "recipe.yaml:8"
    assert origins["data.datasets.0.path"] == "recipe.yaml:5"
    assert origins["peft.r"] == "--set"
    assert origins["peft.lora_alpha"] == "default"


@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        ("training.max_steps=0", "training.max_steps", "must be at least 1, got 0"),
        ("training.max_stepps=1", "training.max_stepps", "unknown key"),
        ("peft.r=x", "peft.r", "expected a whole number, got 'x'"),
        (
            "data.datasets.1.path=x",
            "data.datasets.1.path",
            "`data.datasets` has the entries 0 to 0, not 1",
        ),
        ("training.max_steps.x=1", "training.max_steps.x", "`training.max_steps` is a value, not a section"),
        ("training.max_steps", "training.max_steps", "expected `section.key=value`"),
        ("training..x=1", "training..x", "expected `section.key=value`"),
        ("training.seed=[1", "training.seed", "not valid YAML: "),
    ],
)
def test_a_mistake_in_set_is_attributed_to_it(write, override, path, message):
    finding = only_finding(write(GOOD), [override])
    assert (finding.file, finding.line, finding.path) == (f"--set {override}", 0, path)
    assert finding.message.startswith(message)


def test_a_missing_file_names_its_neighbour_or_the_built_in_recipes(tmp_path, write):
    write(GOOD, "spanish.yaml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "spanich.yaml")
    assert caught.value.hint == f"did you mean `{tmp_path / 'spanish.yaml'}`?"
    with pytest.raises(RecipeError) as caught:
        load_recipe("quikstart")
    assert caught.value.hint == "did you mean the built-in recipe `quickstart`?"
    with pytest.raises(RecipeError) as caught:
        load_recipe("x" * 5000)
    assert caught.value.hint == "built-in recipes: mistral-7b-lora, quickstart, qwen3-0.6b-full"


def test_a_folder_and_a_binary_file_are_said_to_be_no_recipe(tmp_path, write):
    with pytest.raises(RecipeError, match="is a folder, not a recipe"):
        load_recipe(tmp_path)
    assert only_finding(write(b"\x7fELF\0\xff\xfe")).message == "is not UTF-8 text"
    latin = only_finding(write("a: 1\nname: \xe9\n".encode("latin-1")))
    assert (latin.line, latin.hint) == (2, "save it as UTF-8")


def test_a_file_is_not_read_without_bound(write):
    with pytest.raises(RecipeError, match="larger than 512 KiB"):
        load_recipe(write(b"#" * 600_000))


def test_a_builtin_recipe_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_recipe("quickstart").recipe.name == "quickstart"


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_builtin_recipe_loads(name):
    assert load_recipe(name).recipe.task == "clm"


def test_data_from_the_network_gets_the_same_findings_without_lines():
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"name": "x", "base_model": "y", "training": {"max_steps": "5"}}, "the swarm")
    found = [(str(finding), finding.line) for finding in caught.value.findings]
    assert ("the swarm: training.max_steps: expected a whole number, got '5'", 0) in found
    assert ("the swarm: base_model: unknown key", 0) in found


def test_what_json_writes_is_a_recipe_too(write):
    loaded = load_recipe("quickstart")
    text = json.dumps(loaded.recipe.model_dump(mode="json"), indent=2)
    assert load_recipe(write(text, "recipe.json")).recipe == loaded.recipe
