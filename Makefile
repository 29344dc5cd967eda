PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
# Heads of others, to compare with. They need no more than their layers; the packages that they train with stay out.
PEERS := speculators==0.9.0 hs-connectors==0.9.0
# Tests start many processes: one thread for each, and nothing compiled twice.
QUICK := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help demo test pytest test-vllm lint docs clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP) ## Decode three prompts plainly and speculatively, side by side
	@$(BIN)/jetspec compare --max-tokens 96

test: $(STAMP) ## Run every check and every test that needs no GPU
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(STAMP)
	@$(QUICK) $(BIN)/pytest -m "not gpu" --numprocesses $$(getconf _NPROCESSORS_ONLN) --dist worksteal

test-vllm: $(VLLM)/.installed ## Test the trees inside vLLM on the CPU, in an environment of its own
	@$(QUICK) $(VLLM)/bin/python -m pytest tests/jetspec_vllm

lint: $(STAMP) ## Check style, types, layers and the pages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(STAMP) ## Build the documentation as a site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Delete the environment and everything that was generated
	@rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find jetspec jetspec_vllm benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@$(BIN)/pip install --quiet --no-deps $(PEERS)
	@touch $@

# vLLM alone, without the accelerator libraries that it asks for, then what it imports on a CPU.
$(VLLM)/.installed: constraints-vllm.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --no-deps vllm==0.32.0
	@$(VLLM)/bin/pip install --quiet --requirement constraints-vllm.txt
	@touch $@
