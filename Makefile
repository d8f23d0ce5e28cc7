# Everything runs from .venv, which each target sets up first: `make demo` on a clean clone is enough.
# ARGS hands options on: make broker ARGS="--bind tcp://127.0.0.1:6000"

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint broker bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the locked versions (uv where present, else pip)

$(READY): requirements.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh
	@touch $@

demo: $(READY) ## Start a broker, a verifier and two drafters, and watch them work
	@$(BIN)/python scripts/demo.py $(ARGS)

test: $(READY) ## Run the fast tests
	@$(BIN)/pytest -m "not slow" $(ARGS)

check: lint ## Lint, types and all tests: what CI runs
	@$(BIN)/pytest $(ARGS)

lint: $(READY) ## Lint, format and types only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

broker: $(READY) ## Start a broker on tcp://127.0.0.1:5750
	@$(BIN)/specq broker $(ARGS)

bench: $(READY) ## Measure specq and its rivals on the bundled pair; writes bench.json
	@$(BIN)/specq bench --out bench.json $(ARGS)

clean: ## Remove .venv and whatever else was made here
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist specq.egg-info bench.json
	@find specq workers tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
