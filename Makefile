# Two commands do all the set-up: `make run` (the main job) and `make test`.
# torch is installed first and by its exact pin: a plain `torch` brings gigabytes of CUDA packages.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
# Of the packages of others that tests and examples run with. VERSIONS=/dev/null takes the newest.
VERSIONS := tests/integrations/versions.txt
BIN    := $(VENV)/bin
# pip says what goes wrong, and nothing of the machine's own settings.
QUIET  := --quiet --quiet --disable-pip-version-check

# Our sources are compiled once, and not anew by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-integrations examples docs dist gpu multi-gpu faults fuzz mutants bench clean

# What `make run` needs takes a third of the time of what the tests need.
$(VENV)/.runs: pyproject.toml $(VERSIONS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ring_dilated_attention needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUIET) '$(TORCH)'
	$(BIN)/pip install $(QUIET) -c $(VERSIONS) -e '.[train]'
	touch $@

$(VENV)/.installed: $(VENV)/.runs
	$(BIN)/pip install $(QUIET) -c $(VERSIONS) -e '.[test]'
	touch $@

run: $(VENV)/.runs
	$(BIN)/rda train --ranks 2
	$(BIN)/python examples/longer.py

# mypy takes one core for half a minute: its words come after those of the tests, and either can fail the whole.
TESTS := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test: $(VENV)/.installed
	$(BIN)/ruff check src benchmarks tests examples docs/site
	$(BIN)/ruff format --check src benchmarks tests examples docs/site
	@echo '$(BIN)/mypy beside $(TESTS)'
	@said=$$(mktemp); trap 'kill $$mypy 2>/dev/null; rm -f "$$said"' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/mypy >"$$said" 2>&1 & mypy=$$!; $(TESTS); tests=$$?; \
	wait $$mypy; types=$$?; cat "$$said"; exit $$((tests | types))

# Tests with transformers, accelerate, DeepSpeed and Lightning, in an environment of their own: `make test` has one
# example with transformers. DeepSpeed compiles an extension at its first use, here before any test waits for it.
OTHERS     := .venv-integrations
EXTENSIONS := TORCH_EXTENSIONS_DIR=$(CURDIR)/$(OTHERS)/extensions PATH=$(CURDIR)/$(OTHERS)/bin:$$PATH

