# Two commands do everything on a fresh machine with Python 3.11, 3.12 or 3.13, pip and make: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
LATEST := .venv-latest
DOCS := .venv-docs
PEERS := .peers
OBJECTS := .objects
TRAINERS := .trainers
SERVERS := .servers
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PJRT_DEVICE ?= CPU

.PHONY: help setup demo demo-objects test test-all test-times test-matrices test-latest test-objects test-trainers check bench bench-short bench-check
.PHONY: test-versions crash crash-objects crash-ranks test-servers interrupts fuzz soak docs screens selftests lock clean

help:           ## say what there is
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' Makefile | expand -t 20

setup: $(READY) ## make .venv with the pinned packages

$(READY): requirements-dev.txt
$(READY): IMPORTED := torch_xla
$(READY): PYTHON_CHECK := sys.version_info >= (3, 14) and "torch_xla has no packages for Python " + sys.version.split()[0] \
  + " yet. Give another Python, which `uv python install 3.13` brings: make setup PYTHON=$$(uv python find 3.13)"
$(LATEST)/.ready: requirements-latest.txt
$(LATEST)/.ready: IMPORTED := torch
$(LATEST)/.ready: PYTHON_CHECK := 0

$(READY) $(LATEST)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("python >= 3.11 is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	@$(PYTHON) -c 'import sys; sys.exit($(PYTHON_CHECK))'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(@D)/bin/uv pip install --quiet --compile-bytecode --python $(@D)/bin/python --require-hashes -r $(filter %.txt,$^)
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation -e .
	@$(@D)/bin/python -c 'import sys; from neuron_compat.lazy_imports import import_module; sys.tracebacklimit = 0; import_module("$(IMPORTED)")'
	@touch $@

demo: $(READY)  ## train, kill -9 in mid-save, resume, compare
	$(BIN)/python examples/kill_and_resume.py

demo-objects: $(READY) ## the same in a bucket, on a server of this machine that answers as S3 does
	$(BIN)/python -m tests.buckets.s3_server $(BIN)/python examples/kill_and_resume.py --root {bucket}/demo

test: $(READY)  ## all tests but those that take long
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m "not slow"

test-all: $(READY) ## all tests, the slow ones, too
	$(BIN)/python -m pytest -n auto --dist worksteal -q

test-times: $(READY) ## all tests, and a new tests/slow.txt, which says what `make test` leaves out; on a quiet machine
	$(BIN)/python -m pytest -n auto --dist worksteal -q --durations=0 --durations-min=0 | $(BIN)/python -m tests.slow

test-matrices: $(READY) ## the rest of each matrix, of which the other targets run a covering part
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m rest --rest

test-latest: $(LATEST)/.ready ## the tests on the newest torch, in .venv-latest, without torch_xla
	$(LATEST)/bin/python -m pytest -n auto --dist worksteal -q $(ONLY)

$(TRAINERS)/.ready: tests/integrations/requirements.txt requirements-s3fs.txt
$(SERVERS)/.ready: tests/buckets/requirements.txt
$(PEERS)/.ready: benchmarks/requirements.txt requirements-s3fs.txt

$(TRAINERS)/.ready $(SERVERS)/.ready $(PEERS)/.ready: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(@D) --no-deps --require-hashes \
	  $(patsubst %,-r %,$(filter %.txt,$^))
	@touch $@

test-trainers: $(TRAINERS)/.ready $(LATEST)/.ready ## the adapters for trainers, with the trainers themselves
	$(LATEST)/bin/python -m pytest -q tests/integrations

test-servers: $(SERVERS)/.ready ## s3:// against other servers than moto: ministack, and rclone, which is refused
	$(BIN)/python -m pytest -q tests/buckets/test_other_servers.py

test-versions: $(READY) ## some tests with the oldest and the newest dependencies, on Python 3.12 and 3.13. LEG="name ..."
	$(BIN)/python -m tests.versions $(LEG:%=--leg %)

check: $(READY) ## lint, types, architecture, English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_english.py

bench: $(PEERS)/.ready $(LATEST)/.ready ## our saves and loads beside the peers', in 40 quiet minutes; writes docs/measured/performance.md
	$(BIN)/python -m benchmarks.peers --write

bench-short: $(READY) ## what the targets are about, once, in some minutes; writes nothing
	$(BIN)/python -m benchmarks.peers --short --rounds 1

bench-check: $(READY) ## bench-short; fails if a ratio fell a quarter below that of docs/measured/performance.json
	$(BIN)/python -m benchmarks.peers --check

$(OBJECTS)/.ready: tests/objects/requirements.txt $(READY)
	$(BIN)/uv pip install --quiet --link-mode copy --python $(BIN)/python --target $(OBJECTS) --no-deps --require-hashes -r $<
	@touch $@

test-objects: $(OBJECTS)/.ready ## what people train with, against the real packages; writes docs/measured/objects.md. ONLY=package
	PYTHONPATH=.:$(OBJECTS) $(BIN)/python -m tests.objects --write $(if $(ONLY),--only $(ONLY))
	PYTHONPATH=.:$(OBJECTS) $(BIN)/python -m pytest -q tests/objects

crash: $(READY) ## faults at every system call of every save; writes docs/measured/reliability.md. OTHERS=1: of other libraries, too
	$(BIN)/python -m tests.crash.matrix --write
	$(if $(OTHERS),$(BIN)/python -m tests.crash.matrix --write --peers)

crash-objects: $(READY) ## faults at every request of saves to a bucket, N=3000 of them
	$(BIN)/python -m tests.buckets.crash --faults $(or $(N),3000)

crash-ranks: $(READY) ## ranks lost, slow or failing at messages of saves and loads, N=6 of each; writes docs/measured/reliability.md
	$(BIN)/python -m tests.crash.ranks --write --each $(or $(N),6)

interrupts: $(READY) ## Ctrl-C and other exceptions of handlers, at N=300 instants of each call; writes docs/measured/reliability.md
	$(BIN)/python -m tests.crash.interrupts --write --each $(or $(N),300)

fuzz: $(READY)  ## changed files of every kind, 100,000 or N=...; writes docs/measured/reliability.md
	$(BIN)/python -m tests.fuzz.run --inputs $(or $(N),100000) --write

soak: $(READY)  ## saves, kills, a full disk, readers, for 30 minutes or MINUTES=...; writes docs/measured/reliability.md
	$(BIN)/python -m tests.crash.soak --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) --write

$(DOCS)/.ready: requirements-docs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# With --quiet, mkdocs does not count warnings, and a broken link would pass.
docs: $(DOCS)/.ready ## the documents as a site, in build/site; a warning is an error
	$(DOCS)/bin/python docs/site/drawings.py --check
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

screens: $(READY) ## pictures of the pages of xla-ckpt view, in docs/drawings/view, by the Chromium that XLA_CKPT_CHROMIUM names
	$(BIN)/python -m tests.view.screens

selftests: $(READY) ## xla-ckpt selftest in a directory and in a bucket of moto's, in some minutes; writes docs/measured/selftest
	$(BIN)/python -m tests.cli.selftests

lock: $(READY)  ## renew the pins in the requirements-*.txt
	for extra in dev latest; do \
	  $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links --extra $$extra pyproject.toml -o requirements-$$extra.txt || exit 1; \
	done
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links --group docs -o requirements-docs.txt

clean:          ## remove everything that was made
	rm -rf $(VENV) $(LATEST) $(DOCS) $(PEERS) $(OBJECTS) $(TRAINERS) $(SERVERS) .versions
	rm -rf demo_run bench_run build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
