# make install   a virtual environment in .venv with zero3d and what its tests need
# make demo      trains a byte-level GPT on the Python standard library, on 2 CPU ranks, in about two to four minutes
# make test      lint, types and all tests
# make bench     this machine's step times beside torch's own
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint types tests bench format clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
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
	$(BIN)/python -m pytest tests/pure tests/rules --durations=3
	$(BIN)/python -m pytest tests/single --durations=3
	$(BIN)/python -m pytest tests/ranks --durations=5

bench: install
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/tensor.py
	$(BIN)/python benchmarks/pipeline.py --small

format: install
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs
