.DEFAULT_GOAL := help
# The targets share the environments, which are not built twice at once.
.NOTPARALLEL:
.PHONY: help demo test middle lowest wheel lint format docs engines campaigns pins clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## set up, and tune the library on this machine
	@.ci/env newest python -m ejkernel.cli demo

# Half as many workers again as there are processors: some tests wait for other processes most of the time. A worker
# has the tests of a file one after the other, which share fixtures and programs, and takes over from others at the end.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) \* 3 / 2)
PARALLEL = -n $(WORKERS) --dist worksteal
test: ## set up and run the default suite on the oldest and the newest leg
	@.ci/env every python -m pytest $(PARALLEL)

# Where a version of JAX shows: its private names, transformations, clocks, execution, programs, the library.
MIDDLE := tests/test_project.py tests/timing tests/core/test_gradients.py tests/core/test_keys.py tests/core/test_kernel_code.py \
	tests/execution/test_transformations.py tests/execution/test_executor.py tests/execution/test_trace_context.py \
	tests/execution/test_own_gradients.py tests/execution/test_batch_axes.py tests/execution/test_sharded_calls.py \
	tests/config/test_call_log.py tests/programs/test_find.py tests/library/test_matmul.py tests/library/test_rows.py \
	$(wildcard tests/library/test_mosaic_*.py) \
	tests/library/test_without_triton.py

middle: ## run a part of the suite on the JAX between the two legs
	@.ci/env middle python -m pytest $(PARALLEL) $(MIDDLE)

# Where a dependency shows: files, locks, folders, exported programs, arrays, cfgs of pydantic, plots.
LOWEST := tests/test_project.py tests/test_settings.py tests/core tests/store/test_persistent.py \
	tests/store/test_contract.py tests/store/test_processes.py tests/tuning/test_device_lock.py \
	tests/execution/test_executor.py tests/programs/test_recording_files.py tests/library/test_matmul.py

lowest: ## run a part of the suite with each dependency at its declared lower bound
	@.ci/env lowest python -m pytest $(PARALLEL) $(LOWEST)

wheel: ## build the wheel, install it into a fresh environment and try it
	@.ci/env newest .ci/wheel

# The oldest leg: mypy reads the stubs of packages that still support Python 3.11.
lint: ## ruff and mypy, changing nothing
	@.ci/env oldest sh -c 'ruff check . && ruff format --check . && mypy'

format: ## let ruff fix and format the code
	@.ci/env oldest sh -c 'ruff check --fix . && ruff format .'

docs: ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 .ci/env newest python -m mkdocs build --strict

engines: ## run the tests that start an engine, a server, a browser or a framework
	@.ci/env engines python -m pytest -m 'engines and not slow'

SHORT :=

campaigns: ## run the long tests, marked slow; a short version of each with SHORT=yes
	@.ci/env newest python -m pytest -m slow $(if $(SHORT),--short $(PARALLEL))

pins: ## write the constraints of every leg anew, from the newest versions that fit
	@.ci/pins

clean: ## remove the environments and everything built or cached here
	rm -rf .venv-oldest .venv-middle .venv-newest .venv-lowest .venv-engines
	rm -rf build dist site .compiled .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
