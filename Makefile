# make install   a virtual environment in .venv with zero3d and what its tests need
# make demo      trains a byte-level GPT on the Python standard library, on 2 CPU ranks, in two to four minutes
# make test      lint, types and all tests
# make docs      the documentation as a site that opens without a network: build/site/index.html
# make bench     this machine's times beside torch's and DeepSpeed's own, in about 20 minutes; bench-full: all of them
PYTHON ?= python3
BIN := .venv/bin
BENCH := .venv-bench/bin

.PHONY: install demo test lint types tests docs bench bench-full bench-install format clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo 'installing, in two to three minutes ...'
	$(BIN)/pip install --quiet --progress-bar on -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/zero3d train examples/demo.toml

test: lint types tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

tests: install
	$(BIN)/python -m compileall -q src  # Ranks start sooner, where Python is told to keep no bytecode.
	$(BIN)/python -m pytest tests/pure tests/rules -n 2 --durations=3
	$(BIN)/python -m pytest tests/single -n 2 --durations=3
	$(BIN)/python -m pytest tests/ranks -n 2 -m "not alone" --durations=5
	$(BIN)/python -m pytest tests/ranks -m alone --durations=5

docs: install
	$(BIN)/mkdocs build --strict --quiet

bench: bench-install
	$(BENCH)/python benchmarks/bench.py

bench-full: bench-install
	$(BENCH)/python benchmarks/bench.py --full

# The peers have an environment of their own, and are no part of what zero3d needs.
bench-install: .venv-bench/installed

.venv-bench/installed: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	$(BENCH)/pip install --quiet -c constraints.txt -e . matplotlib numpy psutil
	$(BENCH)/pip install --quiet -c constraints.txt deepspeed==0.19.8
	touch $@

format: install
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-bench runs build
