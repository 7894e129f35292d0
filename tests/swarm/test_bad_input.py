"""What a user can get wrong, through the real commands.

Each mistake gets one clear error with a hint and the contract's exit code; no traceback; no process, socket
or temporary file stays, and in the run's folder nothing that was not needed to find out. What a recipe's own
errors say is tested in `tests/unit/recipe`; here, that they arrive.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess

import pytest

from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe

pytestmark = pytest.mark.timeout(90)

STRANGER = "QmbBYVb38jBhmVqVESM3sA3LRQfM23Vem3kzLxkHpFQyQ8"
"""A well-formed peer id that nobody has."""

CLOSED = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"
FAR = f"/ip4/203.0.113.7/tcp/31337/p2p/{STRANGER}"

BEFORE_TRAINING = {
    *("lock", "recipe.yaml", "recipe.json", "events.jsonl", "trahiv.log", "peers.json"),
    *("identity.key", "owner.key", "secret.key", "invitation", "invited-by", "members.json"),
}
"""All that a run's folder may hold when a run ended before its first step."""

HUGE = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16384,
    "intermediate_size": 65536,
    "num_hidden_layers": 100,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}


def require_refused(result, code, message, hint):
    """Check the one error of a command that ended: words on stderr, or events with `--format json`."""
    __tracebackhide__ = True
    story = f"{result.args}\nstdout:\n{result.out}\nstderr:\n{result.err}"
    assert result.code == code, story
    assert "Traceback" not in result.out + result.err, story
    assert not result.left, f"{story}\nleft: {result.left}"
    if "json" in result.args:
        assert [event["event"] for event in result.events][-1] == "error", story
        (error,) = result.errors
        said, hinted = error["message"], error["hint"]
        assert error["code"]
    else:
        errors = re.findall(r"^error: .*(?:\n  .*)*", result.err, re.MULTILINE)
        hints = re.findall(r"^ *hint: .*", result.err, re.MULTILINE)
        assert len(errors) == 1, story
        assert len(hints) == 1, story
        said, hinted = result.err, hints[0]
    assert re.search(message, said), f"{message!r} not in:\n{story}"
    assert re.search(hint, hinted), f"{hint!r} not in:\n{story}"


def require_untouched(folder):
    """Check that no run was begun in `folder`."""
    assert not (folder / "runs").exists()


def require_nothing_trained(result, run):
    """Check that a run invited nobody, and wrote no step."""
    assert {event["event"] for event in result.events} <= {"waiting", "warning", "error"}
    assert {path.name for path in run.iterdir()} <= BEFORE_TRAINING - {"invitation"}


# -- before anything starts -----------------------------------------------------------------------


@pytest.fixture(params=["init", "join"])
def command(request):
    """The words before RECIPE, of each command that takes one."""
    return ("init",) if request.param == "init" else ("join", "--peer", CLOSED)


def test_an_option_that_does_not_exist_is_a_usage_error(trahiv, tmp_path):
    result = trahiv("init", "--bogus")
    assert result.code == 2
    assert "No such option: --bogus" in result.err
    assert "trahiv init --help" in result.err
    assert result.out == ""
    require_untouched(tmp_path)


def test_join_without_a_peer_is_a_usage_error_that_says_what_to_paste(trahiv, tmp_path, tiny_recipe):
    for args in [(), (tiny_recipe(tmp_path),)]:
        result = trahiv("join", *args)
        assert result.code == 2
        assert "--peer: paste the line that `trahiv init` printed" in result.err
        assert result.out == ""
    require_untouched(tmp_path)


def test_a_recipe_that_is_not_there_is_named_with_the_one_that_was_meant(
    trahiv, tmp_path, tiny_recipe, command
):
    tiny_recipe(tmp_path)
    require_refused(trahiv(*command, "tinny.yaml"), 2, "there is no recipe 'tinny.yaml'", "`tiny.yaml`")
    require_untouched(tmp_path)


def test_a_recipe_with_anothers_names_is_told_ours(trahiv, tmp_path, tiny_recipe, command):
    recipe = tiny_recipe(tmp_path, base_model="owner/model")
    require_refused(trahiv(*command, recipe), 2, "base_model", "`model.model_name_or_path`")
    require_untouched(tmp_path)


