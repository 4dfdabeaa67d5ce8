# `make demo` and `make test` need Python 3.11+ and make, nothing else: they make .venv and install the package into it.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help demo test lint fmt check clean

help:
	@echo "make demo [ARGS='--json FILE ...']  the main job on simulated engines, with a report (about two minutes)"
	@echo "make test                           the test suite"
	@echo "make lint                           ruff and mypy --strict"
	@echo "make fmt                            format the code"
	@echo "make clean                          remove $(VENV) and caches"

# --no-compile: byte code is made when a module is first used; compiling all of it would double the time to install.
$(BIN)/.demo: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"kvtune needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; name another with make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvtune into $(VENV) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[bench]'
	@touch $@

$(BIN)/.dev: $(BIN)/.demo
	@echo "installing the test tools into $(VENV) ..." >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	@touch $@

demo: $(BIN)/.demo
	@$(BIN)/kvtune demo $(ARGS)

test: $(BIN)/.dev
	@$(BIN)/python -m pytest tests/unit tests/integration $(ARGS)

lint: $(BIN)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fmt: $(BIN)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

check: lint test

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
