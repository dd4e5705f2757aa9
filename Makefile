# Two commands matter: `make demo` (train, prove, report) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 3

.PHONY: demo test verify mutants gpu-check lint types imports check bench clean help

help:
	@echo "make demo    set up .venv, train the tiny decoder on two ranks, prove it, write report.html"
	@echo "make test    set up .venv, run the tests"
	@echo "make verify  the long matrices that make test leaves out"
	@echo "make mutants every planted fault against every check, and 200 runs without one (hours; goes on where it was)"
	@echo "make gpu-check  one CUDA device: training, precision, memory, step time (skips without one)"
	@echo "make check   lint, types, import order"
	@echo "make bench   the measured figures (benchmarks/)"

# Installed once; again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Fourfold needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Type: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fourfold lab demo --nproc 2

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long" -n $(JOBS) --dist loadfile

verify: $(STAMP)
	$(BIN)/python -m pytest -m long

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --jobs $(JOBS)

gpu-check: $(STAMP)
	$(BIN)/fourfold lab device

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

check: lint types imports

bench: $(STAMP)
	$(BIN)/python benchmarks/sample_order.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/data_parallel_step.py
	$(BIN)/python benchmarks/zero3_step.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/restart.py

clean:
	rm -rf $(VENV) runs build src/*.egg-info