def test_each_finding_is_one_json_event_and_stdout_has_nothing_else(trahiv, tmp_path, tiny_recipe):
    recipe = tiny_recipe(tmp_path, base_model="owner/model", sequence_len=512, training__num_epochs=3)
    result = trahiv("init", recipe, "--format", "json")
    assert result.code == 2
    assert result.events == result.errors
    assert {error["path"] for error in result.errors} == {"base_model", "sequence_len", "training.num_epochs"}
    for error in result.errors:
        assert error["code"] == "recipe"
        assert error["file"] == str(recipe)
        assert error["line"] > 0
        assert error["col"] > 0
        assert error["hint"]
    assert result.err == ""
    require_untouched(tmp_path)


def test_a_step_smaller_than_one_local_batch_is_refused(trahiv, tmp_path, tiny_recipe, command):
    recipe = tiny_recipe(tmp_path, hivemind_config__opt__target_batch_size=1)
    result = trahiv(*command, recipe, "--format", "json")
    assert result.code == 2
    (error,) = result.events
    assert error["path"] == "hivemind_config.opt.target_batch_size"
    assert re.search("one local batch is 2 samples .*target_batch_size is 1", error["message"])
    require_untouched(tmp_path)


def test_a_run_id_with_a_dot_is_refused_with_one_that_would_do(trahiv, tmp_path, tiny_recipe, command):
    recipe = tiny_recipe(tmp_path, hivemind_config__opt__run_id="my.run")
    require_refused(trahiv(*command, recipe), 2, "run_id: expected letters, digits", "`my-run` would do")
    require_untouched(tmp_path)


# -- this machine ---------------------------------------------------------------------------------


def test_a_file_in_the_way_of_the_runs_folder_is_kept(trahiv, tmp_path, tiny_recipe):
    (tmp_path / "mine").write_text("precious")
    result = trahiv("init", tiny_recipe(tmp_path), "--output-dir", "mine")
    require_refused(result, 3, "mine can't be written", "--output-dir")
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_refused(trahiv, tmp_path):
    result = trahiv("init", "--no-train", "--output-dir", "/proc/trahiv", "--format", "json")
    require_refused(result, 3, "/proc/trahiv can't be written", "--output-dir")
    assert len(result.events) == 1


def test_the_folder_of_another_run_is_left_as_it_is(trahiv, tmp_path, tiny_recipe):
    place = tmp_path / "place"
    place.mkdir()
    other = tiny_recipe(tmp_path, "other.yaml", hivemind_config__opt__run_id="another", training__seed=7)
    before = json.dumps(resolve(load_recipe(other).recipe).to_data())
    (place / "recipe.json").write_text(before)
    result = trahiv("init", tiny_recipe(tmp_path), "--output-dir", place)
    require_refused(result, 3, "holds another run, another: .*training.seed", "--output-dir")
    assert {path.name for path in place.iterdir()} == {"recipe.json", "lock"}
    assert (place / "recipe.json").read_text() == before


def test_an_identity_that_is_no_key_is_kept_and_refused(trahiv, tmp_path, tiny_recipe):
    (tmp_path / "me.key").write_text("garbage\n")
    (tmp_path / "me.key").chmod(0o600)
    result = trahiv("init", tiny_recipe(tmp_path), "--identity", "me.key", "--output-dir", "run")
    require_refused(result, 3, "me.key is not a libp2p private key", "--identity FILE")
    assert (tmp_path / "me.key").read_text() == "garbage\n"
    assert {path.name for path in (tmp_path / "run").iterdir()} <= BEFORE_TRAINING - {"identity.key"}


# -- the model and the data -----------------------------------------------------------------------


def _column(folder):
    (folder / "data.jsonl").write_text('{"body": "a document"}\n')
    return {"data__datasets": [{"path": "data.jsonl"}]}


def _empty(folder):
    (folder / "data.jsonl").write_text("")
    return {"data__datasets": [{"path": "data.jsonl"}]}


def _missing(folder):
    return {"data__datasets": [{"path": "./tekst.txt"}]}


def _no_model(folder):
    (folder / "model").mkdir()
    return {"model__config": None, "model__model_name_or_path": "./model"}


def _huge(folder):
    return {"model__config": HUGE}


