# The commands of the README. `make` honours PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS, as pip does.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch stalls when two programs share the cores and their threads spin.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# Memory that torch frees is kept for its next tensors: to take it from the system page by page again costs a tenth of the
# processor time (glibc's own limit is 32 MiB; others ignore these).
export MALLOC_MMAP_THRESHOLD_ ?= 536870912
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
# Several workers and hundreds of processes would compile the same files anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install system demo test test-fast test-slow lint types docs clean

help:            ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch by exact version: a looser pin may download a CUDA build of several GB.
$(VENV)/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[demo,dev]' -e lab
	touch $@

install: $(VENV)/.installed  ## Create the virtual environment with everything that tests and demo need

system:          ## Install the Debian packages that the tests use (Chromium, to look at the HTML report)
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

demo: install    ## Check a real server, whole and broken, side by side
	$(BIN)/assay demo

# By file, so that what tests of a file share is made once, in the order of tests/conftest.py. A third worker, as many
# tests wait for servers that start, sleep or never answer.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations=30

test: install system  ## All tests but the slow ones, real engines included
	$(MAKE) -j 2 lint types
	$(BIN)/python -c "from assay.cli.verbs import prepare_demo; raise SystemExit(prepare_demo())"
	ASSAY_REQUIRE_CHROMIUM=1 $(PYTEST) -n 3 -m "not slow"

test-fast: install  ## Tests that run no model and no server (a few minutes)
	$(PYTEST) -n 3 -m "not engine and not slow"

test-slow: install system  ## The rest
	$(BIN)/python -c "from assay.cli.verbs import prepare_demo; raise SystemExit(prepare_demo())"
	ASSAY_REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

docs: install    ## Build the documentation; a warning is an error
	$(BIN)/mkdocs build --strict --quiet

clean:           ## Remove the virtual environment and what tools leave behind (the model cache stays)
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
