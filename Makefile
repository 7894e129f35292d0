.PHONY: help install lint types test proof chaos demo format bench clean
.DEFAULT_GOAL := help

help:     ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10
install:  ## .venv with everything in it
	@scripts/install
lint:     ## style and spelling
	@scripts/lint
types:    install ## mypy
	@.venv/bin/python -m mypy
test:     ## what every change needs: lint, types, quick tests, simulations, a story of each room
	@scripts/test
proof:    ## all swarm tests, and a hundred peers in memory
	@scripts/proof
chaos:    install ## an hour of everything that goes wrong on real machines (as root, on Linux)
	@.venv/bin/python benchmarks/chaos.py --minutes 60 --faults 132
demo:     ## a swarm on this machine
	@scripts/demo
format:   install ## rewrite the code in our style
	@.venv/bin/python -m ruff check --fix
	@.venv/bin/python -m ruff format
bench:    install ## every benchmark, one after the other (benchmarks/README.md says what they measure)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; .venv/bin/python "$$script"; done
clean:    ## caches and build results; .venv and runs/ stay
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
