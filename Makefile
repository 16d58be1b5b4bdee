# Each target sets up .venv by itself. Nothing here needs more than Python 3.11, make and pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

# No target of ours phones home, checks for updates or installs anything while it runs.
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export RAY_USAGE_STATS_ENABLED := 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0

.PHONY: help demo test lint setup format mutants bench-simulation bench-step bench-coding bench-bytes constraints clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(READY)  ## a real private federated run on the data that ships here, with a report
	$(BIN)/fedsieve simulate

test: $(READY) lint  ## every test
	$(BIN)/python -m pytest

lint: $(READY)  ## ruff, mypy and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutants: $(READY)  ## break the privacy mechanism on purpose and see which test notices
	$(BIN)/python -m tests.mutants

bench-simulation: $(READY)  ## our Ray engine against a bare loop and against Flower's engine
	$(BIN)/python -m simulations.benchmarks.simulation

bench-step: $(READY)  ## our clipping engine against plain SGD, Opacus, BackPACK and torch.func; QUICK=1 for a glance
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m simulations.benchmarks.step $(if $(QUICK),--quick)

bench-coding: $(READY)  ## our coding of values and indices against zstd and Roaring, in bits and in speed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m simulations.benchmarks.coding

bench-bytes: $(READY)  ## accuracy for the bytes: dense, sparse and calibrated systems; takes hours, QUICK=1 for a glance
	$(BIN)/python -m simulations.benchmarks.bytes $(if $(QUICK),--quick)

setup: $(READY)  ## make .venv with everything in it

# torch first, by its exact version: an index with a CPU build for this machine is then used, whatever else is asked for.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fedsieve needs Python 3.11 or newer, got %s (make PYTHON=...)" % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(shell grep -E '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

constraints: $(READY)  ## write down the versions that are installed now
	(echo "# The versions that the tests passed with: pip install -c constraints.txt. Made by 'make constraints'."; \
	 $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//') > constraints.txt

clean:  ## remove what was installed and cached; runs stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
