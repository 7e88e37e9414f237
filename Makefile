# `make` lists the commands. They install what they need into .venv, or use another Python as it is: make test PYTHON=python3
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
BOOTSTRAP ?= python3

ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

# A folder in which the package has its own name, whatever this clone is called: mypy and import-linter look for it there.
NAMED := build/lint/meshwright
MODULES := $(wildcard *.py) py.typed cli compiler costmodel models runtime
TREE_PATH := $(abspath build/lint)

export OMP_NUM_THREADS ?= 1
# Each fresh process would compile the whole package again, some half a second.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo test lint format bench fuzz measured pictures zoo rules page docs wheel clean
.DEFAULT_GOAL := help

help:  ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

venv: $(READY)  ## install everything into .venv

# torch is installed first and by its exact version, so that no later step can replace it by another build.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(BOOTSTRAP) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## train a small GPT on 4 local ranks by a plan found on the spot
	$(PYTHON) -m meshwright demo

# three at once on two cores: ranks wait for each other, so two would leave a sixth of the time unused
test: $(READY)  ## run the tests
	@$(PYTHON) -c 'from tests.support.browser import chromium; chromium() or \
		print("no Chromium: the tests of the page of a plan are skipped (apt-get install chromium)")'
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 3 --dist loadfile

lint: $(READY) $(NAMED)  ## style, types, and the one way that imports may point
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	MYPYPATH=$(TREE_PATH) $(PYTHON) -m mypy -p meshwright
	PYTHONPATH=$(TREE_PATH) $(PYTHON) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: $(READY)  ## rewrite the sources in the project's format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY)  ## run every benchmark, one after another; tables under out/, figures under benchmarks/results/
	mkdir -p out
	for script in $(filter-out benchmarks/measured.py benchmarks/zoo.py,$(sort $(wildcard benchmarks/*.py))); do \
		echo "== $$script"; $(PYTHON) $$script | tee out/$$(basename $$script .py).txt; done

fuzz: $(READY)  ## read 10,000 damaged and hostile files of every kind; each is refused in one line
	$(PYTHON) benchmarks/fuzz.py

measured: $(READY)  ## make docs/measured.md and README's table of the benchmarks' figures
	$(PYTHON) benchmarks/measured.py

# Beside what .venv has: pip install --no-deps timm diffusers torchvision pillow requests
zoo: $(READY)  ## train over 200 architectures on two ranks against eager PyTorch; makes docs/models.md
	$(PYTHON) benchmarks/zoo.py

pictures: $(READY)  ## draw the pictures of schedules, collectives and plans in docs/images, from what the code does
	$(PYTHON) docs/pictures.py
	$(PYTHON) docs/gallery.py

rules: $(READY)  ## check every sharding rule by execution; report wrong rules and missing splits
	$(PYTHON) -m meshwright.compiler.verification.check_rules tests.support.zoo:ZOO

# Needs node. What it makes is committed, so that nobody else does.
page:  ## bundle the charts of the page of a plan, from the versions in its package-lock.json
	cd compiler/report/page/bundle && npm ci --no-audit --no-fund && npm run --silent build

docs: $(READY) $(NAMED)  ## build the documents as a site into build/site
	$(PYTHON) -c 'import mkdocs, mkdocstrings' 2> /dev/null || $(PYTHON) -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(TREE_PATH) COLUMNS=100 $(PYTHON) -m mkdocs build --quiet

wheel: $(READY)  ## build the wheel into dist/
	rm -rf build/lib build/bdist.*
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation -w dist .

.PHONY: $(NAMED)
$(NAMED):
	@rm -rf $@ && mkdir -p $@ && for module in $(MODULES); do ln -s ../../../$$module $@/; done

clean:  ## remove what the commands made, .venv aside
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
