# `make demo` and `make test` work in a fresh clone that has nothing but Python 3.11 or newer.
#
#   PYTHON       interpreter that the environment is made with        (make test PYTHON=python3.12)
#   VENV         where the environment is                             (make test VENV=/tmp/venv)
#   PIP_ARGS     more arguments for pip, e.g. another package index   (make test PIP_ARGS="--index-url URL")
#   PYTEST_ARGS  more arguments for pytest                            (make test PYTEST_ARGS="-k packing -x")
#   JOBS         processes that run the tests                         (make test JOBS=1)
#   COMPAT       versions of transformers to test with               (make test-compat COMPAT="5.20.0 newest")
#   MODEL        folder of the model whose quantization is timed      (make bench MODEL=./model)
#   PEERS        Python of an environment with the peers              (make bench PEERS=peers/bin/python)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= auto
COMPAT ?= 5.17.0 newest
MODEL ?= mxquant/bundled/model
PEERS ?=

# The oldest Python that pyproject.toml allows.
CHECK_PYTHON = import sys; sys.exit("mxquant needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)

# A process for each core, with a thread of its own: more threads than cores wait for each other.
TESTS = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-reference test-compat lint format types bench wheel sdist sanitize clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed-test  ## quantize the bundled model four ways, evaluate and compare
	$(VENV)/bin/mxquant demo --out out/demo

test: $(VENV)/.installed-test  ## run the tests
	$(TESTS) $(PYTEST_ARGS)

test-reference: $(VENV)/.installed-test  ## run the tests without the compiled kernels
	MXQUANT_CPU_LIBRARY=none $(TESTS) $(PYTEST_ARGS)

test-compat: $(VENV)/.installed-test  ## run the tests that touch transformers with its oldest and newest versions
	$(VENV)/bin/python tests/compat.py --pip-args="$(PIP_ARGS)" $(COMPAT) -- $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## check style and type hints
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(MAKE) --no-print-directory types

# mypy looks for mxquant.cli in mxquant/cli, so it gets a folder that looks as the installed package does.
types: $(VENV)/.installed-dev  ## check type hints
	rm -rf build/types && mkdir -p build/types/mxquant
	ln -s $(addprefix "$(CURDIR)"/,$(wildcard mxquant/*) cli evals kernels) build/types/mxquant
	$(VENV)/bin/python -m mypy

format: $(VENV)/.installed-dev  ## fix style where that can be done by a tool
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed-test  ## measure speed and memory; results go to out/, see benchmarks/README.md
	mkdir -p out
	$(VENV)/bin/python benchmarks/quantize_vs_peers.py --model "$(MODEL)" $(if $(PEERS),--peers-python "$(PEERS)") --json out/quantize_vs_peers.json
	$(VENV)/bin/python benchmarks/large_checkpoint_memory.py --billions 0.5 --shards 2 --json out/large_checkpoint_memory.json

wheel: $(VENV)/.installed-test  ## build a wheel with the CPU kernels in dist/
	$(VENV)/bin/python -m build --wheel

sdist: $(VENV)/.installed-test  ## build a source distribution in dist/
	$(VENV)/bin/python -m build --sdist

sanitize: $(VENV)/.installed-test  ## run the tests of the CPU kernels under AddressSanitizer and UBSan
	$(VENV)/bin/python tests/sanitize_kernels.py

clean:  ## remove what building, testing and the demo left behind; the environment stays
	rm -rf build dist out *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find mxquant cli evals kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the environment and the compiled kernels too
	rm -rf "$(VENV)" kernels/cpu/_native.so

# A marker file for each extra. Constraints are given on every call: without them pip may change its
# mind about torch, which is gigabytes. Installing also compiles the CPU kernels.
$(VENV)/.installed-%: pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/src/*) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -c constraints.txt $(PIP_ARGS) -e '.[$*]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv "$(VENV)"
