# On a fresh machine every target first makes the environment in $(VENV); nothing outside this directory is
# changed, but by `make system`.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
READY = $(VENV)/.ready
# With less in it, or the same: what a job needs.
INSTALLED = $(VENV)/.installed

.PHONY: demo system check test test-all ci chaos lint matrix bench report pictures reference site clean

demo: $(INSTALLED) ## run the main job, kill a worker, show the recovery
	$(PY) entrypoints/demo.py

system: ## what the tests need from Debian, if it is missing; needs root, and changes the machine
	tests/system.sh

check: $(READY) lint ## lint, types, generated pages, and every test that needs no real part; in 2 minutes on 2 cores
	$(PY) -m tests.run check

test: $(READY) lint ## the same, and one test of each seam and backend on real parts; in 10 minutes on 2 cores
	$(PY) -m tests.run check seam

test-all: $(READY) ## everything else, once: grids, long waits, benchmarks, the chaos suite's own tools; in an hour
	$(PY) -m tests.run full

ci: $(READY) lint ## `make test`, and a quarter of `make test-all`: another one after each commit
	$(PY) -m tests.run check seam full --quarter

# Each run prints its seed; what fails is run again with fewer faults, and says how to run the fewest that fail.
N ?= 300
SEED := $(or $(SEED),$(shell date +%s))
chaos: $(READY) ## N jobs under the faults of N seeds, and a third as many without etcd; 200 warm restarts, 200 killed writers of checkpoints, 600 kills with copies in memory, outages of 3 minutes, 20,000 jobs in virtual time, 1,600 histories of local saves, 60 kills of jobs on two nodes that save on their own disks, 100,000 fuzzed inputs
	$(PY) -m tests.chaos.seeded --seed $(SEED) --runs $(N)
	$(PY) -m tests.chaos.seeded --seed $(SEED) --runs $$(( ($(N) + 2) / 3 )) --etcd=embedded
	ELASTIC_EXT_TEST_RESTARTS=200 $(PY) -m pytest -q tests/workers/standby/test_standby.py::test_many_warm_restarts_leave_nothing_behind
	ELASTIC_EXT_TEST_KILLS=200 $(PY) -m pytest -q -s tests/checkpoints/writing/test_checkpointer.py::test_killed_writers_lose_nothing_that_was_committed
	ELASTIC_EXT_TEST_KILLS=200 $(PY) -m pytest -q -s tests/checkpoints/memory/test_copies.py::test_killed_ranks_lose_no_copy_that_was_committed
	ELASTIC_EXT_TEST_OUTAGE_S=180 $(PY) -m pytest -q -n 2 tests/rendezvous/test_lost_records.py -k job_outlives
	ELASTIC_EXT_TEST_JOBS=20000 $(PY) -m pytest -q -n 2 --timeout=1800 tests/rendezvous/test_simulated_jobs.py -k random
	ELASTIC_EXT_TEST_HISTORIES=400 $(PY) -m pytest -q -n 2 tests/checkpoints/copying tests/checkpoints/sharing -k histories
	$(PY) -m tests.chaos.kills --nodes=2 --kills=10 --seed=$(SEED)
	ELASTIC_EXT_TEST_FUZZ=100000 $(PY) -m pytest -q tests/chaos/test_fuzz.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Which ones: `make matrix PAIRS="2.14:3.13 newest:3.14"`, or PAIRS="--seam 2.14:3.13" for the tests of the tier `seam` in place of the suite.
matrix: $(READY) ## the short suite on other versions of torch and Python (gigabytes of downloads)
	$(PY) -m tests.matrix $(PAIRS)

bench: $(READY) ## ours against stock torchrun; writes tables, JSON lines and plots to benchmarks/results
	$(PY) benchmarks/report.py --all

report: $(READY) ## the same, only those whose code has changed since; writes benchmarks/results/README.md
	$(PY) benchmarks/report.py

pictures: $(READY) ## make every picture of the pages again: from real jobs, and the plots from their results; best on a quiet machine
	$(PY) -m tests.pictures

reference: $(READY) ## write the generated tables of elastic_ext/docs
	$(PY) -m tests.reference

SITE ?= build/site
site: $(READY) ## the pages as a static site with search, and llms.txt; a dead link or anchor fails it
	$(PY) -m mkdocs build --site-dir $(SITE)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[demo]'
	touch $(INSTALLED)

$(READY): $(INSTALLED)
	$(PY) -m pip install --quiet --editable '.[dev]'
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(VENV)/trainer-2.1.0 kubeflow-trainer-api==2.1.0
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
