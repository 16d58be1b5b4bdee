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

.PHONY: help demo deploy-local deploy-demo test test-processors test-browser test-deployment test-docker lint setup format mutants random-mutants golden-pages \
  protos reproduce bench-shim bench-simulation bench-step bench-coding bench-bytes bench-methods constraints clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(READY)  ## a real private federated run on the data that ships here, with a report
	$(BIN)/fedsieve simulate

# Three at a time, since many of them wait; file by file, the long ones first (tests/conftest.py).
test: $(READY) lint  ## every test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-browser: $(READY)  ## reports and live view in a real Chromium
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { echo "no Chromium here: apt-get install chromium chromium-driver" >&2; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest tests/browser

# What rounds: no result may depend on how one processor adds, nor on how many threads add.
ROUNDED := $(BIN)/python -m pytest -q -n 3 --dist worksteal tests/client tests/common tests/methods tests/server \
  tests/privacy/test_mechanism.py tests/simulations/test_run.py

test-processors: $(READY)  ## the tests of what computes, as on other processors
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(ROUNDED)
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=4 $(ROUNDED)
	ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=4 $(ROUNDED)

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

random-mutants: $(READY)  ## break everything else in 60 small ways that nobody chose: SEED=1, half an hour
	$(BIN)/python -m tests.random_mutants '$(SEED)'

golden-pages: $(READY)  ## the report pages that tests compare, written anew after a change that is meant
	$(BIN)/python -m tests.simulations.golden_pages

deploy-local: $(READY)  ## a deployment as plain processes: TLS, authenticated nodes, daemons, a real training
	$(BIN)/python -m simulations.deploy_demo local

deploy-demo: $(READY)  ## the same in containers; needs Docker and Compose
	$(BIN)/python -m simulations.deploy_demo docker

test-deployment: $(READY)  ## the slow tests of deployments: every process killed, paused sites, memory over 50 rounds, the docs' first run
	$(BIN)/python -m pytest -m slow tests/deployment

test-docker: $(READY)  ## the tests that need a Docker engine
	$(BIN)/python -m pytest -m docker tests/deployment

bench-shim: $(READY)  ## CPU of a message at a site's node: our shim against a ClientApp that imports torch
	$(BIN)/python -m simulations.benchmarks.shim

bench-simulation: $(READY)  ## our Ray engine against a bare loop and against Flower's engine
	$(BIN)/python -m simulations.benchmarks.simulation

bench-step: $(READY)  ## our clipping engine against plain SGD, Opacus, BackPACK and torch.func; QUICK=1 for a glance
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m simulations.benchmarks.step $(if $(QUICK),--quick)

bench-coding: $(READY)  ## our coding of values and indices against zstd and Roaring, in bits and in speed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m simulations.benchmarks.coding

bench-bytes: $(READY)  ## accuracy for the bytes, all systems: takes hours; QUICK=1 for a glance, SHOW=1 for the published runs
	$(BIN)/python -m simulations.benchmarks.bytes $(if $(QUICK),--quick) $(if $(SHOW),--show --published)

bench-methods: $(READY)  ## choosing a million coordinates, recovering from measurements, accounting 10,000 sites
	$(BIN)/python -m simulations.benchmarks.methods

reproduce: $(READY)  ## the papers' tables and figures; takes hours: EXPERIMENTS="table2-dp-cnn-s" for some, QUICK=1 for a glance
	$(BIN)/fedsieve experiments run $(EXPERIMENTS) $(if $(QUICK),--quick)

# grpcio-tools in an environment of its own: what runs needs the generated code alone.
protos:  ## generate client/rpc from site.proto
	$(PYTHON) -m venv build/protos
	build/protos/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.81.1
	build/protos/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. client/rpc/site.proto
	for file in client/rpc/site_pb2.py client/rpc/site_pb2.pyi client/rpc/site_pb2_grpc.py; do \
	  sed -i "1i # Generated by 'make protos' from client/rpc/site.proto: change that instead." $$file; done

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
