# Every target works from a fresh clone: the first one that needs it creates .venv and installs the tested set.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PRESET ?= tiny
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# what `make notebooks` executes: all but those whose front matter says skip_exec
RUN_NBS = $(shell grep -L 'skip_exec: true' $(wildcard nbs/*.ipynb nbs/*/*.ipynb))

.PHONY: reproduce figures test docs export notebooks check clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

$(VENV)/installed: constraints.txt settings.ini setup.py
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[dev,hf]"
	@touch $(VENV)/installed

$(VENV)/docs-installed: $(VENV)/installed
	$(INSTALL) -e ".[docs]"
	@touch $(VENV)/docs-installed

reproduce: $(VENV)/installed ## Train and evaluate every system, then draw the tables and figures (PRESET=tiny)
	$(PY) -m route_transport.reproduce --preset $(PRESET)

figures: $(VENV)/installed ## Redraw the tables and figures of PRESET from its results.json
	$(PY) -m route_transport.figures --preset $(PRESET)

test: $(VENV)/installed ## Execute every notebook and run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto

docs: $(VENV)/docs-installed ## Build the site into _docs and check its links
	$(PY) docs/site.py
	$(PY) docs/check_links.py

export: $(VENV)/installed ## Write route_transport/ and README.md from the notebooks, clean the notebooks
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean
	$(PY) docs/readme.py

notebooks: $(VENV)/installed ## Execute every notebook in place, so that it is committed with its outputs
	$(PY) -m jupyter nbconvert --to notebook --execute --inplace $(RUN_NBS)
	$(VENV)/bin/nbdev_clean
	$(PY) docs/readme.py

check: $(VENV)/installed ## Check that the package equals its notebooks and the notebooks are clean
	$(PY) tests/hygiene.py

clean: ## Remove the environment and what was built, keep results
	rm -rf $(VENV) build dist *.egg-info _docs _proc
