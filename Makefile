# Two commands do all set-up: `make tune` (the main job) and `make test`. Both depend on `make setup`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
BUDGET ?= 5min
WORKERS ?= 2

.PHONY: setup tune test lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[tune,dev]'
	touch $@

tune: setup
	$(BIN)/autotune tune --job autotune-jobs/example --budget-time $(BUDGET) -- \
	    torchrun --nproc-per-node $(WORKERS) examples/resnet_digits.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
