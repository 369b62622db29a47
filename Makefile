# make bench   install, fetch the default model, measure, print the table and the report's path
# make test    install, fetch the default model, lint, type-check, run every test
# BENCH_ARGS and PYTEST_ARGS are passed on:  make bench BENCH_ARGS="--labels code"

PYTHON ?= python3
BENCH_ARGS ?=
PYTEST_ARGS ?=

PY := .venv/bin/python
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help install bench test check clean

help:
	@sed -n '/^$$/q;s/^# //p' Makefile

install: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "draftproof needs Python 3.11 or newer as $(PYTHON); try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
# torch alone and pinned first: left to the next line, pip may choose a newer one and its CUDA libraries.
	$(PY) -m pip install -c constraints.txt "$(TORCH)"
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

bench: .venv/.ready
	$(PY) -m draftproof models pull
	$(PY) -m draftproof bench $(BENCH_ARGS)

test: .venv/.ready
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }
	$(PY) -m draftproof models pull
	@$(MAKE) --no-print-directory check
# Two processes, as bits and times are those of two threads each; a class or file stays in one of them, and the
# slow ones come first.
	$(PY) -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

check: .venv/.ready
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# Run folders hold evidence and stay.
clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
