# Two commands do everything on a fresh machine with python >= 3.11, pip and make: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PJRT_DEVICE ?= CPU

.PHONY: help setup demo test check bench lock clean

help:           ## say what there is
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' Makefile | expand -t 20

setup: $(READY) ## make .venv with the pinned packages

$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("python >= 3.11 is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements-dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)  ## train, kill -9 in mid-save, resume, compare
	$(BIN)/python examples/kill_and_resume.py

test: $(READY)  ## all tests
	$(BIN)/python -m pytest -n auto --dist worksteal -q

check: $(READY) ## lint, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) ## our saves and loads beside the peers'; writes docs/performance.md
	$(BIN)/python benchmarks/peers.py --write

lock: $(READY)  ## renew the pins in requirements-dev.txt
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links --extra dev pyproject.toml -o requirements-dev.txt

clean:          ## remove everything that was made
	rm -rf $(VENV) demo_run bench_run build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
