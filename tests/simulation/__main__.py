"""Plays simulated swarms with faults drawn by seeds, for as long as one likes.

    PYTHONHASHSEED=0 python -m tests.simulation --peers 5 --rounds 200 --seed 7 [--runs 10] [--every 8]

Of a run that fails it prints the shortest list of faults with which that still fails. Python orders its sets
of strings anew in each process unless PYTHONHASHSEED says how; a run depends on that as well as on its seed.
"""

import argparse
import math
import os
import sys
from dataclasses import replace

from tests.simulation.faults import draw, shortest
from tests.simulation.swarm import Plan, Wrong, simulate


def explain(plan, seed, wrong, patience_s=math.inf):
    """Say how a run that failed is played again, and which of its faults matter, if that is known in time."""

    def fails(faults):
        try:
            simulate(replace(plan, faults=faults), seed)
        except Wrong:
            return True
        return False

    left = "\n".join(f"  {fault}" for fault in shortest(plan.faults, fails, patience_s))
    hashes = os.environ.get("PYTHONHASHSEED", "(not set, so that it may be another run)")
    again = f"python -m tests.simulation --peers {plan.num_peers} --rounds {plan.rounds} --seed {seed}"
    return f"{wrong}\nPYTHONHASHSEED={hashes} {again} fails already with\n{left}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=8, help="rounds between two faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1, help="with this seed and those after it")
    args = parser.parse_args()
    has_failed = False
    for seed in range(args.seed, args.seed + args.runs):
        plan = Plan(args.peers, args.rounds, draw(seed, args.peers, args.rounds, args.every))
        try:
            run = simulate(plan, seed)
            came_of = f"{run.world.furthest} rounds, {run.failed} tries undone; {dict(run.struck)}"
        except Wrong as wrong:
            has_failed = True
            came_of = explain(plan, seed, wrong)
        print(f"seed {seed}: {came_of}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
