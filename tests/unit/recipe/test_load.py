"""What a user wrote wrong is said with its place, and everything at once."""

import json
import os
from typing import get_args

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.load import load_recipe, parse_recipe
from trahiv_cli.recipe.schema import TASK_SECTIONS, OptimName
from trahiv_cli.recipe.template import MAX_TEMPLATE_BYTES

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

OPTIMS = ", ".join(get_args(OptimName))


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
        ("model:", "kto: {}\nmodel:", (1, 1, "kto", "not built yet in this version", "remove it")),
        (
            "model:",
            "swarm:\n  solo: 300\nmodel:",
            (
                2,
                9,
                "swarm.solo",
                "expected never, always or after N seconds, got 300",
                "write `after 300 seconds`",
            ),
        ),
        (
            "model:",
            "swarm: {solo: after 5 minutes}\nmodel:",
            (
                1,
                15,
                "swarm.solo",
                "expected never, always or after N seconds, got 'after 5 minutes'",
                "write `after 300 seconds`",
            ),
        ),
        (
            "model:",
            "swarm:\n  solo: no\nmodel:",
            (2, 9, "swarm.solo", "expected never, always or after N seconds, got 'no'", "write `never`"),
        ),
        (
            "model:",
            "swarm:\n  solo:\nmodel:",
            (
                2,
                3,
                "swarm.solo",
                "is empty: expected never, always or after N seconds",
                "for example `after 300 seconds`",
            ),
        ),
        (
            "model:",
            "swarm:\n  norm_limit: 0.5\nmodel:",
            (
                2,
                15,
                "swarm.norm_limit",
                "expected 0 or a number above 1, got 0.5",
                "up to 1, honest contributions would be left out; 0 turns it off",
            ),
        ),
        (
            "model:",
            "swarm:\n  norm_limit: off\nmodel:",
            (2, 15, "swarm.norm_limit", "expected a number, got 'off'", ""),
        ),
        (
            "model:",
            "swarm:\n  robust_mean: on\nmodel:",
            (
                2,
                16,
                "swarm.robust_mean",
                "expected true or false, got 'on'",
                "YAML 1.2 reads 'on' as text: write true",
            ),
        ),
        (
            "model:",
            "swarm: {mode: sync, local_steps: 20}\nmodel:",
            (
                1,
                34,
                "swarm.local_steps",
                "has no effect in mode sync: it is for diloco and streaming",
                "",
            ),
        ),
        (
            "model:",
            "swarm: {local_steps: 20}\nmodel:",
            (1, 22, "swarm.local_steps", "has no effect in mode auto: it is for diloco and streaming", ""),
        ),
        (
            "model:",
            "swarm: {mode: overlap, communication_share: 0.1}\nmodel:",
            (1, 45, "swarm.communication_share", "has no effect in mode overlap: it is for auto", ""),
        ),
        (
            "model:",
            "hivemind_config: {opt: {offload_optimizer: true}}\nmodel:",
            (
                1,
                44,
                "hivemind_config.opt.offload_optimizer",
                "can't be on in mode auto: each local step would wait for the CPU; remove it, or say "
                "`swarm: {mode: sync}`",
                "",
            ),
        ),
        (
            "model:",
            "norm_limits: 3\nmodel:",
            (1, 1, "norm_limits", "unknown key", "did you mean `swarm.norm_limit`?"),
        ),
        (
            "model:",
            "task: kto\nmodel:",
            (1, 7, "task", "'kto' is not built yet in this version", "built: clm, sft, dpo, mlm, seq-cls"),
        ),
        (
            "model:",
            "task: seq_cls\nmodel:",
            (
                1,
                7,
                "task",
                "expected one of clm, sft, dpo, mlm, seq-cls, got 'seq_cls'",
                "did you mean `seq-cls`?",
            ),
        ),
        (
            "model:",
            "task: text-classification\nmodel:",
            (
                1,
                7,
                "task",
                "expected one of clm, sft, dpo, mlm, seq-cls, got 'text-classification'",
                "did you mean `seq-cls`?",
            ),
        ),
        (
            "model:",
            "task: seq-cls\nseq_cls: {labels: [a, b]}\nseq-cls: {}\nmodel:",
            (3, 1, "seq-cls", "unknown key", "did you mean `seq_cls`?"),
        ),
        (
            "model:",
            "task: seq-cls\nmodel:",
            (
                1,
                7,
                "seq_cls.labels",
                "is missing",
                "add `seq_cls:` with `labels: ...` (Names of the classes, in the order of their numbers)",
            ),
        ),
        (
            "model:",
            "task: seq-cls\nseq_cls: {max_length: 4}\nmodel:",
            (
                2,
                1,
                "seq_cls.labels",
                "is missing",
                "add `labels: ...` (Names of the classes, in the order of their numbers)",
            ),
        ),
        (
            "model:",
            "task: seq-cls\nseq_cls:\n  labels: [a]\nmodel:",
            (3, 11, "seq_cls.labels", "needs at least 2 entries, got 1", ""),
        ),
        (
            "model:",
            "task: seq-cls\nseq_cls:\nmodel:",
            (
                2,
                1,
                "seq_cls.labels",
                "is missing",
                "add `labels: ...` (Names of the classes, in the order of their numbers)",
            ),
        ),
        (
            "model:",
            "task: seq-cls\nseq_cls:\n  labels: [a, b, a]\nmodel:",
            (3, 11, "seq_cls.labels", "names the class 'a' twice", ""),
        ),
        (
            "model:",
            "sft:\n  packing: true\nmodel:",
            (
                1,
                1,
                "sft",
                "is about `task: sft`, and the task of this recipe is `clm`: change the task, or remove "
                "this section",
                "",
            ),
        ),
        (
            "model:",
            "task: mlm\nmlm:\n  packing: true\nmodel:",
            (
                3,
                3,
                "mlm.packing",
                "unknown key",
                "packing joins samples into one row, and `task: mlm` has one in each: remove it",
            ),
        ),
        (
            "model:",
            "task: dpo\npacking: true\nmodel:",
            (
                2,
                1,
                "packing",
                "unknown key",
                "packing joins samples into one row, and `task: dpo` has one in each: remove it",
            ),
        ),
        (
            "model:",
            "task: mlm\nmax_length: 4\nmodel:",
            (2, 1, "max_length", "unknown key", "`max_length` belongs under `mlm`"),
        ),
        (
            "model:",
            "labels: [a, b]\nmodel:",
            (1, 1, "labels", "unknown key", "`labels` belongs under `seq_cls`"),
        ),
        (
            "training:",
            "quantization: {load_in_4bit: true}\ntraining:",
            (
                6,
                1,
                "quantization",
                "a quantized model can't be trained itself: add a `peft` section to train adapters on it",
                "",
            ),
        ),
        (
            "training:",
            "peft: {r: 4}\nquantization: {load_in_4bit: true, load_in_8bit: true}\ntraining:",
            (
                7,
                50,
                "quantization.load_in_8bit",
                "turn on either `load_in_4bit` or `load_in_8bit`, and only one",
                "",
            ),
        ),
        (
            "training:",
            "peft: {r: 4}\nquantization: {}\ntraining:",
            (7, 15, "quantization", "turn on either `load_in_4bit` or `load_in_8bit`, and only one", ""),
        ),
        (
            "training:",
            "peft: {r: 4}\nquantization: {load_in_8bit: true, bnb_4bit_quant_type: fp4}\ntraining:",
            (7, 57, "quantization.bnb_4bit_quant_type", "has no effect in 8 bits", ""),
        ),
        (
            "  learning_rate: 2e-4",
            "  fp16: true\n  bf16: true",
            (8, 9, "training.fp16", "`fp16` and `bf16` are both on: choose one", ""),
        ),
        (
            "model:",
            "task: dpo\ndpo: {loss_type: sigmoid}\nmodel:",
            (2, 18, "dpo.loss_type", "expected a list, got 'sigmoid'", "write [sigmoid]"),
        ),
        (
            "model:",
            "task: dpo\ndpo: {label_smoothing: 0.1}\nmodel:",
            (
                2,
                24,
                "dpo.label_smoothing",
                "has no effect on sigmoid: only aot, aot_unpaired, exo_pair, robust know of it",
                "",
            ),
        ),
        (
            "model:",
            "task: dpo\ndpo: {loss_type: [exo_pair]}\nmodel:",
            (2, 18, "dpo.loss_type", "`exo_pair` needs a `label_smoothing` above 0 (its paper: 0.001)", ""),
        ),
        (
            "model:",
            "task: dpo\ndpo: {loss_type: [sigmoid, sft], loss_weights: [1.0]}\nmodel:",
            (2, 48, "dpo.loss_weights", "has 1 weights for 2 losses", ""),
        ),
        (
            "model:",
            "task: sft\nsft: {packing_strategy: wrapped}\nmodel:",
            (2, 25, "sft.packing_strategy", "has no effect without `packing: true`", ""),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n  chat_template: '{{ x }}'",
            (
                6,
                18,
                "data.chat_template",
                "has no effect: `task: clm` reads plain text, not conversations",
                "",
            ),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n      fraction: 0.5\n    - path: owner/more",
            (7, 7, "data.datasets.1", "give every dataset a `fraction`, or none of them", ""),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n      fraction: 0.5",
            (
                6,
                17,
                "data.datasets.0.fraction",
                "is a share in a mixture, and the only dataset has all of it: remove it, or name a part of "
                "the dataset (`split: train[:10%]`)",
                "",
            ),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n      columns: {a: text, b: text}",
            (6, 7, "data.datasets.0.columns", "two columns would be named 'text'", ""),
        ),
        (
            "    - path: owner/data",
            "    - path: json\n      data_files: chat.jsonl",
            (
                5,
                13,
                "data.datasets.0.path",
                "'json' says how files are read, which their suffix says here: name the files",
                "",
            ),
        ),
        (
            "    - path: owner/data",
            "    - path: https://example.org/chat.jsonl",
            (
                5,
                13,
                "data.datasets.0.path",
                "is a URL: download it and name the file, or name a hub dataset",
                "",
            ),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n      data_files: [a.csv, /home/me/b.csv]",
            (
                6,
                19,
                "data.datasets.0.data_files",
                "'/home/me/b.csv' is not inside of the dataset: name the files in `path` instead",
                "",
            ),
        ),
        (
            "    - path: owner/data",
            "    - path: owner/data\n      content: {sha256: x, num_files: 1, num_bytes: 1, readers: [json]}",
            (
                6,
                25,
                "data.datasets.0.content.sha256",
                "expected 64 hexadecimal digits, got 'x'",
                "",
            ),
        ),
        (
            "training:",
            "peft: {target_modules: []}\ntraining:",
            (6, 24, "peft.target_modules", "needs at least 1 entry, got 0", ""),
        ),
        (
            "training:",
            "peft: {modules_to_save: ['']}\ntraining:",
            (6, 26, "peft.modules_to_save.0", "is an empty text", ""),
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
            "  optim: adamw_torch_8bit",
            (
                8,
                10,
                "training.optim",
                "'adamw_torch_8bit' can't work in a swarm: its state is in torchao's own kind of tensors, "
                "which can't travel to a joiner",
                "use `adamw_8bit`",
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
            "clm: 5\ntraining:",
            (6, 6, "clm", "expected a section (`key: value` lines), got 5", ""),
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
                "remove it",
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
        (
            "- a\n",
            (
                1,
                1,
                "",
                "expected `key: value` lines, got a list",
                "`trahiv new quickstart` writes a whole recipe to start from",
            ),
        ),
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
        ("a: 1\nb: \x07\n", (2, 4, "", "has a control character (#x0007)", "remove it")),
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


@pytest.mark.parametrize("limit", ["0", "1.001", "10", "1e6"])
def test_a_norm_limit_is_off_or_above_1(write, limit):
    swarm = load_recipe(write(f"swarm: {{norm_limit: {limit}}}\n" + GOOD)).recipe.swarm
    assert (swarm.norm_limit, type(swarm.norm_limit)) == (float(limit), float)


@pytest.mark.parametrize("limit", ["1", "1.0", "1e-9", "-1", "-0.5"])
def test_a_norm_limit_that_leaves_out_honest_contributions_is_refused(write, limit):
    finding = only_finding(write(f"swarm: {{norm_limit: {limit}}}\n" + GOOD))
    assert (finding.line, finding.path) == (1, "swarm.norm_limit")
    assert finding.message.startswith("expected 0 or a number above 1")


@pytest.mark.parametrize("task", [task for task in TASK_SECTIONS if task != "seq-cls"])
@pytest.mark.parametrize("section", ["", "{}: {{}}\n", "{}:\n", "{}: null\n"])
def test_the_section_of_the_task_may_be_left_out_or_empty(write, task, section):
    loaded = load_recipe(write(f"task: {task}\n" + section.format(task) + GOOD))
    for other, name in TASK_SECTIONS.items():
        assert (getattr(loaded.recipe, name) is not None) == (other == task)
    lines = {origin for path, origin in loaded.origins.items() if path.startswith(f"{task}.")}
    assert lines == {"default"}


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_the_data_of_a_recipe_has_no_section_of_another_task_and_reads_as_the_same(write, task):
    text = f"task: {task}\n{GOOD}" + "seq_cls: {labels: [a, b]}\n" * (task == "seq-cls")
    recipe = load_recipe(write(text)).recipe
    data = recipe.to_data()
    assert {name for name in TASK_SECTIONS.values() if name in data} == {TASK_SECTIONS[task]}
    assert parse_recipe(data, "data") == parse_recipe(recipe.model_dump(mode="json"), "dump") == recipe


def test_a_section_of_another_task_may_be_there_with_nothing_in_it(write):
    assert load_recipe(write("sft:\ndpo: null\n" + GOOD)).recipe.task == "clm"


# -- chat templates -------------------------------------------------------------------------------

SFT = "task: sft\n" + GOOD.replace("training:", "  chat_template: chat.jinja\ntraining:")


def test_a_chat_template_is_read_from_beside_the_recipe(write):
    write("\ufeff{{ messages }}\r\n{# end #}\r\n", "chat.jinja")
    loaded = load_recipe(write(SFT))
    assert loaded.recipe.data.chat_template == "{{ messages }}\n{# end #}\n"
    assert loaded.origins["data.chat_template"] == "recipe.yaml:7, chat.jinja"


def test_a_chat_template_that_is_not_beside_the_recipe_is_looked_for_here(write, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    recipe = write(SFT, "elsewhere/recipe.yaml")
    monkeypatch.chdir(tmp_path)
    here = str(write("here {{ x }}", "chat.jinja"))
    loaded = load_recipe(recipe)
    assert loaded.recipe.data.chat_template == "here {{ x }}"
    assert loaded.document.strays == {"data.chat_template": here}
    write("beside {{ x }}", "elsewhere/chat.jinja")
    loaded = load_recipe(recipe)
    assert (loaded.recipe.data.chat_template, loaded.document.strays) == ("beside {{ x }}", {})


def test_a_chat_template_may_be_written_into_the_recipe(write):
    text = SFT.replace("chat.jinja", "|\n    {% for m in messages[::-1] %}{{ m }}.jinja\n    {% endfor %}.j2")
    assert load_recipe(write(text)).recipe.data.chat_template.startswith("{% for m in")


def test_a_chat_template_may_be_set(write, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    recipe = write(SFT, "elsewhere/recipe.yaml")
    write("beside {{ x }}", "elsewhere/other.j2")
    write("{{ x }}", "other.j2")
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(recipe, ["data.chat_template=other.j2"])
    assert (loaded.recipe.data.chat_template, loaded.document.strays) == ("{{ x }}", {})
    assert loaded.origins["data.chat_template"] == "--set, other.j2"


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (None, "there is no file 'chat.jinja'", "did you mean `{folder}/chat2.jinja`?"),
        (b"no template", "{folder}/chat.jinja is no chat template: there is no `{{` in it", ""),
        (b"", "{folder}/chat.jinja is no chat template: there is no `{{` in it", ""),
        (b"{{ x }}\n\xff", "{folder}/chat.jinja is not UTF-8 text (line 2)", "save it as UTF-8"),
        (
            b"{" * (MAX_TEMPLATE_BYTES + 1),
            "{folder}/chat.jinja is larger than 64 KiB, so it is no chat template",
            "",
        ),
    ],
)
def test_a_chat_template_that_cannot_be_had_is_said_at_its_line(write, tmp_path, content, message, hint):
    write("{{ x }}", "chat2.jinja")
    if content is not None:
        write(content, "chat.jinja")
    found = only_finding(write(SFT))
    assert (found.line, found.col, found.path) == (7, 18, "data.chat_template")
    folder = str(tmp_path)
    assert found.message == message.replace("{folder}", folder).replace("{{", "{")
    assert found.hint == hint.replace("{folder}", folder)


def test_a_chat_template_that_is_neither_a_file_nor_a_text_is_refused(write):
    found = only_finding(write(SFT.replace("chat.jinja", "chatml")))
    assert found.message == "'chatml' is neither a `.jinja` file nor a template, which has a `{` in it"
    found = only_finding(write(SFT), ["data.chat_template=nowhere.jinja"])
    assert (found.file, found.message) == (
        "--set data.chat_template=nowhere.jinja",
        "there is no file 'nowhere.jinja'",
    )


def test_data_from_the_network_never_names_a_file_to_read(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("{{ x }}", "chat.jinja")
    data = load_recipe(write(SFT)).recipe.to_data()
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "the swarm", ["data.chat_template=chat.jinja"])
    (finding,) = caught.value.findings
    assert "names a file, which is only read along with a recipe's file" in finding.message


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
    assert caught.value.hint == "built-in recipes: " + ", ".join(builtin_recipes())


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
    recipe = load_recipe(name).recipe
    assert getattr(recipe, TASK_SECTIONS[recipe.task]) is not None


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


# -- paths ----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The current folder, beside that of the recipe: `tmp_path / "project"`."""
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


LOCAL = """\
model: {model_name_or_path: base}
data:
  datasets: [{path: a.jsonl}, {path: b.jsonl}, {path: owner/data}]
training: {max_steps: 10, learning_rate: 2e-4}
hivemind_config: {dht: {identity_path: my.key, initial_peers: ['@friend', /ip4/1.2.3.4/tcp/1/p2p/Qm]}}
"""


def test_every_path_is_relative_to_the_recipe_and_those_found_elsewhere_are_named(write, tmp_path, elsewhere):
    project = tmp_path / "project"
    recipe = write(LOCAL, "project/recipe.yaml")
    (project / "base").mkdir()
    (project / "a.jsonl").touch()
    (elsewhere / "a.jsonl").touch()
    (elsewhere / "b.jsonl").touch()
    loaded = load_recipe(recipe)
    assert loaded.recipe.model.model_name_or_path == f"{project}/base"
    paths = [dataset.path for dataset in loaded.recipe.data.datasets]
    assert paths == [f"{project}/a.jsonl", f"{elsewhere}/b.jsonl", "owner/data"]
    dht = loaded.recipe.hivemind_config.dht
    assert dht.identity_path == f"{project}/my.key"
    assert dht.initial_peers == [f"@{project}/friend", "/ip4/1.2.3.4/tcp/1/p2p/Qm"]
    assert loaded.document.strays == {"data.datasets.1.path": f"{elsewhere}/b.jsonl"}


def test_a_path_that_is_set_is_relative_to_the_current_folder(write, tmp_path, elsewhere):
    (tmp_path / "project" / "base").mkdir()
    for folder in (tmp_path / "project", elsewhere):
        (folder / "mine.jsonl").touch()
    overrides = ["data.datasets.0.path=mine.jsonl", "model.model_name_or_path=base"]
    loaded = load_recipe(write(LOCAL, "project/recipe.yaml"), overrides)
    assert loaded.recipe.data.datasets[0].path == f"{elsewhere}/mine.jsonl"
    assert loaded.recipe.model.model_name_or_path == "base"
    assert loaded.document.strays == {}
    again = load_recipe(write(LOCAL, "project/recipe.yaml"), ["data.datasets=[{path: mine.jsonl}]"])
    assert again.document.strays == {}


def test_a_resolved_recipe_means_the_same_in_every_folder(write, tmp_path, elsewhere, monkeypatch):
    (tmp_path / "project" / "a.jsonl").touch()
    recipe = load_recipe(write(LOCAL, "project/recipe.yaml")).recipe
    monkeypatch.chdir(tmp_path)
    assert parse_recipe(recipe.to_data(), "recipe.json") == recipe
    again = load_recipe(write(json.dumps(recipe.to_data()), "recipe.json"))
    assert (again.recipe, again.document.strays) == (recipe, {})


def test_a_link_to_a_recipe_is_where_the_link_is(write, tmp_path, elsewhere):
    (elsewhere / "linked.yaml").symlink_to(write(LOCAL, "project/recipe.yaml"))
    (tmp_path / "project" / "a.jsonl").touch()
    (elsewhere / "a.jsonl").touch()
    assert load_recipe("linked.yaml").recipe.data.datasets[0].path == f"{elsewhere}/a.jsonl"


# -- pipes ----------------------------------------------------------------------------------------


@pytest.fixture
def pipe():
    """`pipe(text)` makes a pipe that holds a text, and gives its name, as `<(...)` in a shell does."""
    ends = []

    def pipe(text):
        reading, writing = os.pipe()
        ends.append(reading)
        with open(writing, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        return f"/dev/fd/{reading}"

    yield pipe
    for end in ends:
        os.close(end)


def test_a_recipe_may_come_through_a_pipe(pipe, elsewhere):
    (elsewhere / "a.jsonl").touch()
    name = pipe(LOCAL)
    loaded = load_recipe(name)
    assert (loaded.text, loaded.file, loaded.is_from_pipe) == (LOCAL, name, True)
    assert loaded.recipe.name == "recipe"
    assert loaded.recipe.data.datasets[0].path == f"{elsewhere}/a.jsonl"
    assert loaded.document.strays == {}
    assert load_recipe(pipe("name: given\n" + LOCAL)).recipe.name == "given"


def test_a_recipe_may_come_from_stdin(pipe, elsewhere, monkeypatch):
    stdin = os.dup(0)
    try:
        with open(pipe(LOCAL), "rb") as piped:
            os.dup2(piped.fileno(), 0)
        loaded = load_recipe("-")
        assert (loaded.file, loaded.is_from_pipe, loaded.recipe.name) == ("<stdin>", True, "recipe")
        with open(pipe(b"a: 1\nb: \xff"), "rb") as piped:
            os.dup2(piped.fileno(), 0)
        assert str(only_finding("-")) == "<stdin>:2:1: is not UTF-8 text"
        os.close(0)
        with pytest.raises(RecipeError, match="<stdin> cannot be read"):
            load_recipe("-")
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_a_file_is_read_as_often_as_one_likes(write):
    assert not load_recipe(write(GOOD)).is_from_pipe
    assert not load_recipe("quickstart").is_from_pipe


def test_a_pipe_is_not_read_without_bound():
    with pytest.raises(RecipeError, match="/dev/zero is larger than 512 KiB"):
        load_recipe("/dev/zero")
