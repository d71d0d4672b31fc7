.DEFAULT_GOAL := help
# The targets share the environments, which are not built twice at once.
.NOTPARALLEL:
.PHONY: help demo test lint format docs campaigns clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## set up, and tune the library on this machine
	@.ci/env newest python -m ejkernel.cli demo

# Half as many workers again as there are processors: some tests wait for other processes most of the time.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) \* 3 / 2)

test: ## set up and run the default suite on the oldest and the newest leg
	@.ci/env every python -m pytest -n $(WORKERS)

# The oldest leg: mypy reads the stubs of packages that still support Python 3.11.
lint: ## ruff and mypy, changing nothing
	@.ci/env oldest sh -c 'ruff check . && ruff format --check . && mypy'

format: ## let ruff fix and format the code
	@.ci/env oldest sh -c 'ruff check --fix . && ruff format .'

docs: ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 .ci/env newest python -m mkdocs build --strict

campaigns: ## run the long tests, marked slow
	@.ci/env newest python -m pytest -m slow

clean: ## remove the environments and everything built or cached here
	rm -rf .venv-oldest .venv-newest build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
