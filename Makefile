.PHONY: help install lint types test proof bounds chaos demo site format bench clean
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
bounds:   ## the quick tests with the oldest versions of what trahiv needs, then with the newest (needs uv, 15 GB)
	@scripts/bounds lowest
	@scripts/bounds newest
chaos:    install ## an hour of everything that goes wrong on real machines (as root, on Linux)
	@.venv/bin/python benchmarks/chaos.py --minutes 60 --faults 132
demo:     ## a swarm on this machine
	@scripts/demo
site:     install ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
format:   install ## rewrite the code in our style
	@.venv/bin/python -m ruff check --fix
	@.venv/bin/python -m ruff format
bench:    install ## every benchmark, one after the other (benchmarks/README.md says what they measure)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; .venv/bin/python "$$script"; done
clean:    ## caches and build results; .venv and runs/ stay
	@rm -rf --one-file-system build dist site .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
