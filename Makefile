# make            says what there is
# make demo       from a fresh clone to a trained model
# make test       what must pass before a commit

PYTHON ?= python3
# Holds torch without CUDA for Linux; used where it can be reached. Empty: only the indexes pip is configured with.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
# Of `make test-gpu`: .venv has torch for CPUs alone.
GPU_PYTHON ?= python3
IN_TRIXIE := $(BIN)/python tests/slurm/trixie.py run
READY := .venv/ready
MADE_FROM := pyproject.toml containers/constraints-cpu.txt

# Tests and demos start Python hundreds of times: where this is set, each start would compile the toolkit afresh.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test test-slow test-slurm-24 test-slurm-24-short test-gpu slurm-lab slurm-lab-24 bench lint
.DEFAULT_GOAL := help

help:
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(READY) ## make .venv with everything below (Python 3.11 to 3.13; another one: PYTHON=/path/to/python3.13)

demo: $(READY) ## train a tiny model on arithmetic while you watch, about two minutes
	$(BIN)/mrl-submit demo

# Three workers on two cores: most of tests/runs and tests/slurm is waiting. In the order of tests/conftest.py, which
# pytest-xdist would else replace by files with many tests first, so that both cores would wait for Slurm in the end.
test: lint ## lint, unit tests, whole runs here, and on a real Slurm where its packages are installed
	$(BIN)/pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder tests/unit tests/runs tests/slurm

test-slow: $(READY) ## tests that take minutes: whole runs, controls that must not learn, invariants at length
	$(BIN)/pytest -m slow --timeout 3600 tests
	$(BIN)/pytest -m "not slow" --timeout 1800 --numprocesses 2 --hypothesis-profile thorough tests/unit

# In a root directory of Debian 13's: made once (mmdebstrap), kept in the cache.
test-slurm-24: $(READY) ## the tests on a real Slurm, on Debian 13's 24.11 whatever this machine has
	$(IN_TRIXIE) $(BIN)/pytest --timeout 3600 --numprocesses 3 --dist loadfile --no-loadscope-reorder tests/slurm

# What differs most between versions: preemption and squeue's answers. A minute.
test-slurm-24-short: $(READY)
	$(IN_TRIXIE) $(BIN)/pytest -m "not slow" --numprocesses 2 --dist loadfile \
	    tests/slurm/test_slurm_preempted_often.py tests/slurm/test_slurm_commands.py

test-gpu: ## on a GPU, with a GPU_PYTHON that has torch for CUDA: tests, and figures to tests/benchmarks/results
	$(GPU_PYTHON) -m pytest --timeout 1800 tests/gpu
	$(GPU_PYTHON) tests/benchmarks/gpu_step.py --size 0.5b
	$(GPU_PYTHON) tests/benchmarks/gpu_step.py --size 7b
	$(GPU_PYTHON) tests/benchmarks/gpu_decode.py

slurm-lab: $(READY) ## a shell with a real Slurm of ten nodes on this machine, gone when the shell ends
	@$(BIN)/python tests/slurm/lab.py shell

slurm-lab-24: $(READY) ## the same with Debian 13's Slurm 24.11
	@$(IN_TRIXIE) $(BIN)/python tests/slurm/lab.py shell

bench: $(READY) ## benchmarks on the CPU; the last line is the speed-up over TRL
	$(BIN)/python tests/benchmarks/packing.py
	$(BIN)/python tests/benchmarks/rewards.py
	$(BIN)/python tests/benchmarks/checkpoint_save.py
	$(BIN)/python tests/benchmarks/preemption.py
	$(BIN)/python tests/benchmarks/hf_convert.py
	$(BIN)/python tests/benchmarks/server.py
	$(BIN)/python tests/benchmarks/grpo_step.py

lint: $(READY) ## style, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Written last, so an interrupted installation starts over, and one that is up to date costs nothing.
$(READY): $(MADE_FROM)
	@for python in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "mrl needs Python 3.11 to 3.13, but $(PYTHON) is $$("$(PYTHON)" --version 2>&1 | tail -n 1)." >&2; \
	    echo "Install one (Debian 12 and 13, Ubuntu 24.04: apt-get install python3 python3-venv)," >&2; \
	    echo "or say where it is: make env PYTHON=/path/to/python3.13" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python cannot make virtual environments: apt-get install python3-venv (as root), then try again." >&2; \
	    exit 1; \
	fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv
	@index=; size="500 MB to download, 2 GB on the disk"; \
	if [ -n "$(TORCH_INDEX)" ] && [ "$$(uname)" = Linux ] && $(BIN)/python -c \
	    'import urllib.request; urllib.request.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
	    index="--extra-index-url $(TORCH_INDEX)"; \
	elif [ "$$(uname)" = Linux ]; then size="several GB, as this PyTorch brings CUDA along ($(TORCH_INDEX) has one without)"; \
	fi; \
	echo "Installing PyTorch and some 120 packages into .venv, once: $$size. This takes minutes."; \
	if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check --no-input $$index \
	    -c containers/constraints-cpu.txt -e '.[train,huggingface,math,gym,wandb,serve,dev,bench]'
	@touch $@
