# make demo   a real SGLang, a real model, a Ray job: prompts to exact token sequences on this machine
# make test   lint, types and all tests
# make docs   the guides and the API as pages, in build/site
# make fuzz   100,000 cases of bytes, words and answers for all that reads (CASES=N: about N)
# make chaos  kills at random moments: drivers, actors, servers, engines, nodes (ROUNDS=N of each kind of test)
# make bench  every benchmark, one after the other, and one table (ARGS="transport start_up": only those)
# make audit  known vulnerabilities of all that is installed here; asks PyPI
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: demo test unit lint docs fuzz chaos bench audit clean

demo: $(VENV)/.installed
	$(BIN)/python -m eagle3_ray.demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

unit: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# of 18 tests, each with its share
CASES ?= 100000
fuzz: $(VENV)/.dev
	EAGLE3_FUZZ=$$(( $(CASES) / 18 + 1 )) $(BIN)/python -m pytest tests/fuzz --timeout 0 $(ARGS)

ROUNDS ?= 20
chaos: $(VENV)/.dev
	EAGLE3_RAY_KILLS=$(ROUNDS) $(BIN)/python -m pytest tests/chaos --timeout 0 $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run_all.py $(ARGS)

audit: $(VENV)/.dev
	@$(PIP) pip-audit==2.10.1
	@mkdir -p build
	@$(BIN)/pip freeze --exclude-editable > build/installed.txt
	@$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement build/installed.txt || { \
	    echo "make audit: vulnerabilities stand above, or PyPI's advisories cannot be had from here, and nothing is known"; exit 1; }

# torch first and pinned: a newer one would pull gigabytes of CUDA libraries onto a laptop
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
$(VENV)/.installed: pyproject.toml
	@echo "installing eagle3_ray into $(VENV) (about two minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "eagle3_ray needs Python 3.11 or 3.12; this is " + sys.version.split()[0] + ". Run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

# what tests, lint, pages and benchmarks need besides
$(VENV)/.dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
