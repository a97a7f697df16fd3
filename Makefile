# `make train` and `make test` work from a fresh clone; everything runs inside .venv.
# The newest Python from 3.10 on of the PATH: with it comes the newest megatron-core that runs there (setup.py).
PYTHON ?= $(shell sh tools/find_python.sh)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# An unpinned torch may bring gigabytes of CUDA libraries. May hold more words for pip, such as --index-url.
TORCH  ?= torch==2.13.0
# More words for pip: the newest environment has Triton, whose programs run there without a GPU.
MORE   ?= $(if $(findstring 3.12,$(VENV)),triton==3.7.1)
# Tests on four forks, of which two usually wait, the costly files first (tests/conftest.py). Empty: one at a time.
PARALLEL ?= -q --workers 4

.PHONY: train test check quick nightly costs newest lint kernels bench bench-planner bench-blocks bench-disaggregated docs clean

# Modules are compiled by who imports them: most of what is installed nobody does. That is kept whatever the environment
# says, or each of hundreds of processes would do it anew: three times the work of a run of a few steps.
export PIP_NO_COMPILE = 1
unexport PYTHONDONTWRITEBYTECODE

# What make did not set up itself it leaves as it is: nothing is installed into an environment that somebody named.
# Warnings are ignored for the box in which setuptools announces the end of this mode, which a namespace package needs.
$(READY): setup.py
	test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && touch $(VENV)/.made; }
	@if test -e $(VENV)/.made || test -e $@; then set -ex; \
		$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel; \
		test -z "$(TORCH)" || $(BIN)/python -m pip install --quiet $(TORCH); \
		PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --config-settings editable_mode=compat \
			-e ".[train,dev]" $(MORE); \
		set +x; $(BIN)/python -W ignore -m tools.say_versions; \
		touch $@; \
	else echo "$(VENV) was not set up by make: it is used as it is, nothing is installed into it"; fi

# Trains a GPT on the source files of the running Python's standard library, on 4 CPU ranks; a second run resumes.
train: $(READY)
	PYTHON=$(BIN)/python sh examples/train_cpu.sh

test: kernels
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Has the planner compile nearly all of its inner loops, once: each process of the tests would otherwise do it anew.
kernels: $(READY)
	$(BIN)/dynamic-cp simulate --lengths github --global-batch-size 32 --batches 1 --max-seqlen 8192 \
		--lanes 8 --tp 2 --pp 2 --vpp 2 --search thorough --cp-comm-type auto > /dev/null
	$(BIN)/dynamic-cp plan --lengths github --global-batch-size 32 --max-seqlen 8192 --lanes 8 --tp 2 --pp 2 --vpp 2 \
		--mask lambda:64,512 --bound > /dev/null
	$(BIN)/dynamic-cp plan --lengths github --global-batch-size 32 --max-seqlen 8192 --lanes 4 --tp 2 --pp 2 \
		--policy pool > /dev/null
	$(BIN)/python -m benchmarks.placement --compile

# What a change is tried with, in a minute: lint beside the quick tests. CONTRIBUTING.md says which those are.
check:
	$(MAKE) --no-print-directory -j 2 lint quick

QUICK := not slow
quick: kernels
	$(BIN)/python -m pytest -m "$(QUICK)" $(PARALLEL) $(LEFT_OUT:%=--ignore=tests/unit/%)

# Goes on with the night for 25 minutes: tests that `make test` leaves out, planted faults, other Pythons and releases.
# PIECE=releases for those pieces alone whose names begin so, PIECE=--list for the names.
nightly: kernels
	$(BIN)/python -m tools.night $(PIECE)

# Tests of the planner's rooms and of this folder's own files: neither torch nor megatron-core is in them, so the run on
# one version shows what they show. The newest numpy still makes the plans of tests/property and tests/unit/search.
OF_ONE_VERSION := bounds calibration learning lengths mechanisms memory models packing placement plans pool pricing report \
	$(filter-out test_bench_peers.py,$(patsubst tests/unit/%,%,$(wildcard tests/unit/test_bench_*.py))) \
	test_plant_faults.py test_rooms.py test_size.py test_sources.py

# The other quick tests, and what is marked `of_releases`: parity of many layouts, what releases do wrong, attention of the
# newest TransformerEngine. On Python 3.12 and what megatron-core is newest there; in an environment of its own.
newest:
	@python=$$(sh tools/find_python.sh 3.12); test -z "$$python" && echo "no Python 3.12: not tested with it" || \
		$(MAKE) --no-print-directory VENV=.venv-3.12 PYTHON="$$python" LEFT_OUT="$(OF_ONE_VERSION)" \
			QUICK="not slow or of_releases" quick

# The day's tests, and what each costs into tests/costs.json, failed ones too; what does not run keeps its cost.
costs: kernels
	$(BIN)/python -m pytest --measure-costs tests/costs.json --ignore tests/unit/test_costs.py $(PARALLEL)

bench: $(READY)
	$(BIN)/python benchmarks/dynamic_vs_static.py

# Measures the planner alone (modelled seconds, real planning time) and writes the tables of docs/figures/planner.md.
bench-planner: $(READY)
	$(BIN)/python -m benchmarks.planner

# Compares placed attention with every other way to share attention out (modelled) and writes the tables of docs/figures/attention.md.
bench-blocks: $(READY)
	$(BIN)/python -m benchmarks.blocks

# Compares attention in a pool of all stages with every other way (modelled) and writes the tables of docs/figures/attention.md.
bench-disaggregated: $(READY)
	$(BIN)/python -m benchmarks.disaggregated

# The pages of docs/ as a site in runs/site; warnings are errors. Flags, options and drawings are made anew.
docs: $(READY)
	$(BIN)/python -m tools.flags_page
	$(BIN)/python -m tools.make_drawings
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open runs/site/index.html (its search needs a server: python -m http.server -d runs/site)"

clean:
	rm -rf dynamic_cp/__pycache__/kernels-* $(VENV) .venv-3.12 build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