$(OTHERS)/.installed: pyproject.toml $(VERSIONS)
	$(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/pip install $(QUIET) '$(TORCH)'
	$(OTHERS)/bin/pip install $(QUIET) -c $(VERSIONS) -e '.[test,hf,deepspeed,lightning]'
	$(EXTENSIONS) python -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().is_compatible() and B().load()'
	touch $@

test-integrations: $(OTHERS)/.installed
	$(EXTENSIONS) python -m pytest -rs tests/integrations tests/test_documentation.py

# Every example at its size. examples/README.md says what each shows, and how long it takes.
WRITTEN := runs/examples
RANKS   := -m torch.distributed.run --standalone --nproc-per-node

examples: $(VENV)/.installed $(OTHERS)/.installed
	rm -rf $(WRITTEN) && mkdir -p $(WRITTEN)
	$(BIN)/python examples/encoder.py
	$(BIN)/python examples/chromosome.py
	$(BIN)/python examples/code_base.py
	$(BIN)/python examples/signals.py --picture $(WRITTEN)/signals.png
	$(BIN)/python examples/video.py
	$(BIN)/python examples/billion.py
	$(BIN)/rda train --ranks 2 --steps 1 --run-folder $(WRITTEN)/run
	$(BIN)/python examples/longer.py --trained $(WRITTEN)/run
	$(BIN)/python $(RANKS) 2 examples/serve.py
	$(BIN)/python examples/slide.py --folder $(WRITTEN)
	$(BIN)/python $(RANKS) 2 examples/finetune_slides.py --out $(WRITTEN)/finetuned.safetensors
	$(BIN)/python $(RANKS) 4 examples/train_fsdp2.py
	$(BIN)/python -m pytest -rs -n 0 tests/integrations/launching.py
	$(OTHERS)/bin/python examples/convert_dense.py
	$(OTHERS)/bin/python examples/train_hugging_face.py
	$(OTHERS)/bin/python $(RANKS) 2 examples/train_hugging_face_ranks.py
	$(OTHERS)/bin/python $(RANKS) 2 examples/train_hugging_face_long.py
	$(OTHERS)/bin/python $(RANKS) 2 examples/train_accelerate.py
	$(OTHERS)/bin/python $(RANKS) 2 examples/train_lightning.py
	$(OTHERS)/bin/python $(RANKS) 4 examples/train_fabric.py
	$(EXTENSIONS) python $(RANKS) 2 examples/train_deepspeed.py

# The documentation site, into site/: strict, and without the network once its environment is made. Its pages are then
# opened in a browser, where one is installed. To read it: python -m http.server --directory site
SITE := .venv-docs

$(SITE)/.installed: docs/site/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install $(QUIET) -r docs/site/requirements.txt
	touch $@

docs: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build
	$(SITE)/bin/python docs/site/browse.py

# sdist and wheel, into dist/. The wheel is installed beside torch alone, and used. Nothing is uploaded. For several:
# make dist PYTHONS='python3.11 python3.12 python3.13'. By default it is PYTHON, if that is given, or else every Python
# on PATH, of the system and of pyenv that starts; `sort` drops what is there twice. The colon is there because make
# takes nothing from a shell that ends with "command not found".
NAMED    = python3.11 python3.12 python3.13 python3.14
NAMED   += $(wildcard /usr/bin/python3.1[1-9] $(HOME)/.pyenv/versions/3.1[1-9]*/bin/python)
WHERE   := import os, sys; print(os.path.realpath(sys.executable))
FOUND    = $(sort $(shell for python in $(NAMED); do $$python -c '$(WHERE)' 2>/dev/null; done; :))
PYTHONS ?= $(or $(if $(filter file,$(origin PYTHON)),$(FOUND)),$(PYTHON))
DIST    := .venv-dist

$(DIST)/.installed: tests/dist/requirements.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install $(QUIET) -r tests/dist/requirements.txt
	touch $@

dist: $(DIST)/.installed
	rm -rf dist
	$(DIST)/bin/python -m build
	$(DIST)/bin/twine check --strict dist/*
	for python in $(PYTHONS); do $(DIST)/bin/python tests/dist/install.py "$$python" '$(TORCH)' || exit 1; done

# On a machine with a GPU, by its own Python, which has torch for it and pytest: nothing is installed. It takes at most
# nine minutes, and writes runs/gpu.json after each part. For some parts: make gpu STEPS='card share'
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks gpu $(STEPS)

# On a machine with two GPUs or more. It takes at most ten minutes, and writes runs/multi_gpu.json.
multi-gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks multi_gpu

# 30 trials of each kind: ranks that are killed, stopped, or raise. Then 20 of each kind of fault that a training run
# recovers from, and 10 with --fsdp (make faults NUMBER=3 for fewer). `make test` has some of each.
faults: $(VENV)/.installed
	$(BIN)/python tests/ranks/fault_trials.py
	$(BIN)/python tests/training/restart_trials.py --record benchmarks/results/restarts.json $(if $(NUMBER),--number $(NUMBER))

# Random and hostile use. `make test` has 100 cases of each kind or fewer; here are 2,000 or as many as go into half an
# hour, and proofs that they notice what breaks. Then hypothesis draws other cases than in `make test`. With a seed:
# make fuzz SEED=7
fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzzing/fuzz.py --prove $(if $(SEED),--seed $(SEED))
	FUZZ=1 $(BIN)/python -m pytest -n auto $(if $(SEED),--hypothesis-seed $(SEED)) \
	  $$(grep -rl --include='*.py' '^@given' tests)

# Small changes of the source that break one idea each: which tests notice them? It takes a quarter of an hour, in the
# environment that has accelerate. Triton is in none: pip install triton, for the mutant of its kernels.
mutants: $(OTHERS)/.installed
	$(EXTENSIONS) python -m tests.mutants

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks --all
	$(BIN)/python -m benchmarks --html docs/evidence.html --reports docs/reports.md

clean:
	rm -rf $(VENV) $(OTHERS) $(SITE) $(DIST) .venv-bare-* benchmarks/.environments runs build dist site src/*.egg-info
