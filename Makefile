# Every target sets up what it needs in .venv; nothing outside this folder changes but the model cache.
#   make demo                       the default Python
#   make test PYTHON=python3.12     another one (after `make clean`)
#   make test ARGS="-k sampling"    what follows pytest, `semspec demo` or the benchmark
# The tests need torch: where pip finds only the build with CUDA (2 GB more), point pip at a CPU build first.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Folders too: their time changes when a file in them is deleted or renamed.
SOURCES := pyproject.toml constraints.txt LICENSE \
  $(shell find models runtime export calibration -not -path '*/__pycache__*' -not -name '.*')

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo  ## export a real pair into one bundle, calibrate it quickly, answer a question in three ways
	$(BIN)/semspec demo $(ARGS)

test: $(VENV)/.test  ## run the tests against the installed package
	$(BIN)/pytest -n 2 $(ARGS)

test-slow: $(VENV)/.test  ## run the tests that take minutes or a larger model
	$(BIN)/pytest -m slow $(ARGS)

lint: $(VENV)/.test  ## ruff (rules and format) on the tree, mypy --strict on the installed package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test  ## measure the speed of export and decoding on this machine
	$(BIN)/python tests/bench/speed.py $(ARGS)

clean:  ## remove the environment, builds and caches of tools (not the model cache)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# build/lib keeps deleted modules and would ship them.
$(VENV)/.demo: $(VENV)/.made $(SOURCES)
	@echo "installing semspec with its default engine, the exporter and plots into $(VENV)"
	@rm -rf build/lib build/bdist.*
	$(INSTALL) '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.made $(SOURCES)
	@echo "installing semspec with everything the tests need into $(VENV) (minutes the first time: torch)"
	@rm -rf build/lib build/bdist.*
	$(INSTALL) '.[test]'
	@touch $@
