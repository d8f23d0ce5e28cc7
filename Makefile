# Everything runs from .venv, which each target sets up first: `make demo` on a clean clone is enough.
# ARGS hands options on: make broker ARGS="--bind tcp://127.0.0.1:6000"

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.ready-dev
VLLM := .venv-vllm
MACHINES := .venv-machines
DOCS := .venv-docs
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check chaos test-system test-cluster test-machines test-vllm test-gpu docs lint broker bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV) ## Make .venv with the locked versions, torch included (uv where present, else pip)

$(READY): requirements.lock requirements-models.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh
	@touch $@

$(DEV): $(READY) requirements-dev.lock
	@scripts/setup.sh .venv requirements-dev.lock
	@touch $@

demo: $(READY) ## Answer three prompts live, then show a table of plain, lookup and specq; needs no torch
	@$(BIN)/specq demo $(ARGS)

test: $(DEV) ## Run the fast tests
	@$(BIN)/pytest -m "not slow and not system and not cluster and not machines" --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

check: lint test ## Lint, types and all tests: what CI runs
	@$(BIN)/pytest -m "slow and not system and not cluster and not machines" --numprocesses 2 --dist loadfile $(addprefix --ignore=,$(ALONE)) $(ARGS)
	@$(BIN)/pytest -m "slow and not system and not cluster and not machines" $(ALONE) $(ARGS)

# Slow tests that run alone: they time something, or take fixed ports. All others run two at a time.
ALONE = tests/chaos/test_processes.py tests/gateway/test_attacks.py \
	$(patsubst %,tests/end_to_end/test_%.py,chat first_commands floods ipv6 laws vllm)

test-system: $(DEV) ## Test what needs system packages, which it installs (Debian, as root): the page in real Chromium
	@scripts/system.sh
	@$(BIN)/pytest -m system tests/system $(ARGS)

test-cluster: $(DEV) ## Test several brokers, journal and batches in PostgreSQL, which it installs (Debian, as root)
	@scripts/cluster.sh $(BIN)/pytest -m cluster tests/journal tests/batches tests/chaos $(ARGS)

test-machines: $(MACHINES)/.ready ## Test Ray, with a cluster on this machine, Kubernetes manifests and Modal, in an environment of its own
	@scripts/cluster.sh $(MACHINES)/bin/python -m pytest -m machines tests/ray $(wildcard tests/machines) $(ARGS)

$(MACHINES)/.ready: requirements-machines.lock requirements.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(MACHINES) requirements-machines.lock
	@touch $@

test-vllm: $(VLLM)/.ready ## Test the vllm engine: real vLLM on the CPU, in an environment of its own (2 GB)
	@$(VLLM_PYTEST) tests/engines/test_conformance.py $(wildcard tests/engines/test_vllm*.py) \
		tests/drafting/test_conformance.py tests/drafting/vllm/test_vllm_model.py $(ARGS)
	@$(VLLM_PYTEST) tests/end_to_end/test_vllm.py $(ARGS)
	@$(VLLM)/bin/python -m pytest tests/grammar/test_versions.py tests/grammar/test_building.py $(ARGS) # an older llguidance

# vLLM's kernels are made for Intel's OpenMP. vLLM and torch tell each other what is deprecated. A process in which vLLM ran
# hands one core on to those that it starts: hence two calls.
VLLM_PYTEST = LD_PRELOAD=$$(ls $(CURDIR)/$(VLLM)/lib/libiomp5.so 2>/dev/null) $(VLLM)/bin/python -m pytest -k vllm \
	-W default::DeprecationWarning -W default::FutureWarning

$(VLLM)/.ready: requirements-vllm.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VLLM) requirements-vllm.lock --no-deps
	@touch $@

test-gpu: ## Run the tests that need a GPU, and vLLM's if it is there, with PYTHON (python3) as it is: nothing is set up
	@$(GPU_PYTEST) tests/verification tests/engines tests/drafting $(ARGS)
	@$(GPU_PYTEST) tests/end_to_end/test_vllm.py $(ARGS)

GPU_PYTEST = $(or $(PYTHON),python3) -m pytest -m "cuda or vllm" -W default::DeprecationWarning -W default::FutureWarning \
	-W "default:TensorFloat32 tensor cores:UserWarning"

chaos: $(DEV) ## Kill, freeze and cut off everything, hundreds of times (an hour), and forge values; writes chaos.json, values.json
	@$(BIN)/python -m tests.chaos.values --out values.json
	@$(BIN)/python -m tests.chaos.run --out chaos.json $(ARGS)

docs: $(DOCS)/.ready ## Build the site of docs/ into site/; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: requirements-docs.lock
	@python3 -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	@touch $@

lint: $(DEV) ## Lint, format, types and prose only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/check_prose.py

broker: $(READY) ## Start a broker on tcp://127.0.0.1:5750
	@$(BIN)/specq broker $(ARGS)

bench: $(DEV) ## Measure specq and its rivals on the default pair; writes bench.json
	@$(BIN)/specq bench pair --out bench.json $(ARGS)

clean: ## Remove .venv and whatever else was made here
	@rm -rf .venv $(VLLM) $(MACHINES) $(DOCS) .system site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist specq.egg-info bench.json chaos.json values.json
	@find specq bench workers tests -name __pycache__ -type d -prune -exec rm -rf {} +
