# Two commands do all the set-up: `make run` (the main job) and `make test`.
# torch is installed first and by its exact pin: a plain `torch` brings gigabytes of CUDA packages.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# The version that belongs to this torch: the kernels are tested without a GPU too. A CUDA build brings its own.
TRITON ?= $(if $(filter torch==2.13.0,$(TORCH)),triton==3.7.1)
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: run test gpu faults fuzz bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ring_dilated_attention needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check $(TRITON) -e '.[test]'
	touch $@

run: $(VENV)/.installed
	$(BIN)/rda train --ranks 2

test: $(VENV)/.installed
	$(BIN)/ruff check src benchmarks tests examples
	$(BIN)/ruff format --check src benchmarks tests examples
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

# On a machine with a GPU, where torch is to be the build for it: make gpu TORCH=torch
gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -rs tests/test_cuda.py tests/test_gpu_bench.py tests/test_sdpa.py tests/test_staging.py
	$(BIN)/rda check --timeout 300
	$(BIN)/python -m benchmarks gpu
	$(BIN)/python -m benchmarks gpu_memory
	$(BIN)/python -m benchmarks gpu_small

# 30 trials of each kind: ranks that are killed, stopped, or raise. `make test` has one of each.
faults: $(VENV)/.installed
	$(BIN)/python tests/fault_trials.py

# Random and hostile use. `make test` has 200 cases of each kind; here are 2,000, and proofs that they notice what breaks.
fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzz.py --prove

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks --all

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info
