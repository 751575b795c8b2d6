# Each target does all the set-up it needs by itself. `make help` lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m
# More arguments for pip, for example an index of CPU-only torch builds: make test PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
# More arguments for pytest: make test PYTEST_ARGS="-x tests/decoding"
PYTEST_ARGS ?=

SOURCES := edgespec drafts predictor scripts tests
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints-dev.txt

.DEFAULT_GOAL := help
.PHONY: help setup model demo test lint format bench bench-quick clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

demo: model  ## set everything up, then answer four prompts of four domains
	$(BIN)/edgespec demo

test: lint model  ## set everything up, then run ruff, mypy and the whole test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: setup  ## let ruff fix and format the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.bench model  ## install the peers and compare speeds with them (llama-cpp-python needs a C++ compiler)
	$(BIN)/edgespec bench speed

# A folder of its own for each run: what was measured before is never mixed with what is measured now.
bench-quick: OUT ?= runs/bench-quick-$(shell date +%Y%m%d-%H%M%S)
bench-quick: model  ## policies on 18 questions, with a report: about 4 minutes on 2 idle cores (OUT=DIR; RESUME=1 goes on with OUT)
	$(BIN)/edgespec bench specbench --questions edgespec/bench/data/questions.jsonl --out $(OUT) \
	  --policies 'plain,ngram,static:general@3,mab-async,memspec,edgespec' --order interleaved \
	  --resident 2 --max-new-tokens 80 --repeats 1 --model $(MODEL) $(if $(RESUME),--resume)

setup: $(VENV)/.installed  ## make .venv and install edgespec with its tools

model: setup  ## fetch the default model
	$(BIN)/edgespec pull $(MODEL)

# The stamps are written last, so a broken install is done again; they are older than a changed pyproject or constraints.
$(VENV)/.installed: pyproject.toml constraints-dev.txt | $(VENV)/bin/python
	@echo "Installing edgespec and its tools into $(VENV) (several minutes the first time)"
	$(PIP) --upgrade pip
	$(PIP) -e '.[cpu,dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) -e '.[cpu,dev,bench]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "edgespec needs Python 3.10 to 3.13, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there): say which to use with make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON)' cannot make a virtual environment: install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

clean:  ## remove .venv, caches and build results (the model cache stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
