# make demo   trains a real network through the box, on this machine, from nothing
# make test   everything that must hold; what CI runs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml setup.cfg smb/proto/control.proto csrc/build_engine.py $(wildcard csrc/*.[ch]) $(wildcard csrc/*.inc)

.PHONY: demo test lint c-test install clean

demo: $(VENV)/demo-installed
	$(BIN)/smb demo $(DEMO)

test: lint c-test
	$(BIN)/pytest $(TESTS)

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The engine by itself, with -Werror: plain, under address and undefined-behaviour checks, under thread checks.
c-test:
	$(MAKE) --no-print-directory -C tests/c check

install: $(VENV)/installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change to a Python file needs no new installation; a change to the engine rebuilds it.
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	@echo "installing Soft Memory Box into $(VENV)"
	$(PIP) install --editable .
	@touch $@

$(VENV)/demo-installed: $(VENV)/installed examples/demo-requirements.txt
	@echo "installing what the demo needs (PyTorch among it: minutes on a slow line)"
	$(PIP) install --requirement examples/demo-requirements.txt
	@touch $@

$(VENV)/test-installed: $(VENV)/demo-installed tests/requirements.txt
	$(PIP) install --requirement tests/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info smb/_engine*.so smb/proto/*_pb2*