@pytest.mark.parametrize(
    ("make", "code", "message", "hint"),
    [
        pytest.param(_no_model, 3, "model' is not a model", "save_pretrained", id="no model"),
        pytest.param(_huge, 6, r"needs [\d.]+ GiB of RAM .* [\d.]+ GiB are free", "peft", id="too large"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anybody_is_invited(
    trahiv, tmp_path, tiny_recipe, make, code, message, hint
):
    recipe = tiny_recipe(tmp_path, **make(tmp_path))
    result = trahiv("init", recipe, "--output-dir", "run", "--format", "json")
    require_refused(result, code, message, hint)
    require_nothing_trained(result, tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        pytest.param(_column, "no column 'text'; it has body", "clm.dataset_text_field", id="column"),
        pytest.param(_empty, "data.jsonl' .*is empty", "data.datasets", id="empty dataset"),
    ],
)
def test_data_that_does_not_fit_is_said_before_anything_starts(
    trahiv, tmp_path, tiny_recipe, make, message, hint
):
    recipe = tiny_recipe(tmp_path, **make(tmp_path))
    result = trahiv("init", recipe, "--output-dir", "run", "--format", "json")
    require_refused(result, 2, message, hint)
    assert (result.errors[0]["file"], result.errors[0]["path"]) == (str(recipe), "data.datasets.0.path")
    assert not (tmp_path / "run").exists()


def test_files_that_are_not_there_are_said_before_anybody_is_invited(trahiv, tmp_path, tiny_recipe):
    recipe = tiny_recipe(tmp_path, **_missing(tmp_path))
    result = trahiv("init", recipe, "--output-dir", "run", "--format", "json")
    require_refused(result, 3, "no file or folder '.*tekst.txt'", "text.txt")
    assert [event["event"] for event in result.events] == ["error"]
    assert not (tmp_path / "run").exists()


# -- addresses ------------------------------------------------------------------------------------


@pytest.fixture
def without_routes():
    """A network namespace that knows only itself: this prefix runs a command in it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2's `ip`")
    name = f"trahiv-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        inside = ("ip", "netns", "exec", name)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True, timeout=10)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True, timeout=10)


def bootstrap_node(place):
    peer = place.start("init", "--no-train", "--host-maddr", "/ip4/127.0.0.1/tcp/0", "--output-dir", "boot")
    peer.wait_for("ready", 60)
    return peer


@pytest.fixture(scope="class")
def bootstrap(open_workplace):
    """A running node that trains nothing; its identity is `boot/identity.key` in its folder."""
    with open_workplace("bootstrap") as place:
        peer = bootstrap_node(place)
        yield peer
        assert peer.is_running, peer.err
        assert not peer.noise


def port_of(address):
    return int(re.search(r"/tcp/(\d+)", address)[1])


class TestAddresses:
    """Four ways not to reach anybody, four messages; and what a bare node does not have."""

    def test_an_address_without_a_peer_id_is_refused(self, trahiv, tmp_path):
        result = trahiv("join", "--peer", "/ip4/127.0.0.1/tcp/9")
        require_refused(result, 4, "says where to knock but not whose door it is", "whole address")
        assert result.seconds < 15
        require_untouched(tmp_path)

    def test_a_closed_port_is_told_from_a_missing_host(self, trahiv, tmp_path):
        result = trahiv("join", "--peer", CLOSED, "--format", "json")
        require_refused(result, 4, "127.0.0.1 is there, but nothing listens on port 9", "fresh `trahiv join`")
        assert result.seconds < 15
        require_untouched(tmp_path)

    def test_an_unroutable_host_is_said_to_be_one(self, workplace, without_routes):
        result = workplace.run("join", "--peer", FAR, prefix=without_routes)
        require_refused(result, 4, "203.0.113.7 can't be reached", "fresh `trahiv join`")
        assert result.seconds < 15
        require_untouched(workplace.folder)

    def test_another_peer_at_that_address_is_not_joined(self, trahiv, tmp_path, bootstrap):
        address = bootstrap.maddr.partition("/p2p/")[0] + f"/p2p/{STRANGER}"
        result = trahiv("join", "--peer", address)
        require_refused(
            result, 4, f"something listens there, but not the peer {STRANGER}", "fresh `trahiv join`"
        )
        assert result.seconds < 15
        require_untouched(tmp_path)

    def test_a_node_that_trains_nothing_has_no_recipe_to_give(self, trahiv, tmp_path, bootstrap):
        result = trahiv("join", "--peer", bootstrap.address, "--format", "json")
        require_refused(result, 4, "nobody publishes a recipe", "trahiv join RECIPE")
        assert result.errors[0]["code"] == "nothing-published"
        require_untouched(tmp_path)

    def test_a_port_in_use_is_refused(self, trahiv, tmp_path, tiny_recipe, bootstrap):
        port = port_of(bootstrap.maddr)
        result = trahiv("init", tiny_recipe(tmp_path), "--host-maddr", f"/ip4/127.0.0.1/tcp/{port}")
        require_refused(result, 3, f"port {port} is already in use", "--host-maddr")
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), 5)):
            pass  # the one that was there first still answers

    def test_an_identity_that_is_in_the_swarm_already_is_refused(
        self, trahiv, tmp_path, tiny_recipe, bootstrap
    ):
        key = bootstrap.cwd / "boot" / "identity.key"
        before = key.read_bytes()
        result = trahiv("join", tiny_recipe(tmp_path), "--peer", bootstrap.address, "--identity", key)
        require_refused(result, 3, "this identity is already in the swarm", "--identity FILE")
        assert key.read_bytes() == before


# -- a run that others began ----------------------------------------------------------------------


@pytest.fixture(scope="class")
def begun(open_workplace, tiny_recipe):
    """A node that holds the record of `tiny.yaml`, which trains on a file that only its starter has.

    The starter is gone as soon as it has published: the record lives for 180 s, and no test here shares
    its core with a training.
    """
    with open_workplace("begun") as place:
        peer = bootstrap_node(place)
        starter = place.start("join", tiny_recipe(place.folder), "--peer", peer.address)
        starter.wait_for("ready", 60)
        starter.stop()
        yield peer
        assert peer.is_running, peer.err


class TestBegunRun:
    """Joining what is there with something else, or without what it needs."""

    def test_a_recipe_that_differs_is_refused_field_by_field(self, trahiv, tmp_path, tiny_recipe, begun):
        recipe = tiny_recipe(tmp_path, training__learning_rate=0.5)
        result = trahiv("join", recipe, "--peer", begun.address, "--set", "clm.max_length=64")
        require_refused(result, 5, "trains another recipe", "join without RECIPE")
        table = re.findall(r"^  (\S+) +(.+?) {2,}(.+)$", result.err, re.MULTILINE)
        assert table == [
            ("field", "here", "in the swarm"),
            ("clm.max_length", "64", "32"),
            ("training.learning_rate", "0.5", "0.001"),
        ]
        assert result.out == ""
        require_untouched(tmp_path)

    def test_a_program_gets_the_differences_as_data(self, trahiv, tmp_path, tiny_recipe, begun):
        recipe = tiny_recipe(tmp_path, training__max_steps=5)
        result = trahiv("join", recipe, "--peer", begun.address, "--format", "json")
        require_refused(result, 5, "trains another recipe", "join without RECIPE")
        assert result.errors[0]["code"] == "mismatch"
        assert result.errors[0]["differences"] == [["training.max_steps", 5, 4]]
        assert len(result.events) == 1
        require_untouched(tmp_path)

    def test_a_file_that_only_the_starter_has_is_asked_for_by_name(self, trahiv, tmp_path, begun):
        result = trahiv("join", "--peer", begun.address, "--format", "json")
        require_refused(
            result, 2, "is on the starter's machine only", "`text.txt`.*bring a copy.*--files DIR"
        )
        assert result.errors[0]["path"] == "data.datasets.0.path"
        require_untouched(tmp_path)

    def test_a_copy_of_that_file_lets_the_newcomer_in(self, start, tmp_path, tiny_recipe, begun):
        tiny_recipe(tmp_path)  # for its text
        peer = start(
            *("join", "--peer", begun.address, "--host-maddr", "/ip4/127.0.0.1/tcp/0", "--yes"),
            *("--set", "data.datasets.0.path=text.txt"),
        )
        assert peer.wait_for("joined", 80)["step"] == 0
        assert not peer.noise
