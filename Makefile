# make demo: run the main job into reports/demo/.  make test: lint, types, tests.  make test-long: run a browser, notebooks, the
# blocks of README and docs, whole studies and fits.  make test-all: both, collected once, as .ci/run does.  make docs-numbers:
# compute and write the numbers that README and docs mark; ARGS=--all for those that take minutes, too.  make figures: draw docs/img/.
# make bench: compare speed with benchmarks/baseline.json, three minutes; ARGS=--update-baseline records it.
# make docs: build the site of the documentation into build/site/html; ARGS=--serve shows it, --quick runs one notebook.
# All create .venv when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?=
PARALLEL := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations 40 --durations-min 5
# Most of what is installed is never imported: what is, is compiled then.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable
SWEEP := $(BIN)/disagg-sim sweep sweeps/demo.yaml --out reports/demo $(if $(JOBS),--jobs $(JOBS))

# Every test process and command that a test starts would compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test kernel lint types test-long test-all checks bench docs docs-numbers figures clean

venv: $(VENV)/.installed-dev

# The demo needs the run-time dependencies alone; an environment for development has them, too.
$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(INSTALL) '.[docs]'
	@touch $@

demo: $(VENV)/.installed
	$(SWEEP)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# One run of a simulation, which compiles the kernel: test processes that start together would each do so.
kernel: $(VENV)/.installed-dev
	$(BIN)/python -m pytest disagg_sim/simulation/simulate.py

# Those first, each on a core; then the tests.
checks: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target kernel lint types

test: checks
	$(PARALLEL) -m "not long"

test-long: $(VENV)/.installed-dev
	$(PARALLEL) -m long

test-all: checks
	$(PARALLEL)

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
