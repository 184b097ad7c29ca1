# Every target that needs the environment makes it first: a fresh clone needs no other step.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench quality clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

# A torch asked for by name is installed even when everything else is up to date.
ifdef TORCH
.PHONY: $(READY)
endif

setup: $(READY) ## make .venv and install clearhead into it (does nothing when up to date)

$(READY): pyproject.toml constraints.txt tools/setup_env.py
	@$(PYTHON) tools/setup_env.py $(if $(TORCH),--torch "$(TORCH)")

demo: $(READY) ## train, explain and check a classifier of digits; writes one page
	@$(BIN)/clearhead demo $(ARGS)

test: $(READY) ## run the tests (make test ARGS="-k masks")
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## style, types and the import contract
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict src tools
	@$(BIN)/lint-imports

format: $(READY) ## rewrite the files in the common style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## measure clearhead against PyTorch on this machine
	@$(BIN)/clearhead bench $(ARGS)

quality: $(READY) ## the long training runs behind benchmarks/RESULTS.md
	@$(BIN)/python benchmarks/quality.py $(ARGS)

clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
