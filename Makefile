# `make tune` runs the main job, and `make test` what every change must pass; `make test-all` adds
# the slow tests. All run `make setup` first. `make horovod` adds TensorFlow and Horovod, which only
# their own scripts and tests need.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
BUDGET ?= 5min
WORKERS ?= 2
EXAMPLE ?= examples/resnet_digits.py
CLUSTER ?= examples/clusters/four_hosts.yaml
ACCELERATORS ?= emulated
OPTIONS ?=

# If the environment sets it, every process compiles our packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup tensorflow horovod tune test test-all tested kernels lint docs wheel-test clean

setup: $(VENV)/.compiled

# Only files whose hashes are listed. pip downloads and unpacks on one core, so with --jobs three
# install different packages.
LOCKED := install --quiet --no-compile --no-deps --require-hashes --only-binary :all: --requirement
TORCH := $(shell grep -o '^torch==[0-9.]*' constraints.txt)

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# pip chooses the wheel of torch without hashes, as it would for a user, and checks it afterwards:
# with hashes it would prefer a large one with CUDA from an index to one for CPUs on disk.
$(VENV)/.torch: constraints.txt | $(VENV)/.created
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest $(VENV)/torch $(TORCH)
	sed -n '/^torch==/,/[^\\]$$/p' constraints.txt > $(VENV)/torch/pin.txt
	$(BIN)/pip $(LOCKED) $(VENV)/torch/pin.txt --no-index --find-links $(VENV)/torch
	rm -r $(VENV)/torch
	touch $@

# Every other package of the rest, from the first or the second one on.
$(VENV)/.packages-0 $(VENV)/.packages-1: $(VENV)/.packages-%: constraints.txt | $(VENV)/.created
	sed '/^torch==/,/[^\\]$$/d' constraints.txt | awk '/^[^ #]/ {n++} n % 2 == $*' > $(VENV)/pins-$*.txt
	$(BIN)/pip $(LOCKED) $(VENV)/pins-$*.txt
	touch $@

# A torch with CUDA needs its libraries; `pip check` says so, and at the end that every requirement
# of pyproject.toml is pinned and installed.
$(VENV)/.installed: pyproject.toml constraints-cuda.txt $(VENV)/.torch $(VENV)/.packages-0 $(VENV)/.packages-1
	$(BIN)/pip check >/dev/null || $(BIN)/pip $(LOCKED) constraints-cuda.txt
	$(BIN)/pip install --quiet --no-compile --no-deps --no-build-isolation --editable .
	$(BIN)/pip check >/dev/null || { $(BIN)/pip check; exit 1; }
	touch $@

# pip compiles the 300 MB of modules on one core; this uses all. A few of them are templates or for
# other versions of Python. Of some large folders nearly nothing is imported: what is, Python
# compiles then.
UNUSED := huggingface_hub/(cli|inference)|mlflow/server|numba/cuda|numpy/distutils
UNUSED := $(UNUSED)|ray/(air|data|llm|rllib|serve|train|tune)|sqlalchemy/testing
UNUSED := $(UNUSED)|sympy/(combinatorics|physics|stats)|torch/(_inductor|_vendor|ao|testing)
UNUSED := $(UNUSED)|transformers/(exporters|generation|integrations|models|pipelines)
UNUSED := $(UNUSED)|databricks|docker|flask|fontTools|git|graphql|gunicorn|lightning_fabric|mypy
UNUSED := $(UNUSED)|mypyc|pyasn1|pyasn1_modules|pygments/lexers|pytorch_lightning|wcwidth|werkzeug
UNUSED := /(benchmarks|tests|$(UNUSED))/|_test\.py$$
COMPILE := $(BIN)/python -W ignore -m compileall -q -j 0 -x '$(UNUSED)'
$(VENV)/.compiled: $(VENV)/.installed
	$(COMPILE) $(VENV)/lib autotune runtime_rewriter >/dev/null || true
	touch $@

tensorflow: $(VENV)/.tensorflow-compiled

$(VENV)/.tensorflow: $(VENV)/.installed constraints-tensorflow.txt
	$(BIN)/pip $(LOCKED) constraints-tensorflow.txt
	$(BIN)/pip check >/dev/null || { $(BIN)/pip check; exit 1; }
	touch $@

# Processes that import it at once, as tests do, would each compile all of it.
$(VENV)/.tensorflow-compiled: $(VENV)/.tensorflow
	$(COMPILE) $(foreach name,h5py keras tensorflow,$(VENV)/lib/*/site-packages/$(name)) >/dev/null || true
	touch $@

# Built once for each compiler and version of a framework: minutes, then seconds.
horovod: $(VENV)/.horovod tensorflow

$(VENV)/.horovod: $(VENV)/.tensorflow $(wildcard third_party/horovod/*)
	$(BIN)/python third_party/horovod/build.py
	$(BIN)/pip check >/dev/null || { $(BIN)/pip check; exit 1; }
	touch $@

# On four emulated hosts if this machine can emulate them (root, Linux), otherwise on loopback. The
# example trains longer than the budget; a script that ends is started again.
tune: setup
	@if $(BIN)/autotune testbed check; then \
	  set -x; $(BIN)/autotune tune $(OPTIONS) --budget-time $(BUDGET) --testbed $(CLUSTER) --accelerators $(ACCELERATORS) -- python $(EXAMPLE) --epochs 1000; \
	else \
	  set -x; $(BIN)/autotune tune $(OPTIONS) --budget-time $(BUDGET) -- torchrun --nproc-per-node $(WORKERS) $(EXAMPLE) --epochs 1000; \
	fi

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Four test files at a time, in the order of tests/conftest.py: most tests wait for processes.
# The wheel is tested while pip installs the environment, which leaves most of a core.
PYTEST := $(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
test: tested
	$(PYTEST) -m 'not slow'

# Much longer: before a release, and after changes of what only slow tests cover.
test-all: tested
	$(PYTEST) --hypothesis-profile new

tested:
	$(MAKE) --jobs 4 --output-sync horovod lint setup kernels docs wheel-test PYTHONS=$(PYTHON)

# The compiled replay, which numba keeps next to its source: processes that first use it at the same
# time, as tests do, would each compile it.
kernels: setup
	$(BIN)/autotune replay datasets/gpu_traces/h100/vgg19.fp32 >/dev/null

# The site in build/site; warnings, such as broken links, are errors.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The wheel in fresh environments outside the clone, for every Python from 3.11 to 3.13 on the PATH.
wheel-test:
	$(PYTHON) tests/wheel.py $(PYTHONS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
