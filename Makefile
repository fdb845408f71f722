# `make help` lists the targets. Everything runs in .venv, which is created on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo
# uv installs in a fraction of pip's time, but does not read pip's configuration: `make demo UV=` is by pip. Modules are compiled when
# they are first imported: to compile all of torch and pyarrow takes longer than to install them.
UV := $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python --torch-backend cpu,$(BIN)/python -m pip install --quiet \
	--disable-pip-version-check --no-compile)
# torch's index of builds without CUDA, which are smaller by gigabytes; uv has it built in. Where it is unreachable, pip's own index serves.
CPU_INDEX := $(if $(UV),,--index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 10)
# Compiled modules are kept, whatever the environment asks: a test run starts hundreds of interpreters, and to compile torch takes each
# of them twice as long as to load it.
unexport PYTHONDONTWRITEBYTECODE
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-cuda-runtime lint docs check golden format test-tools clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(DEMO_STAMP): pyproject.toml requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(UV),,$(PIP) --upgrade pip)
	$(PIP) -r requirements-demo.txt $(CPU_INDEX) 2>/dev/null || $(PIP) -r requirements-demo.txt
	$(PIP) --editable '.[all]'
	@touch $@

$(STAMP): $(DEMO_STAMP) requirements-test.txt
	$(PIP) -r requirements-test.txt --editable '.[dev]'
	@touch $@

demo: $(DEMO_STAMP) ## train with a bottleneck and watch it live (DEMO='--bottleneck eval --keep')
	$(BIN)/gpuwatch demo $(DEMO)

test-tools: ## install what the tests need besides Python (as root, with apt; elsewhere lists what is missing)
	@bash scripts/install-test-tools.sh

test: test-tools $(STAMP) ## run all tests (TESTS='-k hook' for some)
	@sh scripts/run-tests.sh $(BIN)/python $(TESTS)

$(CUDA_STAMP): pyproject.toml $(addprefix tests/cuda_runtime/,requirements.txt build.py cudart.c)
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/cuda_runtime/requirements.txt
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	$(CUDA_VENV)/bin/python tests/cuda_runtime/build.py
	@touch $@

test-cuda-runtime: $(CUDA_STAMP) ## run torch's CUDA build on a simulated CUDA runtime (a download of 0.6 GB, 1.5 GB on disk; no GPU)
	GPUWATCH_TEST_CUDA_RUNTIME=1 $(CUDA_VENV)/bin/python -m pytest tests/cuda_runtime $(TESTS)

lint: $(STAMP) ## format, lint and types, nothing changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/; a broken link or a page outside the navigation fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check: ## all that CI runs: lint, documentation and tests
	@bash .ci/run

# What a command prints becomes the file only where it ended well.
write = $(1) > $(2).new && mv $(2).new $(2)

golden: $(STAMP) ## write all generated files: Grafana dashboards, Prometheus rules, pages of the docs, golden files
	$(BIN)/python scripts/grafana_dashboards.py
	$(call write,$(BIN)/gpuwatch rules,deploy/prometheus/rules/gpuwatch.yml)
	$(call write,$(BIN)/python scripts/metrics_page.py,docs/reference/metrics.md)
	$(call write,$(BIN)/python scripts/thresholds_page.py,docs/reference/thresholds.md)
	$(call write,$(BIN)/python scripts/alerts_page.py,docs/reference/alerts.md)
	$(BIN)/python scripts/tables.py
	$(call write,$(BIN)/python scripts/commands_page.py,docs/reference/commands.md)
	$(BIN)/python scripts/report_schemas.py
	$(BIN)/python scripts/api_page.py
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/unit tests/integration/alerting/test_alert_messages.py -k "golden or metrics_page or doctor_examine"

format: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(CUDA_VENV) site .pytest_cache .mypy_cache .ruff_cache
