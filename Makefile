# One command for each habit; `make help` lists them. Everything is installed into .venv by pip.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python of at least 3.11; say PYTHON=... to choose another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$p && break; done)
STUDY ?= studies/quickstart.toml
# For the host that `make wheelhouse` packs for.
PY ?= 3.12
PLATFORM ?= manylinux_2_28_x86_64
WHEELHOUSE := wheelhouse
# Benchmarks that need no GPU.
BENCHES = $(filter-out bench/gpu_%.py bench/search.py bench/search_%.py,$(wildcard bench/*.py))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run test test-gpu lint format bench bench-search wheelhouse clean distclean

help: ## List these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv and install tktune and what it needs into it

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python of at least 3.11 was found; install one, or say PYTHON=/path/to/python3."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

run: setup ## Tune studies/quickstart.toml on this machine (STUDY=... for another) and print the winner
	$(BIN)/tktune run $(STUDY)

# Tests share the cores, but for those that assert how long something takes; these come last, one after the other.
PYTEST := $(BIN)/python -m pytest --cov=tktune

test: setup ## Run all tests that need no GPU, with coverage
	@rm -f .coverage .coverage.*
	@failed=0; \
	$(PYTEST) -m "not gpu and not alone" -n auto --maxprocesses=4 --dist=worksteal --cov-report= || failed=1; \
	$(PYTEST) -m "alone and not gpu" --cov-append --cov-report=term:skip-covered --cov-fail-under=85 || failed=1; \
	exit $$failed

test-gpu: setup ## Run the tests that need a GPU
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,cuda]'
	$(BIN)/python -m pytest -m gpu

lint: setup ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict tktune

format: setup ## Put files into the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Run the benchmarks that need no GPU
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench; done

# Kernel Tuner is a rival in that comparison and nothing else, so it lives in an environment of its own.
BENCH_BIN := bench/.venv/bin

bench/.venv/.installed: constraints.txt
	$(PYTHON) -m venv bench/.venv
	$(BENCH_BIN)/python -m pip install --quiet kernel-tuner==1.5.0 optuna==5.0.0 pydantic sqlalchemy
	@touch $@

bench-search: setup bench/.venv/.installed ## Compare the search with others by replay (SPACES=FOLDER of more recordings)
	@kept=yes; \
	$(BENCH_BIN)/python bench/search.py $(if $(SPACES),--spaces $(SPACES)) || kept=no; \
	for bench in $(wildcard bench/search_*.py); do echo "== $$bench"; $(BIN)/python $$bench || kept=no; done; \
	test $$kept = yes || { echo "Not every promise is kept; see above."; exit 1; }

# pip matches platform tags exactly, so every older tag that such a host takes as well is named.
MINOR := $(shell echo $(PLATFORM) | sed -nE 's/^manylinux_2_([0-9]+)_.*/\1/p')
ARCH := $(shell echo $(PLATFORM) | sed -nE 's/^manylinux_2_[0-9]+_//p')
OLDER := $(if $(MINOR),$(foreach n,$(shell seq $(MINOR) -1 5),manylinux_2_$(n)_$(ARCH)) \
	$(if $(shell test $(MINOR) -ge 17 && echo y),$(foreach name,manylinux2014 manylinux2010 manylinux1,$(name)_$(ARCH))))

wheelhouse: setup ## Collect wheels for a host without a network (PY=3.12 PLATFORM=manylinux_2_28_x86_64)
	@rm -rf $(WHEELHOUSE) && mkdir -p $(WHEELHOUSE)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w $(WHEELHOUSE) .
	@$(BIN)/python -c 'import tomllib; \
	needs = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
	print(*(need for need in needs if not need.startswith("torch")), sep="\n")' > $(WHEELHOUSE)/needs.txt
	@$(BIN)/python -m pip download --quiet --only-binary=:all: --implementation cp --python-version $(PY) \
	  $(foreach tag,$(or $(OLDER),$(PLATFORM)),--platform $(tag)) -d $(WHEELHOUSE) -r $(WHEELHOUSE)/needs.txt
	@rm $(WHEELHOUSE)/needs.txt
	@echo "$$(ls $(WHEELHOUSE) | wc -l) wheels, $$(du -sh $(WHEELHOUSE) | cut -f1), for Python $(PY) on $(PLATFORM). Copy the folder $(WHEELHOUSE) to the host, where torch is installed already; beside it, run:"
	@echo "python$(PY) -m pip install --no-index --find-links $(WHEELHOUSE) --no-deps $(WHEELHOUSE)/*.whl"

clean: ## Remove what was built and measured here, but not .venv
	rm -rf _build dist $(WHEELHOUSE) htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv as well
	rm -rf $(VENV)
