# `make help` lists the targets. Needs Python 3.11+ and make; .ci/environments.py creates the environments, with uv.

ifndef PYTHON
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif
ifeq ($(PYTHON),)
$(error Python 3.11 or newer was not found; name it: make PYTHON=/path/to/python3.11)
endif
export TORCH PYTEST_ARGS
# Some machines set it, and then each process compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

INSTALL := @$(PYTHON) .ci/environments.py
TEST := @$(PYTHON) .ci/phases.py

.DEFAULT_GOAL := help
.PHONY: help demo install test check lint docs dist format soak bench gpu-wheels clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo:  ## train a small real agent on this machine, in a few minutes
	$(INSTALL) demo
	@.venv/bin/agl demo

install:  ## all environments of `make test`
	$(INSTALL) lint main newest oldest verl vllm frameworks docs

install-%:  # one environment, for example npm
	$(INSTALL) $*

test:  ## everything that must hold: lint, types, tests
	$(TEST)

test-%:  # one part: lint, main, serial, newest, oldest, verl, verl-vllm, vllm, frameworks or docs
	$(TEST) $*

check:  ## lint, types and tests of changed files, or of FILES="..."
	$(INSTALL) lint main
	@.venvs/lint/bin/ruff check --quiet .
	@.venvs/lint/bin/ruff format --check --quiet .
	@.venvs/lint/bin/mypy --no-error-summary core plugins integrations algorithms examples
	@.venvs/main/bin/python -m pytest -m 'not slow and not serial and not soak' -n 2 $$(.venvs/main/bin/python -m tests.selection $(FILES))

lint:  ## ruff and mypy only
	$(TEST) lint

docs:  ## the documentation site, in build/docs
	$(INSTALL) docs
	@.venvs/docs/bin/python docs/build.py

dist:  ## wheel and source distribution in dist, checked and tried
	$(INSTALL) docs
	@.venvs/docs/bin/python .ci/dist.py

format:  ## rewrite the sources in the house style
	$(INSTALL) lint
	@.venvs/lint/bin/ruff check --fix .
	@.venvs/lint/bin/ruff format .

soak:  ## everything on one busy core, three times, and the tests that take minutes
	$(TEST) --busy
	$(TEST) --busy
	$(TEST) --busy
	$(TEST) --soak

bench:  ## benchmarks, as ratios against a baseline of the same run
	$(INSTALL) main
	@set -e; for script in tests/benchmarks/bench_*.py; do echo "== $$script"; .venvs/main/bin/python $$script; done

gpu-wheels:  ## what examples/gpu needs on a machine without a package index, in build/gpu-wheels
	$(INSTALL) main
	@rm -rf build/gpu-wheels
	@.venvs/main/bin/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
		$(addprefix --platform manylinux,_2_28_x86_64 2014_x86_64 _2_17_x86_64 1_x86_64 _2_5_x86_64) \
		--dest build/gpu-wheels --requirement examples/gpu/wheels.txt
	@.venvs/main/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/gpu-wheels .
	@size=$$(du -sm build/gpu-wheels | cut -f1); echo "build/gpu-wheels: $$size MB of 64"; test $$size -lt 64

clean:  ## remove environments, builds and caches
	rm -rf .venv .venvs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
