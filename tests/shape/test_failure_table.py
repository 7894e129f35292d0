"""Each row of the failure table in docs/rounds.md has a test that proves it, in a tier that is named here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = "| what fails | what the others do | the peer itself |"

PROOFS = {
    "killed before it joined a group": {
        "simulation/test_failures.py::test_killed": "test",
        "swarm/test_faults.py::test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies": "test",
    },
    "killed while parts are exchanged": {
        "simulation/test_failures.py::test_killed": "test",
        "swarm/test_faults.py::test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies": "test",
    },
    "killed before or during the vote": {
        "simulation/test_failures.py::test_killed": "test",
        "simulation/test_failures.py::test_killed_after_its_vote": "test",
        "swarm/test_faults.py::test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies": "test",
    },
    "sends no part": {
        "simulation/test_failures.py::test_sends_no_part": "test",
        "simulation/test_poison.py::test_who_has_round_after_round_fail_is_let_into_no_more": "test",
    },
    "a part is damaged on its way": {
        "simulation/test_failures.py::test_a_part_is_damaged": "test",
    },
    "its codec raises": {
        "simulation/test_failures.py::test_its_codec_raises": "test",
    },
    "its gradient is not finite": {
        "simulation/test_failures.py::test_its_gradient_is_not_finite": "test",
        "unit/optim/test_stepper.py::test_gradients_that_are_not_finite_are_dropped_and_counted": "test",
    },
    "its *weights* are not finite": {
        "unit/optim/test_stepper.py::"
        "test_weights_that_are_not_finite_end_training_before_anything_is_sent": "test",
    },
    "its gradient is far from the group's": {
        "simulation/test_failures.py::test_its_gradient_is_far_from_the_groups": "test",
        "simulation/test_poison.py::test_poison_moves_nobody_and_would_without_the_rules": "test",
    },
    "its parts are no tensors of the right shape": {
        "simulation/test_failures.py::test_its_parts_are_no_tensors_of_the_right_shape": "test",
    },
    "the link between two of a group, or one member breaks each round": {
        "simulation/test_failures.py::test_a_link_between_two_of_a_group_is_cut": "test",
        "simulation/test_poison.py::test_who_has_round_after_round_fail_is_let_into_no_more": "test",
    },
    "all of its links, for a while": {
        "simulation/test_failures.py::test_all_links_of_one_are_cut": "test",
    },
    "nobody can be reached, others are alive": {
        "simulation/test_failures.py::test_nobody_can_be_reached_though_others_are_alive": "test",
    },
    "the swarm is cut in two": {
        "simulation/test_failures.py::test_the_swarm_is_cut_in_two": "test",
    },
}
"""By what fails, or how that begins: tests that prove what the row says, and its tier."""


def rows() -> list[str]:
    lines = (TESTS.parent / "docs/rounds.md").read_text().splitlines()
    first = lines.index(TABLE) + 2
    table = lines[first : next(at for at in range(first, len(lines)) if not lines[at].startswith("|"))]
    return [line.split("|")[1].strip() for line in table]


def literal_of(file: str, name: str) -> tuple[str, ...]:
    """A tuple of strings that a module assigns to a name."""
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return tuple(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no {name}")


def test_each_row_has_its_proof_and_each_proof_its_row():
    found = {what: [proof for proof in PROOFS if what.startswith(proof)] for what in rows()}
    assert all(len(proofs) == 1 for proofs in found.values()), found
    assert {proof for proofs in found.values() for proof in proofs} == PROOFS.keys()


@pytest.mark.parametrize(
    ("test", "tier"), sorted({proof for proofs in PROOFS.values() for proof in proofs.items()})
)
def test_each_proof_is_there_and_in_its_tier(test, tier):
    path, _, name = test.partition("::")
    tree = ast.parse((TESTS / path).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert name in functions
    stories = [story.partition("[")[0] for story in literal_of("swarm/conftest.py", "STORIES")]
    is_story = test.removeprefix("swarm/") in stories
    assert tier == "proof" or is_story or not path.startswith("swarm/")


def test_each_story_is_there():
    for story in literal_of("swarm/conftest.py", "STORIES"):
        path, _, name = story.partition("::")
        source = (TESTS / "swarm" / path).read_text()
        assert f"def {name.partition('[')[0]}(" in source, story
