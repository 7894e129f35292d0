"""Each row of the failure table in docs/rounds.md has a test that proves it, that `make test` runs."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = "| what fails | what the others do | the peer itself |"

KILLED = "simulation/test_failures.py::test_killed"
DIES = "swarm/test_faults.py::test_survivors_go_on_at_whatever_moment_of_a_round_a_peer_dies"
FAILS_ALWAYS = "simulation/test_failures.py::test_who_has_round_after_round_fail_is_let_into_no_more"

PROOFS = {
    "killed before it joined a group": (KILLED, DIES),
    "killed while parts are exchanged": (KILLED, DIES),
    "killed before or during the vote": (KILLED, f"{KILLED}_after_its_vote", DIES),
    "sends its parts so slowly": (
        "simulation/test_failures.py::test_member_that_sends_just_in_time_is_excluded",
    ),
    "reports the step and does not come": (
        "simulation/test_failures.py::test_member_that_reports_and_never_comes_costs_two_waits",
    ),
    "sends no part": ("simulation/test_failures.py::test_sends_no_part", FAILS_ALWAYS),
    "a part is damaged on its way": ("simulation/test_failures.py::test_a_part_is_damaged",),
    "its codec raises": ("simulation/test_failures.py::test_its_codec_raises",),
    "its gradient is not finite": (
        "simulation/test_failures.py::test_its_gradient_is_not_finite",
        "unit/optim/test_stepper.py::test_gradients_that_are_not_finite_are_dropped_and_counted",
    ),
    "its *weights* are not finite": (
        "unit/optim/test_stepper.py::test_weights_that_are_not_finite_end_training_before_anything_is_sent",
    ),
    "its gradient is far from the group's": (
        "simulation/test_failures.py::test_its_gradient_is_far_from_the_groups",
        "simulation/test_failures.py::test_poison_moves_nobody_and_would_without_the_rules",
    ),
    "its parts are no tensors of the right shape": (
        "simulation/test_failures.py::test_its_parts_are_no_tensors_of_the_right_shape",
    ),
    "the link between two of a group, or one member breaks each round": (
        "simulation/test_failures.py::test_a_link_between_two_of_a_group_is_cut",
        FAILS_ALWAYS,
    ),
    "a connection that dies": ("unit/swarm/test_links.py::test_peer_of_a_dead_connection_is_disconnected",),
    "all of its links, for a while": ("simulation/test_failures.py::test_all_links_of_one_are_cut",),
    "nobody can be reached, others are alive": (
        "simulation/test_failures.py::test_nobody_can_be_reached_though_others_are_alive",
    ),
    "a newcomer's link breaks while it loads": (
        "unit/optim/test_catch_up.py::test_newcomer_waits_for_peers_behind_a_broken_link",
    ),
    "the swarm is cut in two": ("simulation/test_failures.py::test_the_swarm_is_cut_in_two",),
}
"""By what fails, or how that begins: tests that prove what the row says."""


def rows() -> list[str]:
    lines = (TESTS.parent / "docs/rounds.md").read_text().splitlines()
    first = lines.index(TABLE) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return [line.split("|")[1].strip() for line in table]


def stories() -> tuple[str, ...]:
    """The swarm tests of `make test`: the tuple that their conftest assigns to `STORIES`."""
    for node in ast.parse((TESTS / "swarm/conftest.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STORIES":
            return tuple(ast.literal_eval(node.value))
    raise AssertionError("swarm/conftest.py has no STORIES")


def test_each_row_has_its_proof_and_each_proof_its_row():
    found = {what: [proof for proof in PROOFS if what.startswith(proof)] for what in rows()}
    assert all(len(proofs) == 1 for proofs in found.values()), found
    assert {proof for proofs in found.values() for proof in proofs} == PROOFS.keys()


def test_each_proof_and_each_story_is_there_and_run_by_make_test():
    told = {f"swarm/{story.partition('[')[0]}" for story in stories()}
    proofs = set(itertools.chain(*PROOFS.values()))
    for test in sorted(proofs | told):
        path, _, name = test.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], test
    assert {proof for proof in proofs if proof.startswith("swarm/")} <= told
