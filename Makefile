# `make run` and `make test` do all set-up on a fresh machine.
#   ARGS="..."   passed through to the program or to pytest
#   TORCH=...    the torch requirement; the default takes a build that runs without a GPU
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: run test check clean

run: $(VENV)/.installed
	$(PY) run.py $(ARGS)

test: $(VENV)/.installed-test
	$(PY) -m pytest --numprocesses auto $(ARGS)

check: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV)

# pip is quiet about progress, loud about errors; torch first, so that nothing pulls another build.
$(VENV)/.installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps "openpi-client>=0.1"  # its pins are old
	touch $@
