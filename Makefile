# `make help` lists the targets. Needs Python 3.11+ and make; uses uv when it is on PATH, else venv and pip.

ifndef PYTHON
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif

# Installed first, so that no other requirement chooses the build. It may contain options of pip, as in
# `make demo TORCH='torch==2.13.0 --index-url <index of CPU builds>'`.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Runs a failing test a second time, and names it at the end.
RERUN := --reruns 1 --rerun-show-tracebacks
# uv does not read the configuration of pip, so it gets the setting that offline installations need.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

comma := ,
SOURCES := $(wildcard core plugins integrations algorithms examples)

# The name of an environment has a hash of everything it is made from. It is complete once its stamp file exists.
HASH := $(shell { pwd; echo '$(TORCH)'; $(PYTHON) --version; cat Makefile pyproject.toml constraints/*.txt; } 2>/dev/null | cksum | cut -d' ' -f1)
MAIN := .venvs/main-$(HASH)
NEWEST := .venvs/newest-$(HASH)
VERL := .venvs/verl-$(HASH)
OLDEST := .venvs/oldest-$(HASH)
VLLM := .venvs/vllm-$(HASH)
BIN := $(MAIN)/bin
ENVIRONMENTS := $(MAIN)/.complete-$(HASH) $(NEWEST)/.complete-$(HASH) $(VERL)/.complete-$(HASH) $(OLDEST)/.complete-$(HASH) $(VLLM)/.complete-$(HASH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-newest test-oldest test-verl test-vllm lint format soak bench clean

# $(call environment,folder,extras,constraints,installed first,requirements installed next without resolving): make deletes
# and recreates an environment that it created itself; into any other existing environment it only installs packages.
define environment
	@$(if $(PYTHON),,$(error Python 3.11 or newer was not found; name it: make PYTHON=/path/to/python3.11))
	@echo "Installing .[$(2)] in $(1) (once)"
	@if [ -e $(1)/.made-by-make ]; then rm -rf $(1); fi
	@if [ ! -e $(1) ]; then mkdir -p $(1) && touch $(1)/.made-by-make; fi
	@if command -v uv >/dev/null; then \
		export VIRTUAL_ENV=$(1) UV_COMPILE_BYTECODE=1; \
		uv venv --quiet --allow-existing --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(1) && \
		uv pip install --quiet --constraint constraints/$(3).txt $(or $(4),pip) && \
		$(if $(5),uv pip install --quiet --no-deps --requirement $(5) &&) \
		uv pip install --quiet --constraint constraints/$(3).txt --editable '.[$(2)]'; \
	else \
		export PIP_DISABLE_PIP_VERSION_CHECK=1; \
		$(PYTHON) -m venv $(1) && \
		$(1)/bin/python -m pip install -qq --constraint constraints/$(3).txt $(or $(4),pip) && \
		$(if $(5),$(1)/bin/python -m pip install -qq --no-deps --requirement $(5) &&) \
		$(1)/bin/python -m pip install -qq --constraint constraints/$(3).txt --editable '.[$(2)]'; \
	fi
	@touch $(1)/.complete-$(HASH)
endef

# Options for make: two targets at a time; each prints once it has ended.
TWO_AT_A_TIME := --no-print-directory --silent --keep-going -j2 --output-sync
SELECT := not serial and not soak

help:  ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: .venv/.complete-$(HASH)  ## train a small real agent on this machine, in a few minutes
	@.venv/bin/agl demo

test:  ## everything that must hold: lint, types, tests
	@$(MAKE) $(TWO_AT_A_TIME) $(ENVIRONMENTS)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary $(SOURCES)
	@$(BIN)/python -m pytest $(RERUN) -n 2 --dist loadfile -m '$(SELECT)' $(PYTEST_ARGS)
	@$(BIN)/python -m pytest $(RERUN) -m 'serial and not soak' $(PYTEST_ARGS)
	@$(MAKE) $(TWO_AT_A_TIME) test-verl test-oldest test-vllm test-newest

# The tests that tests/conftest.py assigns to another environment.
test-newest test-oldest test-verl test-vllm: test-%: .venvs/%-$(HASH)/.complete-$(HASH)
	@.venvs/$*-$(HASH)/bin/python -m pytest --environment $* $(RERUN) -m '$(SELECT)' $(PYTEST_ARGS)

lint: $(MAIN)/.complete-$(HASH)  ## ruff and mypy only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(SOURCES)

format: $(MAIN)/.complete-$(HASH)  ## rewrite the sources in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

soak: $(ENVIRONMENTS)  ## the tests that take minutes
	@$(BIN)/python -m pytest $(RERUN) -m soak $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-verl test-vllm SELECT=soak

bench: $(MAIN)/.complete-$(HASH)  ## benchmarks, as ratios against a baseline of the same run
	@set -e; for script in tests/benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:  ## remove environments, builds and caches
	rm -rf .venv .venvs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.complete-$(HASH):
	$(call environment,.venv,demo,main,$(TORCH))

$(MAIN)/.complete-$(HASH):
	@rm -rf $(filter-out $(MAIN),$(wildcard .venvs/main-*))
	$(call environment,$(MAIN),all$(comma)demo$(comma)dev$(comma)test$(comma)unit,main,$(TORCH))

$(NEWEST)/.complete-$(HASH):
	@rm -rf $(filter-out $(NEWEST),$(wildcard .venvs/newest-*))
	$(call environment,$(NEWEST),agent-framework$(comma)agentops$(comma)autogen$(comma)langchain$(comma)openai$(comma)openai-agents$(comma)dev,newest)

$(VERL)/.complete-$(HASH):
	@rm -rf $(filter-out $(VERL),$(wildcard .venvs/verl-*))
	$(call environment,$(VERL),openai$(comma)verl$(comma)dev,verl,$(TORCH))

$(OLDEST)/.complete-$(HASH):
	@rm -rf $(filter-out $(OLDEST),$(wildcard .venvs/oldest-*))
	$(call environment,$(OLDEST),langchain$(comma)openai$(comma)openai-agents$(comma)openinference$(comma)otlp$(comma)postgresql$(comma)dev$(comma)unit,oldest)

$(VLLM)/.complete-$(HASH):
	@rm -rf $(filter-out $(VLLM),$(wildcard .venvs/vllm-*))
	$(call environment,$(VLLM),grpo$(comma)openai$(comma)dev,vllm,$(TORCH),constraints/vllm.txt)
