# make demo: run the main job into reports/demo/.  make test: lint, types, tests.  make test-long: run a browser, notebooks, the
# blocks of README and docs, whole studies and fits.  make test-all: both, collected once, as .ci/run does.  make test-rare: tests of
# seconds to a minute, of which shorter ones hold a part.  make docs-numbers: compute and write the numbers that README and docs
# mark; ARGS=--all for those that take minutes, too.  make figures: draw docs/img/.
# make bench: compare speed with benchmarks/baseline.json, three minutes; ARGS=--update-baseline records it. Of a change of structure:
# benchmarks/house.py, goldens.py and pairs.py (CONTRIBUTING.md).
# make docs: build the site of the documentation into build/site/html; ARGS=--serve shows it, --quick runs one notebook.
# All create .venv when needed, with the versions of constraints.txt.  make lock: write that file and the hashes in .ci/locked.txt
# after a change of pyproject.toml; ARGS=--upgrade takes the newest versions of all packages.  make versions VERSIONS=lowest
# PYTHON=python3.12: run the tests in an environment of its own with that Python and locked versions (locked), the oldest that
# pyproject.toml allows (lowest) or those that pip takes today (newest).
PYTHON ?= python3
VERSIONS ?= locked
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?=
PARALLEL := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations 40 --durations-min 5
# Most of what is installed is never imported: what is, is compiled then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
CONSTRAINTS_locked := constraints.txt
CONSTRAINTS_lowest := $(VENV)/lowest.txt
CONSTRAINTS := $(if $(filter newest,$(VERSIONS)),,$(or $(CONSTRAINTS_$(VERSIONS)),$(error VERSIONS is locked, lowest or newest)))
CONSTRAINED := $(CONSTRAINTS:%=--constraint %)
# The package is built by what is installed: an environment made for it would hold other versions.
INSTALL := $(PIP) $(CONSTRAINED) --no-build-isolation --editable
SWEEP := $(BIN)/disagg-sim sweep sweeps/demo.yaml --out reports/demo $(if $(JOBS),--jobs $(JOBS))

# Every test process and command that a test starts would compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv lock demo test tests versions kernel lint types tests-all test-long test-rare test-all checks bench docs docs-numbers figures clean

venv: $(VENV)/.installed-dev

$(BIN)/hatchling:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt hatchling editables

$(BIN)/uv: | $(BIN)/hatchling
	$(PIP) --constraint constraints.txt uv

# The demo needs the run-time dependencies alone; an environment for development has them, too.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/hatchling
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/hatchling
	$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(INSTALL) '.[docs]'
	@touch $@

# Of what users install; tools of development are as new as these allow.
$(VENV)/lowest.txt: pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --python $(BIN)/python --extra all --extra dask --extra ray \
	  --output-file $@ pyproject.toml

lock: | $(BIN)/uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --extra dev --extra docs --custom-compile-command 'make lock' $(ARGS) --output-file .ci/locked.txt pyproject.toml
	sed -e 's/ \\$$//' -e '/^ /d' .ci/locked.txt >constraints.txt

versions:
	@$(MAKE) --no-print-directory kernel build/$(VERSIONS)-$(notdir $(PYTHON))/.venv/.collected tests VENV=build/$(VERSIONS)-$(notdir $(PYTHON))/.venv

demo: $(VENV)/.installed
	$(SWEEP)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Runs of every policy, which compile the kernel and theirs in one process: test processes that start together would each
# do so, and one after the other would compile anew what several entry points share.
kernel: $(VENV)/.installed-dev
	$(BIN)/python -m pytest disagg_sim/simulation/simulate.py tests/simulation/test_conservation.py -k "simulate or ends_once"

# Neither need they each compile all tests and what these import. An error in one is shown when it is to run.
$(VENV)/.collected: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

# Those first, the longest before the others, each on a core; then the tests.
checks: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target kernel types $(VENV)/.collected lint

tests: $(VENV)/.installed-dev
	$(PARALLEL) -m "not long and not rare"

test: checks
	@$(MAKE) --no-print-directory tests

test-long: $(VENV)/.installed-dev
	$(PARALLEL) -m "long and not rare"

test-rare: $(VENV)/.installed-dev
	$(PARALLEL) -m rare

tests-all: $(VENV)/.installed-dev
	$(PARALLEL) -m "not rare"

test-all: checks
	@$(MAKE) --no-print-directory tests-all

bench: $(VENV)/.installed-dev
	$(BIN)/python -m pytest benchmarks -m "not long" --benchmark-max-time=0.5 --benchmark-min-rounds=3 $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/website/build.py $(ARGS)

docs-numbers: $(VENV)/.installed-dev
	$(BIN)/python docs/page_numbers.py $(ARGS)

figures: $(VENV)/.installed-dev
	$(BIN)/python docs/figures.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
