"""Each row of the failure table in docs/rounds.md is proved by a test that `make test` runs."""

import ast
import itertools
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = "| what fails | what the others do | the peer itself |"

KILLED = "simulation/test_failures.py::test_killed_peer_trains_again"
DIES = "swarm/test_faults.py::test_survivors_continue_after_death_in_any_phase"
FAILS_ALWAYS = "simulation/test_failures.py::test_member_failing_rounds_is_excluded"

PROOFS = {
    "killed before it joined a group": (KILLED, DIES),
    "killed while parts are exchanged": (KILLED, DIES),
    "killed before or during the vote": (
        KILLED,
        "simulation/test_failures.py::test_death_after_vote_stays_within_timeout",
        DIES,
    ),
    "sends its parts so slowly": ("simulation/test_failures.py::test_deliberately_slow_sender_is_excluded",),
    "reports the step and does not come": (
        "simulation/test_failures.py::test_absent_reporter_costs_few_waits",
    ),
    "sends no part": (
        "simulation/test_failures.py::test_group_continues_without_stalled_member",
        FAILS_ALWAYS,
    ),
    "a part is damaged on its way": ("simulation/test_failures.py::test_damaged_part_names_its_sender",),
    "its codec raises": ("simulation/test_failures.py::test_codec_error_fails_round_quickly",),
    "its gradient is not finite": (
        "simulation/test_failures.py::test_nonfinite_gradient_is_dropped",
        "unit/step/test_stepper.py::test_nonfinite_gradients_are_dropped_and_counted",
    ),
    "its *weights* are not finite": (
        "unit/step/test_stepper.py::test_nonfinite_weights_end_training_before_sending",
    ),
    "its gradient is far from the group's": (
        "simulation/test_failures.py::test_outlier_gradient_is_left_out",
        "simulation/test_failures.py::test_rules_protect_against_poison",
    ),
    "its parts are no tensors of the right shape": (
        "simulation/test_failures.py::test_misshapen_parts_are_left_out",
    ),
    "the link between two of a group, or one member breaks each round": (
        "simulation/test_failures.py::test_group_continues_despite_cut_link",
        FAILS_ALWAYS,
    ),
    "a connection that dies": ("unit/net/test_links.py::test_peer_of_dead_connection_is_disconnected",),
    "all of its links, for a while": ("simulation/test_failures.py::test_isolated_peer_catches_up",),
    "nobody can be reached, others are alive": (
        "simulation/test_failures.py::test_isolated_peers_follow_solo_rules",
    ),
    "a newcomer's link breaks while it loads": (
        "unit/step/test_catch_up.py::test_joiner_waits_for_peers_behind_broken_link",
    ),
    "the swarm is cut in two": ("simulation/test_failures.py::test_minority_takes_no_step_during_partition",),
}
"""Maps a failure, or how its row begins, to the tests that prove the row."""


def rows():
    lines = (TESTS.parent / "docs/rounds.md").read_text().splitlines()
    first = lines.index(TABLE) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return [line.split("|")[1].strip() for line in table]


def stories():
    """The swarm tests of `make test`: the tuple that their conftest assigns to `STORIES`."""
    for node in ast.parse((TESTS / "swarm/conftest.py").read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("STORIES")], value=value):
                return ast.literal_eval(value)


def test_rows_and_proofs_match():
    found = [[proof for proof in PROOFS if what.startswith(proof)] for what in rows()]
    assert sorted(found) == sorted([proof] for proof in PROOFS)


def test_proofs_and_stories_run_in_make_test():
    told = {f"swarm/{story.partition('[')[0]}" for story in stories()}
    proofs = set(itertools.chain(*PROOFS.values()))
    for test in sorted(proofs | told):
        path, _, name = test.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in [
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ], test
    assert {proof for proof in proofs if proof.startswith("swarm/")} <= told
