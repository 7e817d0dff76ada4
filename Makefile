# Every target works from a fresh clone: the first one that needs it creates .venv and installs the tested set.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PRESET ?= tiny

.PHONY: reproduce figures test export notebooks check clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

$(VENV)/installed: constraints.txt settings.ini setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(VENV)/installed

reproduce: $(VENV)/installed ## Train and evaluate every system, then draw the tables and figures (PRESET=tiny)
	$(PY) -m route_transport.reproduce --preset $(PRESET)

figures: $(VENV)/installed ## Redraw the tables and figures of PRESET from its results.json
	$(PY) -m route_transport.figures --preset $(PRESET)

test: $(VENV)/installed ## Execute every notebook and run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto

export: $(VENV)/installed ## Write route_transport/ and README.md from the notebooks, clean the notebooks
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean
	$(PY) docs/readme.py

notebooks: $(VENV)/installed ## Execute every notebook in place, so that it is committed with its outputs
	$(PY) -m jupyter nbconvert --to notebook --execute --inplace nbs/*.ipynb
	$(VENV)/bin/nbdev_clean
	$(PY) docs/readme.py

check: $(VENV)/installed ## Check that the package equals its notebooks and the notebooks are clean
	$(PY) tests/hygiene.py

clean: ## Remove the environment and what was built, keep results
	rm -rf $(VENV) build dist *.egg-info _docs _proc
