# `make demo` and `make fast` need Linux, Python 3.11 or newer, make and a C compiler. `make test` also needs Java 17,
# PostgreSQL, Chromium, Slurm, iproute2 and npm, which it installs itself as root on Debian and Ubuntu.
#
# All targets work in .venv, which they make and keep. PIP_ARGS is handed to pip, for an index of your own; on Linux, the plain
# index gives a CUDA build of torch that is gigabytes large: see "CPU torch" in README.md.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
MINUTES ?= 60
BIN := $(VENV)/bin
# The suite starts hundreds of processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile all modules that it installs, for a minute. Python compiles those that it imports.
INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
LOCK := requirements/constraints.txt
# One thread of torch in each process: two test processes share two cores, and torch's threads wait by spinning.
# One order of sets in all runs, so that a failure repeats.
PYTEST := OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest
# Quick tests compute and slow tests wait, so four processes use two cores. tests/scheduling.py says which tests stay together,
# and in which order they run.
SUITE := -n 4 -m "not alone"
# These files alone, since collecting all takes a quarter of a minute. A file that is named is collected even where
# tests/conftest.py leaves its folder out, so those that need a GPU are left out here too.
ALONE := -m alone $(shell grep -rl --include="test_*.py" --exclude-dir=gpu "mark\.alone" tests)

FROM ?= ../shared/foreign

.PHONY: help setup system compiled demo test fast record fuzz foreign gpu lint fmt tables docs notebooks site bench lock clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that no other package's wider requirement chooses another build of it.
$(VENV)/.demo: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) $(PIP_ARGS) torch==2.13.0
	$(INSTALL) $(PIP_ARGS) -c $(LOCK) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) $(PIP_ARGS) -c $(LOCK) -e '.[test]'
	@touch $@

setup: $(VENV)/.test  ## make .venv with everything that developing needs

demo: $(VENV)/.demo  ## train an image classifier from a Delta table, here and now
	$(BIN)/footplate demo

system: | $(BIN)/python  ## install Java, PostgreSQL, Chromium, Slurm, iproute2 and Azurite, which tests start, or say which tests lack them
	VENV=$(VENV) tests/system_packages.sh

# Else the four processes of the suite would each compile all modules that they import first.
compiled: setup
	@$(PYTEST) --collect-only -qq > /dev/null || true  # the suite shows the errors

test:  ## lint and the whole suite, with the tests that start real servers
	$(MAKE) --jobs=2 --output-sync=target system compiled lint
	$(PYTEST) $(SUITE)
	$(PYTEST) $(ALONE)

fast: setup  ## the tests that take at most a second and start no server
	$(PYTEST) -x -n 2 --fast

record: setup system compiled  ## run the whole suite, and record which tests are slow and how many passed, for docs/status.md
	rm -f tests/durations.json
	$(PYTEST) --record-durations --record-passed $(SUITE)
	$(PYTEST) --record-durations --record-passed $(ALONE)
	$(MAKE) tables

fuzz: setup  ## random training programs, run in several ways that must agree, for MINUTES=60; then the other random tests
	cd tests && OMP_NUM_THREADS=1 PYTHONPATH=.:.. $(abspath $(BIN))/python -m fuzz --minutes $(MINUTES)
	$(PYTEST) --hypothesis-profile=fuzz -m "not engine and hypothesis" --ignore=tests/fuzz

foreign: setup  ## other projects' tests, from the archives in FROM, compared with tests/foreign/lists
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m foreign --from $(FROM) $(ARGS)

gpu:  ## run and record the tests that need CUDA, and the benchmark, in the environment at hand (PYTHON) with torch for it
	$(PYTHON) -m pytest --record-passed tests/gpu
	$(PYTHON) benchmarks/gpu_train.py --json benchmarks/results/gpu_train.json

lint: setup  ## ruff, the layers (import-linter) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pyright --pythonpath $(BIN)/python

fmt: setup  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: setup  ## write the tables in docs/reference that are made from the code
	cd tests && PYTHONPATH=.:.. $(abspath $(BIN))/python -m tables

docs: setup  ## run what the documents show, and check their links
	$(PYTEST) tests/test_docs.py tests/test_examples.py

notebooks: setup  ## run the notebooks of examples/notebooks (NAMES=1_first_training), and write their outputs into them
	cd tests && PYTHONPATH=.:.. $(abspath $(BIN))/python -m notebooks $(NAMES)

site: setup  ## build the pages and the reference of the code as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

bench: setup  ## the benchmarks, with their peers; figures go to benchmarks/results
	$(BIN)/python benchmarks/step_overhead.py --json benchmarks/results/step_overhead.json
	$(BIN)/python benchmarks/monitor_overhead.py --json benchmarks/results/monitor_overhead.json
	$(BIN)/python benchmarks/ddp_overhead.py --json benchmarks/results/ddp_overhead.json
	$(BIN)/python benchmarks/fsdp_memory.py --json benchmarks/results/fsdp_memory.json
	$(BIN)/python benchmarks/fsdp_memory.py --ranks 4 --json benchmarks/results/fsdp_memory.json
	$(BIN)/python benchmarks/logical_ranks.py --json benchmarks/results/logical_ranks.json
	$(BIN)/python benchmarks/horovod_overhead.py --json benchmarks/results/horovod_overhead.json
	$(BIN)/python benchmarks/replicas.py --json benchmarks/results/replicas.json
	$(BIN)/python benchmarks/startup.py --json benchmarks/results/startup.json
	$(BIN)/python benchmarks/checkpoint_stall.py --json benchmarks/results/checkpoint_stall.json
	bash benchmarks/peers/recovery.sh $(VENV)
	$(BIN)/python benchmarks/recovery.py --json benchmarks/results/recovery.json
	$(BIN)/python benchmarks/replay.py --json benchmarks/results/replay.json
	$(BIN)/python benchmarks/goodput.py --json benchmarks/results/goodput.json
	$(BIN)/python benchmarks/tune.py --json benchmarks/results/tune.json
	$(BIN)/python benchmarks/profiler_overhead.py --json benchmarks/results/profiler_overhead.json
	bash benchmarks/peers/data.sh $(VENV)
	$(BIN)/python benchmarks/data_images.py --json benchmarks/results/data_images.json
	$(BIN)/python benchmarks/data_tabular.py --json benchmarks/results/data_tabular.json
	$(BIN)/python benchmarks/data_tokens.py --json benchmarks/results/data_tokens.json
	$(BIN)/python benchmarks/packing.py --json benchmarks/results/packing.json
	$(BIN)/python benchmarks/group_by_length.py --json benchmarks/results/group_by_length.json
	$(BIN)/python benchmarks/augmentation.py --json benchmarks/results/augmentation.json
	$(BIN)/python benchmarks/plan_accuracy.py --json benchmarks/results/plan_accuracy.json
	$(BIN)/python benchmarks/slurm.py --json benchmarks/results/slurm.json
	$(BIN)/python benchmarks/chaos.py --kills 200 --json benchmarks/results/chaos.json

lock: setup  ## pin the present environment in requirements/constraints.txt
	(echo "# Every package of the environment that Footplate is developed and tested in, pinned. Made by: make lock"; \
	 $(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(torch==|-e|#)' | grep -v 'file:'; \
	 echo "torch==2.13.0") > $(LOCK)

clean:  ## remove the environment and what runs have left
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
