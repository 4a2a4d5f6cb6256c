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

.PHONY: help install system demo test test-fast test-slow test-wheel test-extras test-llama fuzz lint types docs clean

help:            ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# The core first, with which the demo installs vLLM's own environment while the rest is installed.
$(VENV)/.core: pyproject.toml
	@echo "installing assay's core (about 80 MB of downloads) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -e .
	@touch $@

# torch by exact version: a looser pin may download a CUDA build of several GB.
$(VENV)/.installed: $(VENV)/.core lab/pyproject.toml
	@echo "installing torch (190 MB of downloads) …"
	@$(BIN)/python -m pip install -qq torch==2.13.0
	@echo "installing the laboratory and the tools of demo and tests (about 400 MB of downloads) …"
	@$(BIN)/python -m pip install -qq -e '.[demo,dev]' -e lab
	@touch $@

install: $(VENV)/.installed  ## Create the virtual environment with everything that tests and demo need

SYSTEM := chromium prometheus promtool
system:          ## Install the Debian packages that the tests use (Chromium and Prometheus, to read what assay writes)
	@command -v $(SYSTEM) | wc -l | grep -qx $(words $(SYSTEM)) || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium prometheus >/dev/null; }

.PHONY: vllm
vllm: $(VENV)/.core
	@$(BIN)/python -c "from assay.cli.verbs import prepare_vllm; raise SystemExit(prepare_vllm())"

demo: $(VENV)/.core  ## Check a real server, whole and broken, side by side
	@$(MAKE) --no-print-directory -j 2 vllm install
	$(BIN)/assay demo

# By file, so that what tests of a file share is made once, in the order of tests/conftest.py. A third worker, as many
# tests wait for servers that start, sleep or never answer.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations=30

test: system     ## All tests but the slow ones and those of llama.cpp, real engines included
	@$(MAKE) --no-print-directory -j 2 vllm install
	$(MAKE) -j 2 lint types
	$(BIN)/python -c "from assay.cli.verbs import prepare_demo; raise SystemExit(prepare_demo())"
	ASSAY_REQUIRE_CHROMIUM=1 $(PYTEST) -n 3 -m "not slow and not llama"

test-fast: install  ## Tests that run no model and no server (a few minutes)
	$(PYTEST) -n 3 -m "not engine and not slow"

test-slow: install system  ## The rest
	$(BIN)/python -c "from assay.cli.verbs import prepare_demo; raise SystemExit(prepare_demo())"
	ASSAY_REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest -m "slow and not wheel"

test-wheel: install  ## The wheels, as the sdists build them, in clean environments of each Python
	$(BIN)/python -m pytest -m wheel --durations=0 -k "not extra_alone" tests/wheel

test-extras: install  ## Each extra alone in a clean environment (downloads several GB, builds llama-cpp-python)
	$(BIN)/python -m pytest -m wheel --durations=0 -k "extra_alone" tests/wheel

test-llama: install  ## Build llama.cpp from llama-cpp-python's sdist (once, into the cache) and run its tests
	PYTHON=$(BIN)/python bash benchmarks/build_llama_cpp.sh
	PYTHON=$(BIN)/python bash benchmarks/build_llama_cpp_python.sh
	$(BIN)/python -c "from assay.demo.models import build_smollm2; build_smollm2()"
	$(PYTEST) -n 2 -m "llama and not slow"

# The same documents in every run; another number of them, or another seed, goes looking for new ones.
FUZZ ?= --documents 3000 --seconds 600 --seed 0
fuzz: install    ## Give hostile documents to every reader (FUZZ has the options of tests/fuzz/fuzz.py)
	ASSAY_CACHE=$$(mktemp -d) $(BIN)/python tests/fuzz/fuzz.py $(FUZZ)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python docs/lint_words.py

types: install
	$(BIN)/mypy

docs: install    ## Build the documentation; a warning is an error
	$(BIN)/mkdocs build --strict --quiet

clean:           ## Remove the virtual environment and what tools leave behind (the model cache stays)
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
