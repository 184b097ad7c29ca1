# Every target that needs the environment makes it first: a fresh clone needs no other step.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS := 2
READY := $(VENV)/.ready
NATIVE := $(PYTHON) tools/build_native.py
# Code 3 is a machine with nothing to build with; a build that fails must not leave the tests with an old library.
NATIVE_IF_ABLE := $(NATIVE) || [ $$? -eq 3 ]
# Without bytecode each process of the tests compiles clearhead and rewrites every test again: 10 s of the 24 that pytest
# collects for.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup native test-native test-emulated test-arm demo test test-slow test-all matrix lint format bench docs fuzz \
  faults quality wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

# A torch asked for by name is installed even when everything else is up to date.
ifdef TORCH
.PHONY: $(READY)
endif

setup: $(READY) ## make .venv, install clearhead into it, build its CPU kernels (only what is not up to date)
	@$(NATIVE) || true

$(READY): pyproject.toml constraints.txt tools/setup_env.py
	@$(PYTHON) tools/setup_env.py $(if $(TORCH),--torch "$(TORCH)")

native: ## build the CPU kernels, only what changed
	@$(NATIVE)

test-native: ## the kernels' own tests, under AddressSanitizer and UBSan
	@$(NATIVE) --tests

test-emulated: ## the same for AVX-512 on a processor without it
	@$(NATIVE) --emulated

test-arm: ## the same for ARM, by a cross compiler and an emulator: slow
	@$(NATIVE) --arm

demo: $(READY) ## train, explain and check a classifier of digits; writes one page
	@$(NATIVE) || true
	@$(BIN)/clearhead demo $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test: $(READY) ## the tests of every change, in two processes (make test ARGS="-k masks", make test JOBS=0 for one)
	@$(NATIVE_IF_ABLE)
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(READY) ## the tests that make test leaves out
	@$(NATIVE_IF_ABLE)
	@$(PYTEST) -m slow $(ARGS)

test-all: $(READY) ## every test
	@$(NATIVE_IF_ABLE)
	@$(PYTEST) $(ARGS)

matrix: $(READY) ## operators and bridges over releases of torch and transformers (make matrix ARGS="--only torch=2.11.0")
	@$(NATIVE_IF_ABLE)
	@$(BIN)/python tools/matrix.py $(ARGS)

lint: $(READY) ## style, types, import contracts, import cycles and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict src tools
	@$(BIN)/lint-imports
	@$(BIN)/python tools/import_cycles.py
	@$(BIN)/python tools/check_words.py

format: $(READY) ## rewrite the files in the common style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## measure clearhead against PyTorch on this machine
	@$(NATIVE_IF_ABLE)
	@$(BIN)/clearhead bench $(ARGS)

docs: $(READY) ## build the documentation into docs/_build/html, its notebooks executed (make docs ARGS="-b linkcheck")
	@$(NATIVE_IF_ABLE)
	@$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html $(ARGS)
	@echo "open docs/_build/html/index.html"

fuzz: $(READY) ## 50,000 random problems on every backend of this machine, and 200,000 calls compared bit by bit
	@$(NATIVE_IF_ABLE)
	@CLEARHEAD_FUZZ=50000 $(BIN)/python -m pytest tests/fuzz $(ARGS)

faults: $(READY) ## seed faults into a copy of the library, one at a time: the tests must catch each
	@$(BIN)/python tools/seeded_faults.py $(ARGS)

quality: $(READY) ## the long training runs behind benchmarks/RESULTS.md
	@$(BIN)/python benchmarks/quality.py $(ARGS)

wheel: $(READY) ## build wheels with the CPU kernels into dist/, audit them, and try one without a compiler
	@$(BIN)/python tools/build_wheel.py $(ARGS)

clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) build dist docs/_build src/clearhead/_native .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find native/editable -mindepth 1 ! -name CMakeLists.txt -delete
	find src tests tools -name __pycache__ -prune -exec rm -r {} +
