# make help lists what there is. Needs make and python3 (3.11 or newer, with venv); PY names another Python.
PY ?= python3
VENV ?= .venv
NEWEST ?= .venv-newest
ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo lint test test-all test-sweep test-timing test-gpu test-newest check bench tables docs docs-serve wheel clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@PY="$(PY)" VENV="$(VENV)" sh scripts/setup.sh
	@touch $@

setup: $(READY) ## make the virtual environment (.venv) that the others use

demo: $(READY) ## the main job: measure this machine and write the report page, then print where it is
	$(BIN)/rooftile report $(ARGS)

# the tests that need no GPU, by a Python with these marks; tests/unit/test_gpu_files.py sees that those in tests/gpu can be imported
# bytecode is kept whatever the environment says: hundreds of tests start a Python, and pytest rewrites each assertion without it
define run_tests
@failed=0; unset PYTHONDONTWRITEBYTECODE; set -x; \
$(1) -m pytest -n 2 --dist worksteal -m "$(2)" --ignore tests/interpreter --ignore tests/gpu $(ARGS) || failed=1; \
TRITON_INTERPRET=1 $(1) -m pytest -n 2 --dist worksteal -m "$(2)" tests/interpreter $(ARGS) || failed=1; \
exit $$failed
endef

test: $(READY) ## every test that needs no GPU; of large grids a few cases that cover them
	$(call run_tests,$(BIN)/python,not sweep and not timing)

test-newest: ## the same with the newest PyTorch, Triton and Transformers of the index, in an environment of their own
	@NEWEST=1 EXTRAS=test PY="$(PY)" VENV="$(NEWEST)" sh scripts/setup.sh
	$(call run_tests,$(NEWEST)/bin/python,not sweep and not timing)

test-all: test test-sweep test-timing ## all of them, with every case of every grid

test-sweep: $(READY) ## the cases of the grids that make test leaves out
	$(call run_tests,$(BIN)/python,sweep)

test-timing: $(READY) ## the tests that read the clock, one at a time: let the machine do nothing else
	$(BIN)/python -m pytest -m timing $(ARGS)

test-gpu: $(READY) ## the conformance suite and the GPU tests on this machine's GPU
	$(BIN)/python -m pytest --device cuda tests/conformance tests/gpu $(ARGS)

lint: $(READY) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint ## lint and the unit tests: the quick look before a commit
	$(BIN)/python -m pytest -q tests/unit

bench: $(READY) ## time attention against the peers installed here, e.g. make bench ARGS="--case d128-causal-4k"
	$(BIN)/rooftile bench attention $(ARGS)

tables: $(READY) ## rewrite the generated tables, figures and outputs of the README, docs and notebooks
	$(BIN)/python scripts/write_tables.py
	$(BIN)/python scripts/write_reference.py
	$(BIN)/python scripts/write_operators.py
	$(BIN)/python scripts/write_entrance.py
	$(BIN)/python scripts/write_vllm.py
	$(BIN)/python scripts/write_recorded_prices.py
	$(BIN)/python scripts/write_figures.py
	$(BIN)/python scripts/write_hopper_kernels.py
	$(BIN)/python scripts/write_ladder.py
	$(BIN)/python scripts/run_notebooks.py
	$(if $(wildcard benchmarks/results/h200.jsonl),$(BIN)/python -m rooftile_lab.bench.results docs/reference/speed.md)

docs: $(READY) ## build the documentation site into build/site; a broken link or a warning is an error
	@EXTRAS=docs PY="$(PY)" VENV="$(VENV)" sh scripts/setup.sh
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

docs-serve: $(READY) ## show the documentation site on this machine, and again after each change of a page
	@EXTRAS=docs PY="$(PY)" VENV="$(VENV)" sh scripts/setup.sh
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

wheel: $(READY) ## build the wheel into dist/
	$(BIN)/python -m pip wheel . --no-deps --wheel-dir dist

clean: ## remove what was built; the virtual environment stays
	rm -rf build dist report .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find rooftile tests examples scripts -name __pycache__ -prune -exec rm -rf {} +
