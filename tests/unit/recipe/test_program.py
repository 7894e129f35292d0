"""A program's run as bytes: what its peers share, and what a joiner accepts from a stranger."""

import copy

import pytest

from tests.unit.conftest import refused
from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.program import LONGEST, PROGRAM, ProgramRun, readable
from trahiv_cli.recipe.record import unpack
from trahiv_cli.recipe.schema import OptSection, SwarmSection


def run_of(program="trl sft --output_dir a", swarm=None, **opt):
    return ProgramRun(
        OptSection(**{"run_id": "run-1", "target_batch_size": 64} | opt), SwarmSection(**swarm or {}), program
    )


def test_program_survives_wire_round_trip():
    sent = run_of(swarm={"mode": "sync", "solo": "never"})
    arrived = ProgramRun.from_wire(unpack(sent.pack()))
    assert arrived.agreement == sent.agreement
    assert arrived.fingerprint == sent.fingerprint
    assert arrived.program == sent.program


@pytest.mark.parametrize(
    "changes", [{"run_id": "other"}, {"target_batch_size": 32}, {"swarm": {"mode": "sync"}}]
)
def test_shared_settings_change_fingerprint(changes):
    assert run_of(**changes).fingerprint != run_of().fingerprint


def test_own_words_do_not_change_fingerprint():
    assert run_of("trl sft --output_dir b", matchmaking_time=9.0).fingerprint == run_of().fingerprint


def test_long_command_line_is_cut():
    assert ProgramRun.from_wire(unpack(run_of("x" * 100_000).pack())).program == "x" * LONGEST


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        (["trl", "--hub_token", "abc", "--lr", "1"], "trl --hub_token ... --lr 1"),
        (["a.py", "--api-key=abc"], "a.py --api-key=..."),
        (["a.py", "--password", "--lr", "1"], "a.py --password --lr 1"),
        (["a.py", "hf_" + "x" * 30], "a.py ..."),
        (["a.py", "--max_new_tokens", "5", "two words"], "a.py --max_new_tokens 5 'two words'"),
    ],
)
def test_secrets_are_not_published(program, shown):
    assert readable(program) == shown


WIRE = unpack(run_of().pack())
WRONG = [
    (("shared", PROGRAM), 7),
    (("shared", PROGRAM, "opt"), {}),
    (("shared", PROGRAM, "opt", "run_id"), None),
    (("shared", PROGRAM, "opt", "run_id"), "a.b"),
    (("shared", PROGRAM, "opt", "target_batch_size"), 0),
    (("shared", PROGRAM, "swarm"), {"mode": "chaos"}),
    (("shared", PROGRAM, "swarm"), []),
    (("suggested", PROGRAM), ["rm"]),
    (("suggested",), {}),
]


@pytest.mark.parametrize(("place", "value"), WRONG)
def test_wrong_program_is_refused(place, value):
    wire = copy.deepcopy(WIRE)
    *sections, key = place
    section = wire
    for name in sections:
        section = section[name]
    section[key] = value
    with refused("can't be read; nothing was started", "--run-id", RecipeError):
        ProgramRun.from_wire(wire)
